"""Steps that nothing marked, from the period of communication: right where there is one, none where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.steps.inference import infer_steps
from commtrace.analysis.summary import summarise
from commtrace.trace import schema
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, span

WORLD = group("world", 0, 1)
DURATION, GAP, COMPUTE = 10, 2, 100


def iteration(*sizes: int) -> list[tuple[int, int]]:
    """Sizes of an iteration's all_reduces, each with the time before it: the first one comes after the compute."""
    return [(size, GAP if place else COMPUTE) for place, size in enumerate(sizes)]


def recorded(sequence: Sequence[tuple[int, int]], late_ns: int = 0) -> list[Row]:
    """One rank's rows; ids and sequence numbers count up."""
    rows, now = [], late_ns
    for seq, (size, before) in enumerate(sequence):
        now += before
        rows.append(collective("all_reduce", WORLD, seq, now, now + DURATION, id=seq, bytes=size))
        now += DURATION
    return rows


def job(sequence: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]] | None = None) -> Run:
    return make_run({0: recorded(sequence), 1: recorded(sequence if other is None else other, late_ns=1)}, [WORLD])


def steps(run: Run | None, rank: int = 0) -> list[tuple[int, int, int]]:
    assert run is not None
    spans = run.ranks[rank].spans
    return [
        (int(spans.step[row]), int(spans.start[row]), int(spans.end[row]))
        for row in range(len(spans))
        if spans.kind[row] == schema.STEP
    ]


def sizes_of_steps(run: Run | None) -> list[list[int]]:
    assert run is not None
    spans = run.ranks[0].spans
    rows = spans.kind == schema.COLLECTIVE
    return [spans.bytes[rows & (spans.step == number)].tolist() for number, _, _ in steps(run)]


def test_a_step_begins_where_the_last_communication_of_the_one_before_ended() -> None:
    run = infer_steps(job([(7, 0)] + 4 * iteration(400, 300, 20)))

    # 10: the set-up's message has ended. An iteration takes 100 + 3 · 10 + 2 · 2 = 134.
    assert steps(run) == [(number, 10 + 134 * number, 10 + 134 * (number + 1)) for number in range(4)]
    assert steps(run, rank=1) == [(number, 11 + 134 * number, 11 + 134 * (number + 1)) for number in range(4)]
    assert sizes_of_steps(run) == [[400, 300, 20]] * 4
    assert run is not None
    assert run.steps_inferred


@pytest.mark.parametrize(
    "sizes",
    [(8,), (8, 8, 8, 8, 4), (1, 2, 3, 2, 1), tuple([8] * 30 + [4])],
    ids=["a single message", "equal buckets", "a palindrome", "many buckets"],
)
def test_periods(sizes: tuple[int, ...]) -> None:
    assert sizes_of_steps(infer_steps(job(6 * iteration(*sizes)))) == [list(sizes)] * 6


def test_calls_in_between_do_not_break_the_period() -> None:
    logged = [*iteration(400, 300, 20), (4, GAP)]
    run = infer_steps(job(2 * (4 * iteration(400, 300, 20) + logged)))

    assert sizes_of_steps(run)[:5] == [[400, 300, 20]] * 4 + [[400, 300, 20, 4]]
    assert len(steps(run)) == 10


def test_a_rank_that_was_killed_may_lack_the_last_time() -> None:
    whole = 6 * iteration(400, 300, 20)
    run = infer_steps(job(whole, whole[:-2]))

    assert [len(steps(run, rank)) for rank in (0, 1)] == [6, 5]


@pytest.mark.parametrize(
    "sequence",
    [
        [],
        2 * iteration(400, 300, 20),
        [(size, GAP) for size in range(1, 30)],
        [(size, GAP) for size in (1, 1, 2, 1, 3, 3, 2, 1, 2, 2, 3, 1, 3, 2, 1, 1, 1, 3)],
    ],
    ids=["nothing", "twice", "all different", "at random"],
)
def test_without_a_period_there_are_no_steps(sequence: list[tuple[int, int]]) -> None:
    assert infer_steps(job(sequence)) is None


def test_ranks_that_disagree_have_no_steps() -> None:
    assert infer_steps(job(8 * iteration(400, 300), 4 * iteration(400, 300))) is None


def test_steps_that_were_recorded_are_left_alone() -> None:
    rows = recorded(6 * iteration(400, 300))

    assert infer_steps(make_run({0: [*rows, span("step", 0, 500, step=0)], 1: rows}, [WORLD])) is None


def test_the_analysis_says_that_steps_are_inferred() -> None:
    run = job(6 * iteration(400, 300, 20))
    summary = summarise(run)

    assert len(summary.run.steps.used) == 5
    assert summary.run.steps_inferred
    assert any("inferred from the period of its communication" in problem for problem in summary.problems)
    assert analyse(run, "2:4").steps.used == (2, 3)


def test_without_a_period_the_whole_recording_is_one_step() -> None:
    summary = summarise(job([(size, GAP) for size in range(1, 30)]))

    assert len(summary.run.steps.used) == 0
    assert not summary.run.steps_inferred
    assert any("No step was recorded" in problem for problem in summary.problems)
