"""The ± of a prediction holds what else the recorded run allows: the step times of jobs in which that is so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.predict import Prediction, predict
from commtrace.synth import Job, synthesize
from commtrace.trace.run import Run
from tests.analysis.simulated_schedules import Action, simulate
from tests.pipeline_factory import one_forward_one_backward

STAGES, MICROBATCHES = 4, 8
MICROSECOND_NS = 1_000


def job(duration_us: Callable[[int, Action], int]) -> Run:
    """A 1F1B job whose forwards and backwards take so long, by stage."""
    orders = [
        [Action(kind, microbatch) for kind, microbatch in one_forward_one_backward(stage, STAGES, MICROBATCHES)]
        for stage in range(STAGES)
    ]
    return simulate(orders, lambda stage, action: duration_us(stage, action) * MICROSECOND_NS, steps=3)


def of_stages(*forward_us: int) -> Run:
    """A job with backwards that are twice as long as forwards."""
    return job(lambda stage, action: forward_us[stage] * (1 if action.kind == "forward" else 2))


def predicted(run: Run, **changes: Any) -> Prediction:
    return predict(analyse(run), Changes(**changes)).prediction


def step_ns(run: Run) -> float:
    return predicted(run).fidelity.measured_ns


EVEN = (8, 8, 8, 8)


def spreads(answer: Prediction) -> dict[str, float]:
    """The parts of ± that are not 0."""
    return {part.cause: part.ns for part in answer.uncertainty if part.ns}


def test_a_layer_that_moves_may_take_as_long_as_on_the_fastest_or_the_slowest_stage() -> None:
    """Stages of 8 layers, one with layers of 150 µs among others of 125 µs."""
    before = of_stages(1000, 1000, 1200, 1000)

    answer = predicted(before, layers=(8, 9, 8, 7), layers_before=EVEN)

    assert answer.predicted_ns == step_ns(of_stages(1000, 1125, 1200, 875))
    as_slowest_ns = step_ns(of_stages(1000, 1150, 1200, 850))  # the fastest are those that move
    assert as_slowest_ns != answer.predicted_ns
    assert spreads(answer) == {"time of a layer": abs(as_slowest_ns - answer.predicted_ns)}


def test_layers_of_equal_stages_leave_no_doubt() -> None:
    assert spreads(predicted(of_stages(1000, 1000, 1000, 1000), layers=(8, 9, 7, 8), layers_before=EVEN)) == {}


def test_the_weights_part_may_be_what_a_backward_takes_beyond_a_forward() -> None:
    run = synthesize(
        Job(
            pp=STAGES,
            microbatches=MICROBATCHES,
            steps=3,
            layers=16,
            jitter=0.0,
            end_scatter_ns=0,
            gpus_per_host=64,
            forward_ns=8_000_000,
            backward_ns=12_000_000,
        )
    ).run

    answer = predicted(run, schedule="zero-bubble")

    a_third = predicted(run, schedule="zero-bubble", weight_share=1 / 3)
    moved = abs(a_third.predicted_ns - answer.predicted_ns)
    assert moved > 1_000_000
    assert spreads(answer)["split of backwards"] == pytest.approx(moved, rel=0.001)
    assert "split of backwards" not in {part.cause for part in a_third.uncertainty}


def test_embedding_and_head_may_not_be_recomputed() -> None:
    """The head takes half as long as all layers of a stage."""
    forward_us = (1000, 1000, 1000, 1500)

    def recomputing(repeated_us: tuple[int, ...]) -> Run:
        return job(
            lambda stage, action: (
                forward_us[stage] if action.kind == "forward" else 2 * forward_us[stage] + repeated_us[stage]
            )
        )

    answer = predicted(of_stages(*forward_us), recompute=True)

    assert answer.predicted_ns == step_ns(recomputing(forward_us))
    without_head = step_ns(recomputing((1000, 1000, 1000, 1000)))
    assert spreads(answer) == {"what is recomputed": answer.predicted_ns - without_head}


@pytest.mark.parametrize(("microbatches", "added"), [(16, 8), (4, 4)])
def test_microbatches_that_come_or_go_are_as_long_as_the_mean_give_or_take_two_standard_errors(
    microbatches: int, added: int
) -> None:
    """Every other backward takes 100 µs more: 3,000 and 3,100 µs for a microbatch."""
    run = job(lambda _, action: 1000 if action.kind == "forward" else 2000 + 100 * (action.microbatch % 2))

    answer = predicted(run, microbatches=microbatches)

    deviation_us = math.sqrt(MICROBATCHES * 50**2 / (MICROBATCHES - 1))
    expected_us = 2 * added * deviation_us / math.sqrt(MICROBATCHES)
    assert spreads(answer)["other microbatches"] == pytest.approx(expected_us * MICROSECOND_NS)


@pytest.mark.parametrize("more", [{}, {"microbatches": 8}])
def test_a_slow_rank_that_nobody_works_like_may_be_as_the_fastest_or_the_slowest_stage(more: dict[str, int]) -> None:
    answer = predicted(of_stages(1000, 1200, 1100, 2000), without_slow_ranks=(3,), **more)

    assert answer.predicted_ns == pytest.approx(step_ns(of_stages(1000, 1200, 1100, 1100)), abs=100)
    others_ns = [step_ns(of_stages(1000, 1200, 1100, like)) for like in (1000, 1200)]
    farther = max(abs(other - answer.predicted_ns) for other in others_ns)
    assert farther > 0
    assert spreads(answer) == {"work of the slow rank": pytest.approx(farther, abs=100)}


def test_what_the_model_misses_may_grow_as_the_step_does() -> None:
    noisy = synthesize(Job(pp=STAGES, microbatches=MICROBATCHES, steps=6, layers=16)).run

    answer = predicted(noisy, microbatches=16)

    missed_ns = abs(answer.fidelity.measured_ns - answer.fidelity.modelled_ns)
    growth = answer.modelled_ns / answer.fidelity.modelled_ns
    assert missed_ns > 0
    assert growth > 1.5
    assert spreads(answer)["error of the replay"] == pytest.approx(missed_ns * growth)
    assert answer.uncertainty_ns == math.fsum(part.ns for part in answer.uncertainty)


def two_stages(**changes: Any) -> Prediction:
    run = synthesize(Job(pp=2, microbatches=4, steps=3, layers=16, jitter=0.0, end_scatter_ns=0, gpus_per_host=64)).run
    return predicted(run, **changes)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layers": (9, 7), "layers_before": (8, 8)}, "time of a layer"),
        ({"recompute": True}, "what is recomputed"),
        ({"without_slow_ranks": (1,)}, "work of the slow rank"),
        ({"without_slow_ranks": (1,), "microbatches": 8}, "work of the slow rank"),
    ],
)
def test_what_two_stages_cannot_tell_is_no_certainty(changes: dict[str, Any], part: str) -> None:
    answer = two_stages(**changes)

    assert part not in {own.cause for own in answer.uncertainty}
    assert f"{part} (not known: too few stages to compare)" in answer.left_out


def test_one_step_says_nothing_about_how_steps_scatter_and_one_microbatch_nothing_of_others() -> None:
    noisy = synthesize(Job(pp=STAGES, microbatches=1, steps=6, layers=16)).run

    answer = predict(analyse(noisy, "4"), Changes(schedule="1f1b", microbatches=4)).prediction

    assert answer.steps == (4,)
    assert [part.cause for part in answer.uncertainty] == ["error of the replay"]
    assert answer.left_out[-2:] == (
        "other microbatches (not known: one microbatch)",
        "scatter of steps (not known: one step)",
    )


def test_all_parts_of_a_run_that_can_tell_them_are_named() -> None:
    run = of_stages(1000, 1000, 1200, 1000)

    layers = {"layers": (8, 9, 8, 7), "layers_before": EVEN}
    answer = predicted(run, **layers, microbatches=16, recompute=True, without_slow_ranks=(2,))

    assert [part.cause for part in answer.uncertainty] == [
        "error of the replay",
        "scatter of steps",
        "work of the slow rank",
        "time of a layer",
        "what is recomputed",
        "other microbatches",
    ]
    assert not [phrase for phrase in answer.left_out if "not known" in phrase]
