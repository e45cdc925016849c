"""Costs of a layer from a run, and steps of other layouts that are predicted from it and then simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.predict import StepModel
from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.pipeline_time import ChunkTimes
from commtrace.planning.search.costs import PartTimes, RunCosts, attention_share, measure_costs
from commtrace.planning.search.prediction import Predictor
from commtrace.synth import Fault
from tests.planning.search.synthetic import BACKWARD_NS, FORWARD_NS, LAYOUT, MODEL, record, recorded


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> RunCosts:
    return measure_costs(recorded(tmp_path_factory.mktemp("runs") / "run", LAYOUT), MODEL, LAYOUT)


def test_a_layer_takes_what_it_was_given_without_its_communication(costs: RunCosts) -> None:
    assert costs.parts == PartTimes(ChunkTimes(FORWARD_NS // 2, BACKWARD_NS // 2), ChunkTimes(0, 0), ChunkTimes(0, 0))
    assert (costs.optimizer_ns, costs.gpus_per_node, costs.notes) == (3_000_000, 8, ())


def test_the_recorded_step_is_reproduced(costs: RunCosts) -> None:
    assert abs(Predictor.like(costs).error) < 0.02


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, chunks=2),
        replace(LAYOUT, pp=2, dp=4),
        replace(LAYOUT, pp=8, dp=1),
        replace(LAYOUT, tp=4, dp=1),
        replace(LAYOUT, tp=1, dp=4),
        replace(LAYOUT, pp=2, dp=4, chunks=4),
        replace(LAYOUT, microbatches=24),
    ],
    ids=lambda layout: f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}-v{layout.chunks}-m{layout.microbatches}",
)
def test_a_predicted_step_is_that_of_the_other_layout(tmp_path: Path, costs: RunCosts, layout: Layout) -> None:
    # Simulated jobs send nothing for their embedding and output layer inside a microbatch, as Megatron-core does; and
    # the bandwidth of messages is a mean of those within nodes and between them.
    predicted = Predictor.like(costs).predict(layout).time.step_ns
    simulated = measure_costs(recorded(tmp_path / "run", layout), MODEL, layout).step_ns

    assert predicted == pytest.approx(simulated, rel=0.04)


def test_bandwidths_that_were_not_measured_are_named(costs: RunCosts) -> None:
    predictor = Predictor.like(costs)

    assert predictor.assumptions(replace(LAYOUT, chunks=2)).phrases == ()
    assert predictor.assumptions(replace(LAYOUT, tp=4, dp=1, microbatch=2, recompute="full")).phrases == (
        "tp 4", "microbatch 2", "recompute full",
    )  # fmt: skip
    # the run's data parallel ranks are on one node, these are not
    assert predictor.assumptions(replace(LAYOUT, pp=1, dp=8)).phrases == ("bandwidth of dp-cp",)


@pytest.mark.parametrize(
    ("change", "changes"),
    [({"chunks": 2}, Changes(chunks=2)), ({"recompute": "full"}, Changes(recompute=True))],
    ids=["chunks", "recompute"],
)
def test_a_slow_stage_stays_slow_and_whatif_says_nearly_the_same(
    tmp_path: Path, change: dict[str, Any], changes: Changes
) -> None:
    path = record(tmp_path / "run", LAYOUT, faults=(Fault.parse("uneven-stage=1:1.3"),))
    steps = StepModel.observed(analyse(path))
    predicted = Predictor.like(measure_costs(steps, MODEL, LAYOUT)).predict(replace(LAYOUT, **change))

    assert predicted.time.step_ns == pytest.approx(steps.predict(changes).prediction.predicted_ns, rel=0.01)


def test_recomputation_adds_a_forward_to_the_backward(costs: RunCosts) -> None:
    predictor = Predictor.like(costs)
    plain, full = (predictor.predict(replace(LAYOUT, recompute=kind)) for kind in ("none", "full"))

    # 4 layers on each stage, in each of 8 + 3 slots of the pipeline; and their all-reduces again
    work_ns = 4 * (FORWARD_NS // 2) * 11
    assert full.time.pipeline_ns - plain.time.pipeline_ns == pytest.approx(work_ns, rel=0.08)
    assert full.time.pipeline_ns - plain.time.pipeline_ns > work_ns
    assert full.peak_bytes < plain.peak_bytes


def test_the_output_layer_is_what_the_last_of_two_stages_takes_longer(tmp_path: Path) -> None:
    layout = replace(LAYOUT, pp=2)
    analysis = recorded(tmp_path / "run", layout)
    even = measure_costs(analysis, MODEL, layout)
    uneven = measure_costs(analysis, MODEL, replace(layout, first_stage_layers=9, last_stage_layers=7))

    none, layer = ChunkTimes(0, 0), ChunkTimes(FORWARD_NS // 2, BACKWARD_NS // 2)
    assert even.parts == PartTimes(layer, none, none)
    # the stages are equally long: without two of its layers, the last one has an output layer as long as they are
    ninth = ChunkTimes(round(8 * layer.forward_ns / 9), round(8 * layer.backward_ns / 9))
    rest = ChunkTimes(8 * layer.forward_ns - 7 * ninth.forward_ns, 8 * layer.backward_ns - 7 * ninth.backward_ns)
    assert uneven.parts == PartTimes(ninth, none, rest)
    assert "no stage without embedding and output layer" in even.notes[0]


def test_the_output_layer_of_one_stage_is_estimated(tmp_path: Path) -> None:
    layout = replace(LAYOUT, pp=1)
    costs = measure_costs(recorded(tmp_path / "run", layout), MODEL, layout)

    # 32,000 · 4,096 parameters against 12 · 4,096² and 2 · 4,096² of attention: 0.558 of a layer
    assert costs.parts.output.forward_ns / costs.parts.layer.forward_ns == pytest.approx(0.558, abs=0.001)
    whole = 16 * costs.parts.layer.forward_ns + costs.parts.output.forward_ns
    assert whole == pytest.approx(16 * FORWARD_NS // 2, rel=1e-6)
    assert "has one stage" in costs.notes[0]


def test_selective_recomputation_is_the_share_of_attention_scores() -> None:
    assert attention_share(Model(layers=1, hidden=1024, heads=16, sequence=1024, vocabulary=128)) == 1 / 7


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (replace(LAYOUT, tp=4, dp=1), "the run has tp 2, the job that was given with it 4"),
        (replace(LAYOUT, dp=4), "the run has dp 2"),
        (replace(LAYOUT, microbatches=4), "the run has microbatches 8, the job that was given with it 4"),
        (replace(LAYOUT, zero_stage=1), "only jobs of Megatron-LM"),
        (replace(LAYOUT, pp=3), "cannot be divided evenly"),
    ],
)
def test_the_job_of_another_run_is_refused(tmp_path: Path, layout: Layout, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        measure_costs(recorded(tmp_path / "run", LAYOUT), MODEL, layout)


def test_a_run_without_forwards_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", LAYOUT).recorded.run
    ranks = {
        rank: replace(trace, spans=trace.spans.take(np.flatnonzero(trace.spans.kind != 1)))
        for rank, trace in run.ranks.items()
    }
    steps = StepModel.observed(analyse(replace(run, ranks=ranks)))
    with pytest.raises(ConfigurationError, match="recorded no forwards and backwards"):
        measure_costs(steps, MODEL, LAYOUT)
