"""Clocks of hosts are brought together from the ends of collectives alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commtrace.analysis.clocks.align import COLLECTIVE_ENDS, NOT_ALIGNED, SHARED_CLOCK, align, apply
from commtrace.analysis.clocks.fit import observe
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, p2p, span
from tests.pipeline_factory import Clock, PipelineJob

SECOND = 1_000_000_000
MICROSECOND = 1_000


def noisy_job(clocks: list[Clock], *, seconds: int = 600, every: float = 0.5, seed: int = 0) -> Run:
    """One rank per clock; all_reduces whose ends are seen with 5 µs of jitter, 1 % of them late by up to 50 ms.

    One row in ten is missing.
    """
    random = np.random.default_rng(seed)
    world = group("dp", *range(len(clocks)))
    rows: dict[int, list[Row]] = {rank: [] for rank in range(len(clocks))}
    for seq, true_end in enumerate(np.arange(SECOND, seconds * SECOND, int(every * SECOND))):
        for rank, clock in enumerate(clocks):
            seen = true_end + random.normal(0, 5 * MICROSECOND)
            if random.random() < 0.01:
                seen += random.uniform(0, 50_000 * MICROSECOND)
            start = true_end - random.integers(1, 5_000) * MICROSECOND
            if random.random() < 0.9:
                times = clock.read(int(start)), clock.read(max(int(seen), int(start)))
                rows[rank].append(collective("all_reduce", world, seq, *times))
    return make_run(rows, [world], nodes={rank: f"node{rank}" for rank in rows})


def errors_ns(run: Run, clocks: list[Clock], seconds: int) -> np.ndarray:
    """Error of the aligned clocks against clock 0, sampled over the run."""
    alignment = align(run)
    true_times = np.linspace(0, seconds * SECOND, 1_000).astype(np.int64)
    by_host = {clock.host: clock for clock in alignment.hosts}
    reference = int(alignment.hosts[0].host.removeprefix("node"))
    expected = np.array([clocks[reference].read(int(time)) for time in true_times])
    aligned = [
        by_host[f"node{rank}"].to_reference(np.array([clock.read(int(time)) for time in true_times]))
        for rank, clock in enumerate(clocks)
    ]
    errors: np.ndarray = np.abs(np.stack(aligned) - expected)
    return errors


def test_ranks_of_one_host_share_a_clock() -> None:
    run = PipelineJob(2, 2).run()
    alignment = align(run)
    assert alignment.to_json() == {
        "method": SHARED_CLOCK,
        "observations": 0,
        "residual_ns": {"p50": 0, "p99": 0, "max": 0},
        "hosts": [{"host": "node0", "offset_ns": 0, "drift_ppm": 0.0, "steps": []}],
        "refused": None,
    }
    assert apply(run, alignment) is run


@pytest.mark.parametrize("seed", range(5))
def test_offset_and_drift_are_recovered_through_jitter_and_outliers(seed: int) -> None:
    random = np.random.default_rng(seed)
    clocks = [
        Clock(int(random.uniform(-10, 10) * SECOND), float(random.uniform(-100, 100)))
        for _ in range(int(random.integers(2, 6)))
    ]
    run = noisy_job(clocks, seed=seed)
    assert np.quantile(errors_ns(run, clocks, 600), 0.99) < 20 * MICROSECOND
    alignment = align(run)
    assert alignment.method == COLLECTIVE_ENDS
    assert alignment.residual_ns["p50"] < 15 * MICROSECOND
    assert alignment.residual_ns["max"] > 1_000 * MICROSECOND  # the outliers are in the residual, not hidden


def test_clocks_of_different_boots_may_be_days_apart() -> None:
    clocks = [Clock(90 * 86_400 * SECOND, 40.0), Clock(3 * SECOND, -60.0)]
    assert np.quantile(errors_ns(noisy_job(clocks), clocks, 600), 0.99) < 20 * MICROSECOND


def test_few_steps_are_enough() -> None:
    clocks = [Clock(0, 0.0), Clock(-7 * SECOND, 80.0)]
    run = noisy_job(clocks, seconds=12)
    assert np.quantile(errors_ns(run, clocks, 12), 0.99) < 20 * MICROSECOND


def test_hosts_that_meet_only_through_others_are_connected() -> None:
    left, right = group("dp", 0, 1), group("dp", 1, 2)
    ahead = {0: 0, 1: 5 * SECOND, 2: -3 * SECOND}
    rows: dict[int, list[Row]] = {0: [], 1: [], 2: []}
    for seq in range(20):
        for where in (left, right):
            for rank in where.ranks:
                end = seq * SECOND + ahead[rank]
                rows[rank].append(collective("all_reduce", where, seq, end - 10, end))
    alignment = align(make_run(rows, [left, right], nodes={0: "a", 1: "b", 2: "c"}))
    offsets = {clock.host: clock.offset_ns for clock in alignment.hosts}
    assert offsets["b"] - offsets["a"] == 5 * SECOND
    assert offsets["c"] - offsets["a"] == -3 * SECOND
    assert alignment.observations == 40
    assert alignment.residual_ns == {"p50": 0, "p99": 0, "max": 0}


def test_unconnected_hosts_are_refused_with_the_reason() -> None:
    left, right = group("dp", 0, 1), group("dp", 2, 3)
    rows = {rank: [collective("all_reduce", left if rank < 2 else right, 0, 0, 10)] for rank in range(4)}
    run = make_run(rows, [left, right], nodes={0: "a", 1: "a", 2: "b", 3: "b"})
    alignment = align(run)
    assert alignment.method == NOT_ALIGNED
    assert alignment.refused is not None
    assert "connects b with the other hosts" in alignment.refused
    assert alignment.to_json()["residual_ns"] is None
    assert apply(run, alignment) is run


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "p2p", "name": "recv", "peer": 0},
        {"name": "broadcast"},
        {"name": "all_to_all", "self_bytes": 12},
    ],
)
def test_operations_that_do_not_end_together_are_no_observations(row: Row) -> None:
    where = group("dp", 0, 1)
    rows = {rank: [{**collective("all_reduce", where, 0, 0, 10), **row}] for rank in (0, 1)}
    alignment = align(make_run(rows, [where], nodes={0: "a", 1: "b"}))
    assert alignment.method == NOT_ALIGNED
    assert alignment.observations == 0


def test_an_operation_that_never_ended_is_no_observation() -> None:
    where = group("dp", 0, 1)
    rows = {rank: [collective("all_reduce", where, 0, 0, 0, id=1)] for rank in (0, 1)}
    run = make_run(rows, [where], nodes={0: "a", 1: "b"}, details={1: '{"unfinished": true}'})
    assert align(run).refused is not None


def test_the_reference_is_the_host_that_began_first_by_the_wall_clock() -> None:
    where = group("dp", 0, 1)
    rows = {
        0: [collective("all_reduce", where, 0, 50, 100)],
        1: [span("forward", 20, 30), collective("all_reduce", where, 0, 50, 100)],
    }
    alignment = align(make_run(rows, [where], nodes={0: "late", 1: "early"}))
    assert [clock.host for clock in alignment.hosts] == ["early", "late"]


def test_a_receive_never_ends_before_its_send_starts() -> None:
    """Host b sees every collective's end 300 ns late; the messages between the hosts show it."""
    where = group("pp", 0, 1)
    rows: dict[int, list[Row]] = {0: [], 1: []}
    for seq in range(10):
        begin = seq * SECOND
        rows[0] += [p2p("send", where, 1, seq, begin, begin + 60)]
        rows[1] += [p2p("recv", where, 0, seq, begin, begin + 60)]
        rows[0] += [collective("all_reduce", where, seq, begin + 900, begin + 1_000)]
        rows[1] += [collective("all_reduce", where, seq, begin + 900, begin + 1_300)]
    run = make_run(rows, [where], nodes={0: "a", 1: "b"})
    aligned = apply(run, align(run))
    sends, receives = aligned.ranks[0].spans, aligned.ranks[1].spans
    assert (receives.end[receives.kind == 7] >= sends.start[sends.kind == 7]).all()


