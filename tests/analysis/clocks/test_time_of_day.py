"""Steps in time of day, on the wall clock of the host that ran them."""

from __future__ import annotations

from commtrace.analysis.clocks.align import align, apply
from commtrace.analysis.clocks.time_of_day import clock_time, date_and_time, iso_utc, step_begin_ns, step_end_ns
from commtrace.trace.metadata import ClockAnchor
from tests.factory import EPOCH_NS, make_run, span
from tests.pipeline_factory import Clock, PipelineJob


def test_an_instant_is_told_in_utc_and_by_iso_8601() -> None:
    at = 1_700_000_000_512_999_999
    assert iso_utc(at) == "2023-11-14T22:13:20.512+00:00"
    assert clock_time(at) == "22:13:20 UTC"


def test_the_day_of_the_end_is_told_where_it_is_another_one() -> None:
    begin, late, tomorrow = (1_700_000_000_000_000_000 + hours * 3_600 * 10**9 for hours in (0, 1, 2))
    assert date_and_time(begin) == "2023-11-14 22:13:20 UTC"
    assert date_and_time(begin, late) == "2023-11-14 22:13:20–23:13:20 UTC"
    assert date_and_time(begin, tomorrow) == "2023-11-14 22:13:20–2023-11-15 00:13:20 UTC"


def test_a_step_has_one_time_of_day_whatever_the_clocks_of_the_hosts_read() -> None:
    nodes = {rank: f"node{rank % 2}" for rank in range(4)}
    ahead = Clock(offset_ns=7 * 3_600 * 10**9)
    job = PipelineJob(2, 4, data_parallel=2, steps=12, nodes=nodes, clocks={"node1": ahead}, start_ns=10**9)
    run = job.run()
    aligned = apply(run, align(run))

    assert step_begin_ns(aligned, 0) == EPOCH_NS + 10**9
    assert step_end_ns(aligned, 11) == EPOCH_NS + 10**9 + 12 * job.step_ns


def test_a_run_without_a_wall_clock_has_no_time_of_day() -> None:
    run = make_run({0: [span("step", 5, 9, step=3)]}, anchors={0: ClockAnchor(0, 0)})

    assert (step_begin_ns(run, 3), step_end_ns(run, 3)) == (None, None)
    assert step_begin_ns(run, 4) is None
