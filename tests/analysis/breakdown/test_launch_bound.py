"""When a device waits for its host, by hand and on simulated jobs with late hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commtrace.analysis.breakdown.launch_bound import MINUTE_NS, MOST_ZERO_US, REFILL_NS, launch_bound
from commtrace.analysis.breakdown.states import LAUNCHING, UNKNOWN_TIME, State
from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import summarise
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace import schema
from commtrace.trace.spans import Spans

MS = 1_000_000
FULL = 5_000
"""A lead, µs, with much queued."""


def phases(*marks: tuple[int, int, int, int], **columns: Any) -> list[dict[str, Any]]:
    """Forwards from start to end, ms, with the leads at both, µs."""
    return [
        {
            "kind": "forward", "lane": schema.COMPUTE, "start": start * MS, "end": end * MS,
            "start_lead_us": first, "end_lead_us": last, **columns,
        }
        for start, end, first, last in marks
    ]  # fmt: skip


def waited(*rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """When the device of each of these ranks waited for its host, ms; of one rank on its own clock."""
    spans = Spans.from_rows([row for own in rows for row in own], [])
    bounds = np.cumsum([0, *map(len, rows)])
    shift = np.arange(len(rows), dtype=np.int64) * 1_000 * MS
    found = launch_bound(spans, bounds, shift).intervals
    return [(start // MS, end // MS) for start, end in zip(found.start.tolist(), found.end.tolist(), strict=True)]


def test_between_two_marks_at_which_nothing_was_queued_the_device_waited() -> None:
    assert waited(phases((0, 10, 3, 4), (10, 30, 4, FULL), (30, 40, FULL, 5), (40, 50, 5, 3))) == [(0, 10), (40, 50)]


def test_a_queue_that_is_always_full_shows_no_late_host() -> None:
    never_empty = phases((0, 10, MOST_ZERO_US + 1, MOST_ZERO_US + 5), (10, 20, MOST_ZERO_US + 5, MOST_ZERO_US + 1))

    assert waited(never_empty) == []
    assert waited(phases((0, 10, MOST_ZERO_US, MOST_ZERO_US))) == [(0, 10)]


def test_the_error_of_the_clock_cancels() -> None:
    for offset in (-40, 0, 60):
        rows = phases(*((at, at + 1, offset + 3, offset + 4) for at in range(4)), (4, 9, offset + 30, offset + 31))
        assert waited(rows) == [(0, 4)]


def test_each_rank_and_minute_has_a_zero_of_its_own() -> None:
    minute = MINUTE_NS // MS
    drifted = phases((0, 10, 2, 2), (20, 30, FULL, FULL), (minute, minute + 10, 90, 90))

    assert waited(drifted) == [(0, 10), (minute, minute + 10)]
    assert waited(phases((0, 10, 2, 2)), phases((0, 10, 70, 70))) == [(0, 10), (1_000, 1_010)]


def test_one_mark_in_a_hundred_is_no_zero() -> None:
    marks = [(at, at + 1, FULL, FULL) for at in range(0, 400, 2)]
    marks[7] = (14, 15, 2, 2)  # 2 of 400

    assert waited(phases(*marks)) == []


@pytest.mark.parametrize("lead", [schema.UNKNOWN_LEAD, schema.SYNCHRONIZED_LEAD])
def test_time_that_ends_with_a_mark_that_says_nothing_does_not_count(lead: int) -> None:
    rows = phases((0, 10, 2, lead), (20, 30, 2, 2))

    assert waited(rows) == ([(0, 30)] if lead == schema.UNKNOWN_LEAD else [(10, 30)])


def test_a_moment_after_a_synchronisation_is_not_late_but_longer_is() -> None:
    short, long = REFILL_NS, REFILL_NS + 1

    def after(length_ns: int, lead: int) -> int:
        rows = phases((0, 10, FULL, FULL), (20, 20, lead, 3), (40, 50, 3, 2))
        rows[1]["end"] += length_ns
        spans = Spans.from_rows(rows, [])
        return launch_bound(spans, np.array([0, 3]), np.zeros(1, np.int64)).intervals.before(np.array([30 * MS]))[0]

    for lead in (2, schema.SYNCHRONIZED_LEAD):
        assert after(short, lead) == 10 * MS - short  # what follows it, up to 30 ms
        assert after(long, lead) == 10 * MS


def test_nothing_is_said_of_the_inside_of_a_replay() -> None:
    replay = phases((10, 20, 2, 2), kind="replay", seq=1)
    first = phases((10, 20, 2, 2), kind="replay", seq=0)

    assert waited(phases((0, 10, 2, 2)) + replay) == [(0, 10)]
    assert waited(phases((0, 10, 2, FULL)) + first + phases((20, 30, FULL, 2))) == []


@pytest.mark.parametrize(("queued_us", "waits"), [(0, True), (FULL, False)])
def test_a_host_that_gets_ahead_while_the_device_waits_for_communication_may_be_late(
    queued_us: int, waits: bool
) -> None:
    behind = queued_us + 12_000
    stall = phases((10, 22, queued_us + 2, behind), kind="stall")
    rows = [*phases((0, 10, 2, queued_us + 2)), *stall, *phases((22, 30, behind, 3), (30, 31, 3, 2))]

    assert waited(rows) == ([(0, 10), (22, 31)] if waits else [(30, 31)])


def test_a_lead_that_is_too_long_to_be_told_shows_nothing() -> None:
    most = schema.MOST_LEAD_US
    rows = [*phases((0, 10, 2, 2)), *phases((10, 90, 2, most), kind="stall"), *phases((90, 95, most, 2))]

    assert waited(rows) == [(0, 10)]


def test_communication_has_no_part_in_it() -> None:
    rows = phases((0, 10, 2, 2)) + phases((10, 90, 2, 2), kind="collective", lane=schema.COMMUNICATION)

    assert waited(rows) == [(0, 10)]


def job(*faults: str, **options: Any) -> Job:
    return Job(**{"dp": 4, "steps": 10, **options, "faults": tuple(map(Fault.parse, faults))})


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        (("late-host=1:1.3",), {}),
        (("late-host=0,2:1.1", "slow-rank=3:1.2"), {}),
        (("late-host=1:1.5",), {"pp": 2, "dp": 2}),
        (("late-host=1:4",), {"tp": 2, "dp": 2}),
        (("late-host=3:2.5", "slow-rank=6:1.5"), {"tp": 2, "pp": 2, "dp": 2}),
        (("late-host=0,1,2,3:2@4:9",), {}),
        (("late-host=2:2", "gc=2:30"), {"microbatches": 3}),
        (("slow-rank=1:1.5",), {}),
        (("slow-backward=2:1.5",), {"pp": 2}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_share_is_right_within_two_percent(faults: tuple[str, ...], options: dict[str, Any], seed: int) -> None:
    synthetic = synthesize(job(*faults, seed=seed, **options))
    truth = {one["rank"]: one for one in synthetic.truth["launch_bound"]}
    divided = analyse(synthetic.run).partition
    columns = {phase: LAUNCHING.index(State("compute", phase)) for phase in ("forward", "backward", "optimizer")}

    for rank in range(synthetic.job.world_size):
        rows = divided.rank == rank
        steps, wall = divided.step[rows], divided.wall_ns[rows].sum()
        for phase, column in columns.items():
            expected = np.array(truth[rank][f"{phase}_ns"])[steps].sum() if rank in truth else 0
            whole = divided.total("compute", phase)[rows].sum()
            assert divided.launch_bound_ns[rows, column].sum() / whole == pytest.approx(expected / whole, abs=0.02)
        expected = sum(np.array(truth[rank][f"{phase}_ns"])[steps].sum() for phase in columns) if rank in truth else 0
        assert divided.launch_bound_of_steps[rows].sum() / wall == pytest.approx(expected / wall, abs=0.02)


def test_gaps_before_phases_count_by_their_end() -> None:
    synthetic = synthesize(job("late-launch=1:20"))
    divided = analyse(synthetic.run).partition

    between = divided.launch_bound_ns[:, LAUNCHING.index(State("other"))]
    assert (between[divided.rank == 1] == 20 * MS).all()
    assert not between[divided.rank != 1].any()


def without_leads(synthetic: Any) -> Any:
    run = synthetic.run
    for trace in run.ranks.values():
        trace.spans.start_lead_us[:] = schema.UNKNOWN_LEAD
        trace.spans.end_lead_us[:] = schema.UNKNOWN_LEAD
    return run


def test_without_leads_it_is_not_known_and_not_zero() -> None:
    run = without_leads(synthesize(job("late-host=1:1.3", steps=12)))

    assert (analyse(run).partition.launch_bound_ns == UNKNOWN_TIME).all()
    summary = summarise(run)
    assert [rank.to_json()["launch_bound_ns"] for rank in summary.ranks] == [None] * 4
    assert summary.launch_bound == ""
    (verdict,) = summary.slow
    assert verdict.cause == "compute"
    assert "queued" not in verdict.evidence


def test_a_summary_says_who_waits_for_its_host() -> None:
    summary = summarise(synthesize(job("late-host=1:1.3", jitter=0.0)).run)

    assert summary.launch_bound == (
        "Launch-bound: the device of rank 1 waits for its host in 82% of the step (the typical rank: 0%): 100% of the "
        "forward, 100% of the backward."
    )
    assert summarise(synthesize(job("slow-rank=1:1.3")).run).launch_bound == ""
