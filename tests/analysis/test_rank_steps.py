from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis import rank_steps as module
from commtrace.analysis.chain import analyse
from commtrace.analysis.rank_steps import QUANTITIES, RankSteps, rank_steps
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.windows.run import OpenedRun
from commtrace.synth import Fault, Job, synthesize
from tests.factory import collective, group, make_run, span
from tests.pipeline_factory import PipelineJob

MIB = 1 << 20


def sums(steps: list[int], values: list[list[int]]) -> RankSteps:
    """Steps of two ranks; ``values`` are the wall times."""
    step = np.array(steps, np.int64)
    columns = np.zeros((2, len(steps), len(QUANTITIES)), np.int64)
    columns[:, :, QUANTITIES.index("steps")] = 1
    columns[:, :, QUANTITIES.index("wall")] = values
    return RankSteps(np.array([0, 1]), step, step, step, columns)


def test_the_sums_of_a_rank_are_those_of_the_summary() -> None:
    job = PipelineJob(stages=2, microbatches=4, data_parallel=2, transfer_ns=100_000, all_reduce_ns=500_000, steps=4)
    analysis = analyse(job.run())

    times = rank_steps(analysis)

    assert (times.ranks.tolist(), times.first.tolist()) == ([0, 1, 2, 3], [1, 2, 3])
    assert (times.of("steps") == 1).all()
    for place, rank in enumerate(summarise_steps(OpenedRun.of(analysis)).ranks):
        assert times.of("wall")[place].sum() // 3 == rank.wall_ns
        assert times.of("compute")[place].sum() // 3 == rank.total("compute")
        assert times.of("bubble")[place].sum() // 3 == pytest.approx(rank.total("bubble"), abs=1)
        exposed = times.of("wait")[place].sum() + times.of("transfer")[place].sum()
        assert exposed // 3 == pytest.approx(rank.part("exposed"), abs=1)


def test_busbw_is_of_large_calls_after_the_last_member() -> None:
    everyone = group("dp", 0, 1)
    rows = {
        rank: [
            span("step", 0, 10_000_000, step=0),
            collective("all_reduce", everyone, 0, 1_000_000 * rank, 3_000_000, bytes=4 * MIB, step=0),
            collective("all_reduce", everyone, 1, 4_000_000, 5_000_000, bytes=1024, step=0),
        ]
        for rank in (0, 1)
    }

    times = rank_steps(analyse(make_run(rows, [everyone]), "0"))

    assert times.of("bus_bytes")[:, 0].tolist() == [4 * MIB] * 2  # 2(n − 1)/n = 1
    assert times.of("bus_ns")[:, 0].tolist() == [2_000_000] * 2


def test_a_network_that_is_slow_for_a_while_is_seen_step_by_step() -> None:
    """What leaves node 1 takes four times as long in steps 4 to 7; what stays in a node does not."""
    job = Job(
        tp=2, dp=2, gpus_per_host=2, microbatches=2, layers=2, steps=12, sequence=8192, jitter=0.0,
        faults=(Fault.parse("slow-network=1:4@4:8"),),
    )  # fmt: skip

    times = rank_steps(analyse(synthesize(job).run))
    busbw = times.of("bus_bytes") / times.of("bus_ns")

    assert times.first.tolist() == [*range(1, 12)]
    usual = np.median(busbw[:, :3], axis=1, keepdims=True)
    change = busbw / usual
    degraded = (times.first >= 4) & (times.first < 8)
    assert (change[:, degraded] < 0.9).all()
    assert change[:, ~degraded] == pytest.approx(1.0, abs=0.02)


def test_windows_add_up() -> None:
    both = sums([1, 2], [[10, 20], [30, 40]]) + sums([3], [[50], [60]])

    assert both.first.tolist() == [1, 2, 3]
    assert both.of("wall").tolist() == [[10, 20, 50], [30, 40, 60]]


def test_neighbours_of_many_steps_become_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 3)
    steps = [*range(1, 8)]
    parts = [sums([step], [[step], [10 * step]]) for step in steps]

    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = one_by_one + part
    at_once = sums(steps, [steps, [10 * step for step in steps]]).bounded()

    for times in (one_by_one, at_once):
        assert list(zip(times.first.tolist(), times.last.tolist(), strict=True)) == [(1, 3), (4, 7)]
        assert times.of("steps")[0].tolist() == [3, 4]
        assert times.of("wall").tolist() == [[6, 22], [60, 220]]
        assert times.blocks_of(np.array([2, 4, 7])).tolist() == [0, 1, 1]


def test_fewer_blocks_are_kept_of_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CELLS", 2)

    assert sums([4, 5], [[1, 2], [3, 4]]).bounded().of("wall").tolist() == [[3], [7]]
