"""How far are spans from the kernels that torch.profiler saw in the same run, and is training what it is without?

    python -m tests.gpu.stages.accuracy OUTPUT

Two ranks that share the GPU, all kinds of operations (tests/gpu/programs/nccl_operations.py), once without commtrace
and once with each engine. Of the traces, tables of the kernels are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.engines import OFF, engines, environment, faults_of_recording, recorded_rows
from tests.gpu.kernels import (
    Distances,
    all_kernels,
    compared,
    distances,
    is_no_barrier,
    nccl_of,
    read_kernels,
    recorded_operations,
    synchronisations,
    write_kernels,
)
from tests.gpu.programs.one_gpu import WARM_UP_STEPS
from tests.gpu.stages.stage import Answers, run_job, run_stage
from tests.gpu.table import microseconds

RANKS: Final = 2
TOLERANCE_NS: Final = 20_000
JOB_SECONDS: Final = 60.0


def main(answers: Answers) -> None:
    figures: dict[str, list[dict[str, Any]]] = {}
    waits: dict[str, list[int]] = {}
    for variant in (OFF, *engines()):
        output = answers.output / variant
        run_job(["nccl_operations.py", output], environment(variant, output), ranks=RANKS, timeout=JOB_SECONDS)
        figures[variant] = [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
        waits[variant] = [synchronisations(output / f"trace-{rank}.json") for rank in range(RANKS)]
        for rank in range(RANKS):
            keep_kernels(output, rank)
            if variant != OFF:
                compare(answers, variant, output, rank)
        if variant != OFF:
            tell_of_results(answers, variant, figures)
            differs = waits[variant] != waits[OFF]
            text = f"{waits[OFF]} without, {waits[variant]} with, by rank"
            answers.add("synchronisations", text, variant, misses=["not as many as without"] if differs else [])


def keep_kernels(output: Path, rank: int) -> None:
    """Put a table of the kernels in the place of a trace."""
    trace = output / f"trace-{rank}.json"
    write_kernels(all_kernels(trace), output / f"kernels-{rank}.csv.gz")
    trace.unlink()


def compare(answers: Answers, engine: str, output: Path, rank: int) -> None:
    """Answer for a rank of a recorded job."""
    rows = recorded_rows(output, rank)
    misses = faults_of_recording(rows, engine)
    answers.add("dropped spans", f"rank {rank}: none of {len(rows)}" if not misses else "", engine, misses=misses)
    communication = [row for row in rows if row["kind"] in ("collective", "p2p") and row["step"] >= WARM_UP_STEPS]
    if not torch.cuda.is_available():
        answers.add("starts and ends against kernels", f"rank {rank}: {len(communication)} spans, no kernels", engine)
        return
    kernels = nccl_of(read_kernels(output / f"kernels-{rank}.csv.gz"))
    operations = recorded_operations(communication)
    if len(kernels) != len(operations):
        misses = [f"{len(kernels)} kernels, {len(operations)} operations"]
        answers.add("starts and ends against kernels", f"rank {rank}", engine, misses=misses)
        return
    brackets = {bracket_of(row) for row in communication if row["op_in_seq"] > 0}
    for question, judges in (
        ("starts and ends against kernels", is_no_barrier),
        ("brackets against kernels", lambda row: bracket_of(row) in brackets),
    ):
        found = distances(kernels, operations, judges)
        answers.add(question, f"rank {rank}: {told(found)}", engine, misses=found.misses(TOLERANCE_NS))
    if all(is_no_barrier(row) for row in operations):
        return
    barriers = compared(kernels, operations, barriers=True)
    late = float(np.percentile(np.abs(barriers.start), 95)) > TOLERANCE_NS or barriers.end.min() < -TOLERANCE_NS
    answers.add(
        "barriers against kernels",
        f"rank {rank}: starts {microseconds(barriers.start)}; ends {microseconds(barriers.end)} behind",
        engine,
        misses=["starts are off, or an end lies before its kernel's"] if late else [],
    )


def bracket_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the members of a bracket have in common: messages and collectives are numbered apart."""
    return row["kind"], row["group"], row["seq"]


def told(found: Distances) -> str:
    starts = f"starts: {len(found.exact_starts)} exact, {microseconds(found.exact_starts)}"
    ends = f"ends: {len(found.exact_ends)} exact, {microseconds(found.exact_ends)}"
    if len(found.lower_bounds):
        starts += f", {len(found.lower_bounds)} bounds, {microseconds(found.lower_bounds)} early"
    if len(found.upper_bounds):
        ends += f", {len(found.upper_bounds)} bounds, {microseconds(found.upper_bounds)} late"
    return f"{starts}; {ends}"


def tell_of_results(answers: Answers, engine: str, figures: dict[str, list[dict[str, Any]]]) -> None:
    """Answer whether training computed the same in as much memory of the device."""
    plain, recorded = figures[OFF], figures[engine]
    host = " and ".join(
        f"{(recorded[rank]['host_bytes'] - plain[rank]['host_bytes']) / 2**20:+.0f}" for rank in range(RANKS)
    )
    misses = [
        f"rank {rank}: {name} {plain[rank][name]} without, {recorded[rank][name]} with"
        for rank in range(RANKS)
        for name in ("checksum", "allocated", "reserved")
        if recorded[rank][name] != plain[rank][name]
    ]
    answers.add(
        "results and memory",
        f"{plain[0]['allocated'] / 2**20:.1f} MiB allocated, {plain[0]['reserved'] / 2**20:.1f} reserved without; "
        f"{host} MiB more of the host with",
        engine,
        misses=misses,
    )


if __name__ == "__main__":
    run_stage(main, __doc__)
