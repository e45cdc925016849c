from __future__ import annotations

from typing import Any

import pytest

from commtrace.synth import FREE, Job, synthesize
from commtrace.synth.simulation import stage_orders
from commtrace.trace.schedule import WRITTEN


def _exact(**settings: Any) -> Job:
    exact: dict[str, Any] = {
        "optimizer_ns": 0,
        "data_ns": 0,
        "jitter": 0.0,
        "end_scatter_ns": 0,
        "network": FREE,
        "steps": 1,
    }
    return Job(**{**exact, "forward_ns": 1, "backward_ns": 2, "layers": 16, **settings})


@pytest.mark.parametrize(("stages", "microbatches", "expected"), [(4, 8, 33), (8, 16, 69), (2, 2, 9), (4, 4, 21)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_takes_as_long_as_the_formula_gives(
    schedule: str, stages: int, microbatches: int, expected: int
) -> None:
    truth = synthesize(_exact(pp=stages, microbatches=microbatches, schedule=schedule)).truth

    assert truth["steps"][0]["duration_ns"] == expected
    assert truth["ideal"]["pipeline_ns"] == expected


def test_chunks_divide_the_bubble() -> None:
    # (v·m + p − 1)(F + B) with F and B of one chunk
    assert synthesize(_exact(pp=4, microbatches=8, chunks=2)).truth["steps"][0]["duration_ns"] == (2 * 8 + 3) * 3


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16), (2, 4)])
def test_put_off_weights_shorten_the_bubble(stages: int, microbatches: int) -> None:
    job = _exact(pp=stages, microbatches=microbatches, schedule="zero-bubble", forward_ns=10, backward_ns=20)

    # m(F + B) + (p − 1)(F + B − 2W), W = B / 2
    assert synthesize(job).truth["steps"][0]["duration_ns"] == 30 * microbatches + 10 * (stages - 1)


@pytest.mark.parametrize("schedule", WRITTEN)
def test_every_stage_does_all_of_its_work_once(schedule: str) -> None:
    chunks = 1 if schedule in ("gpipe", "1f1b", "zb1p") else 2
    for order in stage_orders(_exact(pp=4, microbatches=8, schedule=schedule, chunks=chunks)):
        letters = "FBW" if "z" in schedule else "FB"
        everything = {(letter, number, chunk) for letter in letters for number in range(8) for chunk in range(chunks)}

        assert sorted(order) == sorted(everything)
