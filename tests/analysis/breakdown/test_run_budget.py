"""The wall time of whole runs, divided by hand; and that it always adds up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.breakdown.run_budget import (
    CHECKPOINT,
    EVALUATION,
    LOADING,
    PARTS,
    TRAINING,
    PartIntervals,
    WallTimeParts,
    divide,
    divide_ranks,
    run_budget,
)
from commtrace.trace.run import Run
from commtrace.trace.topology import Topology
from tests.factory import Row, make_run, span

NUMBERED: Topology = {"step_numbers": "Megatron's iterations"}


def attempt(rows: dict[int, list[Row]], number: int, last_ns: int, began_ns: int | None = None) -> Run:
    run = make_run(rows)
    topology = NUMBERED if began_ns is None else Topology(**NUMBERED, process_start_ns=began_ns)
    ranks = {
        rank: replace(
            trace, topology=topology, last_written_ns=last_ns, metadata=replace(trace.metadata, attempt=number)
        )
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def steps(*numbers: int, start: int, length: int) -> list[Row]:
    return [span("step", start + at * length, start + (at + 1) * length, step=step) for at, step in enumerate(numbers)]


def test_every_instant_of_a_run_has_one_part() -> None:
    rows = [
        span("checkpoint", 10, 20, name="torch.load"),
        span("data", 25, 30),
        *steps(1, 2, start=30, length=10),
        span("data", 30, 33, step=1),  # a part of its step
        span("evaluation", 50, 70),
        span("data", 55, 60),
        span("checkpoint", 65, 75),
        *steps(3, start=75, length=10),
        span("evaluation", 80, 82, step=3),
    ]
    budget = run_budget(attempt({0: rows}, 0, last_ns=100, began_ns=0))

    assert budget.job == WallTimeParts(
        start_ns=10 + 5, checkpoint_ns=10 + 10, loading_ns=5, training_ns=20 + 8, evaluation_ns=15 + 2, unknown_ns=15
    )
    assert (budget.job.wall_ns, budget.goodput, budget.attempts, budget.repeated_steps) == (100, 0.28, 1, 0)


def test_a_restart_costs_its_gap_and_the_steps_that_are_done_once_more() -> None:
    first = attempt({0: steps(1, 2, 3, start=10, length=10)}, 0, last_ns=45, began_ns=0)
    second = attempt({0: steps(2, 3, 4, start=70, length=10)}, 1, last_ns=100, began_ns=60)
    budget = run_budget(second, [first])

    assert budget.job == WallTimeParts(
        start_ns=10 + 10, training_ns=10 + 30, repeated_ns=20, unknown_ns=5, restart_ns=15
    )
    assert (budget.attempts, budget.repeated_steps, budget.goodput) == (2, 2, 0.4)


def test_repeated_steps_are_unknown_without_numbers_of_the_program() -> None:
    def unnumbered(run: Run) -> Run:
        return replace(run, ranks={rank: replace(trace, topology={}) for rank, trace in run.ranks.items()})

    first = unnumbered(attempt({0: steps(0, 1, start=0, length=10)}, 0, last_ns=20))
    second = unnumbered(attempt({0: steps(0, 1, start=30, length=10)}, 1, last_ns=50))
    budget = run_budget(second, [first])

    assert budget.job == WallTimeParts(training_ns=40, restart_ns=10)
    assert budget.repeated_steps is None


def test_the_job_is_the_mean_of_ranks_that_all_have_the_same_wall_time() -> None:
    run = attempt({0: steps(1, start=0, length=11), 1: steps(1, start=3, length=4)}, 0, last_ns=11)
    budget = run_budget(run)

    assert budget.ranks == {0: WallTimeParts(training_ns=11), 1: WallTimeParts(training_ns=4, start_ns=3, unknown_ns=4)}
    assert budget.job.wall_ns == 11


def test_time_that_was_not_recorded_is_not_called_a_start() -> None:
    run = attempt({0: steps(10, start=50, length=10)}, 0, last_ns=60, began_ns=0)
    recording = Topology(recording={"steps": "10:11"}, process_start_ns=0)
    run = replace(run, ranks={0: replace(run.ranks[0], topology=recording)})

    assert run_budget(run).job == WallTimeParts(training_ns=10, unknown_ns=50)


@st.composite
def claims(draw: st.DrawFn) -> list[PartIntervals]:
    def claim(part: int) -> PartIntervals:
        pairs = draw(st.lists(st.tuples(st.integers(-50, 150), st.integers(0, 80)), max_size=6))
        start = np.array([first for first, _ in pairs], np.int64)
        return PartIntervals(part, start, start + np.array([length for _, length in pairs], np.int64))

    return [claim(part) for part in range(1, len(PARTS))]


@given(claims())
def test_the_parts_add_up_and_agree_with_a_count_of_every_instant(found: list[PartIntervals]) -> None:
    expected = [0] * len(PARTS)
    for instant in range(100):
        holding = [claim.part for claim in found if np.any((claim.start <= instant) & (instant < claim.end))]
        expected[max(holding, default=0)] += 1

    assert divide(found, 0, 100) == expected
    assert sum(expected) == 100


@given(st.lists(claims(), min_size=1, max_size=5))
def test_ranks_are_divided_together_as_they_are_alone(found: list[list[PartIntervals]]) -> None:
    many = found * 30  # more than are painted on one axis
    assert divide_ranks(many, 0, 100).tolist() == [divide(own, 0, 100) for own in found] * 30


def test_saving_inside_of_an_evaluation_is_saving() -> None:
    def claim(part: int, start: int, end: int) -> PartIntervals:
        return PartIntervals(part, np.array([start]), np.array([end]))

    found = divide(
        [claim(EVALUATION, 0, 50), claim(CHECKPOINT, 40, 60), claim(TRAINING, 0, 45), claim(LOADING, 0, 100)], 0, 100
    )
    assert dict(zip(PARTS, found, strict=True)) == {
        **dict.fromkeys(PARTS, 0),
        "evaluation": 40,
        "checkpoint": 20,
        "loading": 40,
    }
