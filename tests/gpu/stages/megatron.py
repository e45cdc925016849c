"""Megatron-core on four ranks that share the GPU: exposed communication by the recording and by the kernels.

    python -m tests.gpu.stages.megatron OUTPUT

The example of this repository, tensor 2 × pipeline 2, a few iterations of it under torch.profiler; then once more
without commtrace, for its losses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bench.engines import OFF, details, engine_at_work, engines, environment, recorded_rows
from tests.gpu.kernels import Kernel, exposed_ns, nccl_of, read_kernels, recorded_operations
from tests.gpu.stages.stage import Answers, run_job, run_stage

RANKS: Final = 4
ITERATIONS: Final = 8
PROFILED: Final = range(3, 7)
COMPARED: Final = range(3, 6)
"""Steps: the last of the profiled ones holds the end of the profile."""
ROLE: Final = "tp"
MOST_DIFFERENCE: Final = 0.02
JOB_SECONDS: Final = 60.0
ON_GPU: Final = "--layers 4 --hidden 1024 --sequence 512 --microbatches 4"
REHEARSED: Final = "--layers 4 --hidden 64 --sequence 32 --microbatches 4"


class Exposed(NamedTuple):
    """Time in which a rank does nothing but communicate with ranks of a role, ns, and the steps in which it did."""

    by_recording: int
    by_kernels: int
    steps: int


def main(answers: Answers) -> None:
    if importlib.util.find_spec("megatron") is None:
        return
    engine = engines()[0]
    losses = {}
    for variant in (engine, OFF):
        losses[variant] = train(answers.output / variant, variant)
        if variant == engine:
            tell_of_exposed(answers, engine)
    same = losses[engine] == losses[OFF] and losses[OFF].count("\n") == ITERATIONS
    misses = [] if same else [f"{losses[OFF].split()} without, {losses[engine].split()} with"]
    answers.add("Megatron-core: results", f"{ITERATIONS} losses and gradient norms", engine, misses=misses)


def train(output: Path, variant: str) -> str:
    """Run the job; return its losses and gradient norms."""
    size = ON_GPU if torch.cuda.is_available() else REHEARSED
    profiled: list[str | Path] = ["--profile", output, f"{PROFILED.start}:{PROFILED.stop}"] if variant != OFF else []
    arguments: list[str | Path] = [
        "train_megatron.py", *profiled, "--tensor", "2", "--pipeline", "2", *size.split(), "--iterations",
        str(ITERATIONS), "--print-losses", output / "losses",
    ]  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    run_job(arguments, environment(variant, output / "run"), ranks=RANKS, timeout=JOB_SECONDS)
    return (output / "losses").read_text()


def tell_of_exposed(answers: Answers, engine: str) -> None:
    """Answer how much of the steps is exposed tensor-parallel communication."""
    output = answers.output / engine
    ranks = []
    for rank in range(RANKS):
        rows = recorded_rows(output / "run", rank)
        name, reason = engine_at_work(rows)
        if name != engine:
            answers.add("Megatron-core: exposed communication", "", engine, misses=[f"{name} recorded: {reason}"])
            return
        ranks.append(exposed(rows, read_kernels(output / f"kernels-{rank}.csv.gz"), COMPARED))
    steps = sum(rank.steps for rank in ranks)
    by_recording = sum(rank.by_recording for rank in ranks) / steps
    by_kernels = sum(rank.by_kernels for rank in ranks) / steps
    difference = by_recording - by_kernels
    is_off = torch.cuda.is_available() and abs(difference) > MOST_DIFFERENCE
    answers.add(
        "Megatron-core: exposed communication",
        f"{ROLE} is exposed for {by_recording:.1%} of {len(COMPARED)} steps in the recording, {by_kernels:.1%} in the "
        "kernels; by rank "
        + ", ".join(f"{rank.by_recording / rank.steps:.1%} and {rank.by_kernels / rank.steps:.1%}" for rank in ranks),
        engine,
        misses=[f"{difference:+.1%}, more than {MOST_DIFFERENCE:.0%}"] if is_off else [],
    )


def exposed(rows: Sequence[dict[str, Any]], kernels: Sequence[Kernel], steps: range) -> Exposed:
    """Return for how long a rank communicated with its tensor-parallel group and did nothing else, in these steps.

    The recording has stalls, the kernels have time in which NCCL ran and nothing else; a kernel belongs to the
    operation that was launched in its place. Groups of one rank launch none.
    """
    groups = {group["id"]: group for group in details(rows, "process_group")}
    operations = [
        row
        for row in recorded_operations([row for row in rows if row["kind"] in ("collective", "p2p")])
        if row["step"] in PROFILED and len(groups[row["group"]]["ranks"]) > 1
    ]
    launched = nccl_of(kernels)
    if launched:
        assert len(launched) == len(operations), f"{len(launched)} kernels, {len(operations)} operations"
    chosen = [
        kernel
        for kernel, row in zip(launched, operations, strict=False)
        if row["step"] in steps and groups[row["group"]].get("role") == ROLE
    ]
    stalls = [
        row["end"] - row["start"]
        for row in rows
        if row["kind"] == "stall" and row["step"] in steps and groups[row["group"]].get("role") == ROLE
    ]
    walls = [row["end"] - row["start"] for row in rows if row["kind"] == "step" and row["step"] in steps]
    return Exposed(sum(stalls), exposed_ns(kernels, chosen), sum(walls))


if __name__ == "__main__":
    run_stage(main, __doc__)
