"""Which steps ranks tell row by row, that all choose the same ones, and that what cannot be is refused."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from commtrace.live.monitoring import sampled_steps
from commtrace.live.monitoring.sampled_steps import MOST_STEPS, SampledSteps, SampleError, StepSample, StepSampler
from commtrace.live.monitoring.wire_types import RankRange, WireGroup
from commtrace.live.rank import LiveRank
from commtrace.trace import schema
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN
from tests.factory import group, metadata
from tests.trace.rows import row

DP = group("dp", 0, 1)
MS = 1_000_000
OF_THE_JOB = 2


def live_rank(number: int, world_size: int = OF_THE_JOB) -> LiveRank:
    rank = LiveRank(metadata(number, world_size=world_size, node="node1"), Path("run"))
    rank.marks.read("process_group", DP)
    rank.marks.read("topology", {"coordinates": {"dp": number}, "parallel": {"dp": 2}, "first_step": 3})
    return rank


def rows_of(step: int, modules: int = 0) -> list[Row]:
    """A step of 100 ms with a forward, a collective, and modules that a replay does not look at."""
    begin = step * 100 * MS
    reduced = {"name": "all_reduce", "lane": schema.COMMUNICATION, "group": DP.id, "seq": step, "id": step}
    return [
        row(kind=schema.STEP, name="step", start=begin, end=begin + 100 * MS, step=step),
        row(kind=schema.FORWARD, start=begin, end=begin + 60 * MS, step=step, microbatch=0),
        row(kind=schema.COLLECTIVE, start=begin + 60 * MS, end=begin + 90 * MS, step=step, **reduced),
        *(row(kind=schema.MODULE, name=f"layer {at}", start=begin, end=begin + MS, step=step) for at in range(modules)),
    ]


def sampled(number: int, steps: range, world_size: int = OF_THE_JOB) -> StepSample:
    sampler = StepSampler(live_rank(number, world_size))
    for step in steps:
        sampler.add(step, rows_of(step, modules=5))
    sample = sampler.take()
    assert sample is not None
    return sample


def test_ranks_tell_whole_steps_and_the_monitor_reads_the_same_rows() -> None:
    steps = SampledSteps(OF_THE_JOB)
    for rank in (0, 1):
        message = msgspec.json.encode(sampled(rank, range(10, 20)))
        assert len(message) < 1_500
        steps.take(rank, "node1", msgspec.json.decode(message, type=StepSample))
    run = steps.newest_run()
    assert run is not None
    trace = run.ranks[1]
    assert np.unique(trace.spans.step).tolist() == list(range(10, 20))
    assert len(trace.spans) == 30  # modules are left out
    assert trace.groups == {DP.id: DP}
    assert (trace.coordinates, trace.parallel, trace.first_step) == ({"dp": 1}, {"dp": 2}, 3)
    last = trace.spans.take(trace.spans.kind == schema.COLLECTIVE)
    assert (run.names[last.name[-1]], last.start[-1], last.end[-1]) == ("all_reduce", 1_960 * MS, 1_990 * MS)


def test_steps_that_a_power_of_two_divides_are_sampled_of_many() -> None:
    steps = SampledSteps(OF_THE_JOB)
    steps.take(0, "node1", sampled(0, range(101, 180)))
    steps.take(1, "node1", sampled(1, range(99, 184)))  # its window has other bounds
    run = steps.newest_run()
    assert run is not None
    assert np.unique(run.ranks[0].spans.step).tolist() == list(range(104, 180, 8))
    assert len(np.unique(run.ranks[1].spans.step)) == len(range(104, 180, 8)) <= MOST_STEPS


def test_no_more_rows_are_told_than_the_monitor_of_a_large_job_can_replay() -> None:
    ranks = 10_000
    steps = SampledSteps(ranks)
    steps.take(0, "node1", sampled(0, range(64), ranks))  # 20 rows a rank: 6 steps of 3, of 64 every 16th
    assert [one.steps.tolist() for one in steps._sampled[0]] == [[0, 16, 32, 48]]


def test_of_rows_that_fill_more_than_a_message_every_second_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sampled(0, range(16))
    monkeypatch.setattr(sampled_steps, "_MOST_BYTES", len(whole.rows) - 1)
    steps = SampledSteps(OF_THE_JOB)
    steps.take(0, "node1", sampled(0, range(16)))
    assert [one.steps.tolist() for one in steps._sampled[0]] == [list(range(0, 16, 2))]


def test_no_more_steps_are_replayed_than_before_if_more_are_told() -> None:
    steps = SampledSteps(OF_THE_JOB)
    for rank in (0, 1):
        steps.take(rank, "node1", sampled(rank, range(30)))
    run = steps.newest_run()
    assert run is not None
    assert np.unique(run.ranks[0].spans.step).tolist() == list(range(0, 30, 2))
    assert steps.durations().steps.tolist() == list(range(30))


def test_durations_are_those_of_steps_that_all_ranks_told() -> None:
    steps = SampledSteps(OF_THE_JOB)
    assert steps.durations().steps.tolist() == []
    steps.take(0, "node1", sampled(0, range(4, 12)))
    assert steps.durations().steps.tolist() == []
    steps.take(1, "node1", sampled(1, range(6, 14)))
    durations = steps.durations()
    assert durations.steps.tolist() == list(range(6, 12))
    assert durations.ns.tolist() == [[100 * MS] * 6] * 2
    assert durations.first_step == 3


def test_the_oldest_rows_are_forgotten_but_for_those_of_eight_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_steps, "_MOST_ROWS_OF_RANK", 30)
    steps = SampledSteps(OF_THE_JOB)
    for first in range(0, 50, 10):
        steps.take(0, "node1", sampled(0, range(first, first + 10)))  # 3 rows a step
    assert [one.steps.tolist() for one in steps._sampled[0]] == [list(range(30, 40)), list(range(40, 50))]
    for first in range(50, 60, 2):
        steps.take(0, "node1", sampled(0, range(first, first + 2)))
    assert [int(one.steps[0]) for one in steps._sampled[0]] == [40, 50, 52, 54, 56, 58]


def test_a_step_with_too_many_rows_is_not_told() -> None:
    sampler = StepSampler(live_rank(0))
    sampler.add(0, [row(step=0)] * 11_000)
    assert sampler.take() is None


def test_older_steps_are_looked_at_again_until_there_are_enough() -> None:
    steps = SampledSteps(OF_THE_JOB)
    seen = []
    for begin in range(0, 30, 3):
        for rank in (0, 1):
            steps.take(rank, "node1", sampled(rank, range(begin, begin + 3)))
        run = steps.newest_run()
        seen.append([] if run is None else np.unique(run.ranks[0].spans.step).tolist())
    assert seen[:2] == [[], []]
    assert seen[2:4] == [list(range(9)), list(range(4, 12))]
    assert seen[-1] == list(range(22, 30))


def test_nothing_is_replayed_twice_nor_while_a_rank_tells_nothing() -> None:
    steps = SampledSteps(OF_THE_JOB)
    steps.take(0, "node1", sampled(0, range(10)))
    assert steps.newest_run() is None
    steps.take(1, "node1", sampled(1, range(10)))
    assert steps.newest_run() is not None
    assert steps.newest_run() is None


def packed(**columns: int) -> bytes:
    values = [columns.get(name, 0) for name in DTYPE_OF_COLUMN]
    return zlib.compress(np.array(values, np.int64).tobytes())


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (b"nonsense", "cannot be read"),
        (zlib.compress(bytes(7)), "torn"),
        (zlib.compress(bytes(160 * 5_000)), "more rows"),
        (packed()[:-3], "torn"),
        (packed(kind=100), "a kind that"),
        (packed(kind=-1), "an impossible row"),
        (packed(name=1), "a name that"),
        (packed(name=-9), "a name that"),
        (packed(step=2**40), "a step that"),
        (packed(start=5, end=4), "an impossible row"),
        (packed(start=-(2**63)), "an impossible row"),
        (packed(peer=OF_THE_JOB), "an impossible row"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows: bytes, complaint: str) -> None:
    sample = sampled(0, range(2))._replace(rows=rows, words=("all_reduce",))
    with pytest.raises(SampleError, match=complaint):
        SampledSteps(OF_THE_JOB).take(0, "node1", sample)


def test_groups_with_ranks_that_the_job_does_not_have_are_refused() -> None:
    with pytest.raises(SampleError, match="ranks that the job does not have"):
        SampledSteps(1).take(0, "node1", sampled(0, range(2), world_size=1))


def test_members_of_groups_are_kept_once_and_not_without_bound() -> None:
    steps, sample = SampledSteps(100), sampled(0, range(2), world_size=100)

    def with_groups(begins: range) -> StepSample:
        groups = tuple(
            WireGroup(at, RankRange(begin, 100, step), (), 0, "dp")
            for at, (begin, step) in enumerate((begin, step) for begin in begins for step in range(1, 9))
        )
        return sample._replace(groups=groups)

    for _ in range(20):
        steps.take(0, "node1", with_groups(range(8)))  # 64 groups of up to 100 ranks
    for begin in (8, 16, 24, 32, 40):
        steps.take(0, "node1", with_groups(range(begin, begin + 8)))
    with pytest.raises(SampleError, match="too many members"):
        steps.take(0, "node1", with_groups(range(48, 56)))
