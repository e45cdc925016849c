"""What a summary says of steps that hold several iterations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.analysis.problems import StepNumbers, StepsThatMeet
from commtrace.analysis.steps.iterations import iterations_in_steps


def run(*iterations: dict[str, Any] | None) -> Any:
    topologies = ({} if each is None else {"iterations": each} for each in iterations)
    return SimpleNamespace(ranks={rank: SimpleNamespace(topology=each) for rank, each in enumerate(topologies)})


CRITIC = {"first": 5, "fewest": 5, "most": 5, "updates": {"Adam": [1, 5]}}
PACED = {"first": 2, "fewest": 1, "most": 1, "updates": {"Muon": [1, 1], "AdamW": [1, 1]}}


@pytest.mark.parametrize(
    ("iterations", "sentence"),
    [
        ([None, None], None),
        ([CRITIC, CRITIC], "A step holds 5 iterations: it ends when every optimizer has stepped (Adam 1 to 5 times)."),
        ([PACED], "The first step holds 2 iterations: until then it was not known which optimizers step."),
        (
            [CRITIC, None],
            "A step holds 5 iterations: it ends when every optimizer has stepped (Adam 1 to 5 times). Ranks differ in "
            "this.",
        ),
    ],
)
def test_the_sentence_of_a_run(iterations: list[dict[str, Any] | None], sentence: str | None) -> None:
    assert iterations_in_steps(run(*iterations)) == sentence


def test_steps_that_meet_other_steps_too_often_are_apart() -> None:
    example = StepsThatMeet(1, 1, 2, 0)

    assert not StepNumbers().are_apart
    assert not StepNumbers(100, 10, example).are_apart
    assert (StepNumbers(100, 10, example) + StepNumbers(100, 90, example)).are_apart
