"""What ranks do between their steps, and after the last one: pauses that are meant, and waits beside them."""

from __future__ import annotations

from commtrace.analysis.matching.match import match
from commtrace.analysis.replay.between_steps import BetweenSteps
from commtrace.analysis.replay.program import build_program
from tests.factory import make_run, span


def test_an_evaluation_counts_for_the_step_before_which_it_ran_and_after_the_last_one_for_that() -> None:
    rows = [
        span("step", 0, 100, step=0),
        span("evaluation", 110, 140, step=0),
        span("step", 150, 250, step=1),
        span("step", 260, 360, step=2),
        span("evaluation", 365, 385, step=2),
        span("evaluation", 390, 400, step=2),
    ]
    run = make_run({0: rows})
    between = BetweenSteps.of(run, build_program(run, match(run)))

    assert between.pauses_ns["evaluation"].tolist() == [[0, 30, 30]]
    assert between.pauses_ns["checkpoint"].tolist() == [[0, 0, 0]]
    assert between.waited_ns.tolist() == [[0, 0, 0]]
