"""What recording costs a step of a real transformer under DDP: one that keeps the GPU busy, and one bound by launches.

    python -m tests.gpu.stages.steps OUTPUT

On one rank, in turns in one process (tests/gpu/programs/step_times.py), with torch.profiler beside the engines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import torch

from bench.engines import OFF, PROFILER, engines
from commtrace.recording.options import NATIVE
from tests.gpu.stages.stage import Answers, run_job, run_stage, sized


class Step(NamedTuple):
    """A step that is measured.

    Attributes:
        size: of the model, as the program calls it.
        most_added: the aim for the native engine, as a share.
        with_modules: whether spans of modules are measured too.
        seconds: no turn begins that would end later.
    """

    question: str
    size: str
    turns: int
    most_added: float
    with_modules: bool
    seconds: float


STEPS: Final = (
    Step("a step that is bound by launches", "narrow", 9, 0.01, True, 60.0),
    Step("a step that keeps the GPU busy", "wide", 7, 0.002, False, 75.0),
)


def main(answers: Answers) -> None:
    for step in STEPS:
        measure(answers, step)


def measure(answers: Answers, step: Step) -> None:
    """Answer for a step."""
    modules = [f"{engines()[0]}+modules"] if step.with_modules else []
    variants = [OFF, *engines(), *modules, PROFILER]
    output = answers.output / step.size
    size = step.size if torch.cuda.is_available() else "tiny"
    arguments: list[str | Path] = [
        "step_times.py", output, "--layout", "ddp", "--size", size, "--variants", ",".join(variants),
        "--turns", str(sized(step.turns, 2)), "--steps", str(sized(10, 2)), "--seconds", str(step.seconds),
    ]  # fmt: skip
    run_job(arguments, {}, timeout=step.seconds + 30.0)
    figures = json.loads((output / "figures.json").read_text())
    for variant in variants:
        if variant != OFF:
            tell(answers, step, variant, figures["step_ns"], figures["synchronisations"])


def tell(answers: Answers, step: Step, variant: str, step_ns: dict[str, Sequence[int]], waits: dict[str, int]) -> None:
    """Answer for a variant: the ratio to the step without it in the same turn."""
    ratios = [taken / off for taken, off in zip(step_ns[variant], step_ns[OFF], strict=True)]
    text = (
        f"{ms(step_ns[OFF])} off, {ms(step_ns[variant])}: × {median(ratios):.4f} ({min(ratios):.4f} to "
        f"{max(ratios):.4f} in {len(ratios)} turns)"
    )
    misses = []
    if variant in waits and waits[variant] != waits[OFF]:
        misses.append(f"waits for the device: {waits[OFF]} off, {waits[variant]}")
    if variant == NATIVE and torch.cuda.is_available() and median(ratios) > 1 + step.most_added:
        misses.append(f"the aim is {step.most_added:+.1%}")
    answers.add(step.question, text, variant, misses=misses if variant in engines() else None)


def ms(step_ns: Sequence[int]) -> str:
    return f"{median(step_ns) / 1e6:.3f} ms ({min(step_ns) / 1e6:.3f} to {max(step_ns) / 1e6:.3f})"


if __name__ == "__main__":
    run_stage(main, __doc__)