def test_aligned_spans_keep_their_order_and_their_metadata() -> None:
    job = PipelineJob(2, 4, nodes={0: "a", 1: "b"}, clocks={"b": Clock(5 * SECOND, 50.0)}, transfer_ns=1_000)
    run = job.run()
    aligned = apply(run, align(run))
    truth = replace(job, clocks={}).run()
    for rank, trace in aligned.ranks.items():
        assert trace.metadata == run.ranks[rank].metadata
        assert (trace.spans.end >= trace.spans.start).all()
        np.testing.assert_allclose(trace.spans.start, truth.ranks[rank].spans.start, atol=2_000)


def test_an_observation_has_the_bounds_that_no_member_leaves_before_all_have_arrived() -> None:
    """Of three ranks on one host and one on another, whose clock is 1,000 ahead."""
    world = group("dp", 0, 1, 2, 3)
    times = {0: (10, 95), 1: (50, 91), 2: (20, 99), 3: (1_070, 1_093)}
    run = make_run(
        {rank: [collective("all_reduce", world, 0, *both)] for rank, both in times.items()},
        [world],
        nodes={0: "node0", 1: "node0", 2: "node0", 3: "node1"},
    )
    keys = sorted({trace.clock_key for trace in run.ranks.values()})
    seen = observe(run, keys)
    assert (seen.time_a.tolist(), seen.time_b.tolist()) == ([95], [1_093])
    assert (seen.least.tolist(), seen.most.tolist()) == ([50 - 1_093], [91 - 1_070])
