"""Steps that were asked for and never came."""

from __future__ import annotations

import pytest

from commtrace.analysis.steps.unreached import unreached_steps
from commtrace.analysis.summary import summarise
from commtrace.trace.run import Run
from tests.factory import make_run, span

ASKED = {"recording": {"steps": "100:110"}}


def run_that_got_to(step: int, *, closed: bool = True, steps: int = 0) -> Run:
    rows = [span("step", 100 * number, 100 * number + 90, step=number) for number in range(steps)]
    told = ((step, 5),) if step >= 0 else ()
    return make_run({0: rows, 1: rows}, topology=ASKED, progress=told, closed=closed)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (run_that_got_to(30), "and the job got as far as step 30: no step was recorded."),
        (run_that_got_to(30, closed=False), "and the job has got as far as step 30 so far: no step was recorded."),
        (run_that_got_to(-1), "and the job has begun none: no step was recorded."),
    ],
)
def test_it_is_said_how_far_the_job_got(run: Run, sentence: str) -> None:
    whole = f"Only steps 100:110 were to be recorded (COMMTRACE_STEPS, --steps), {sentence}"
    assert unreached_steps(run) == whole
    problems = summarise(run).problems
    assert whole in problems
    assert not any("Mark steps" in problem for problem in problems)


def test_other_runs_are_not_spoken_of() -> None:
    assert unreached_steps(run_that_got_to(30, steps=2)) is None
    assert unreached_steps(run_that_got_to(105)) is None
    assert unreached_steps(make_run({0: []})) is None
