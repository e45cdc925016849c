"""Simulated runs of one model in several layouts, whose costs are known."""

from __future__ import annotations

from pathlib import Path

from commtrace.analysis.chain import analyse
from commtrace.analysis.prediction.predict import StepModel
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.synth import Fault, Job, synthesize, write

MODEL = Model(layers=16, hidden=4096, heads=32, sequence=4096, vocabulary=32_000)
LAYOUT = Layout(tp=2, pp=4, dp=2, microbatches=8, flash_attention=True)
FORWARD_NS = 8_000_000  # of a layer on one rank
BACKWARD_NS = 16_000_000


def record(folder: Path, layout: Layout, jitter: float = 0.0, faults: tuple[Fault, ...] = (), steps: int = 3) -> Path:
    """Write a run in a layout: work is divided evenly by tp, and the optimizer's by all that divides parameters."""
    layers = MODEL.layers // (layout.pp * layout.chunks)
    job = Job(
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        chunks=layout.chunks,
        microbatches=layout.microbatches,
        layers=MODEL.layers,
        hidden=MODEL.hidden,
        sequence=MODEL.sequence,
        forward_ns=layers * FORWARD_NS // layout.tp,
        backward_ns=layers * BACKWARD_NS // layout.tp,
        optimizer_ns=24_000_000 // (layout.tp * layout.pp),
        steps=steps,
        jitter=jitter,
        faults=faults,
    )
    write(synthesize(job), folder)
    return folder


def recorded(folder: Path, layout: Layout, jitter: float = 0.0) -> StepModel:
    return StepModel.observed(analyse(record(folder, layout, jitter)))
