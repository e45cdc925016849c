"""Replays of CUDA graphs as they were recorded, against the kernels of torch.profiler and a run without commtrace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.gpu.kernels import nccl_kernels

EAGER_STEPS, STEPS, PROFILED_FROM = 3, 12, 6
"""Of the program graph_replays.py."""

NUMEL = 1 << 20
CONTAINED = {"all_reduce": 4 * NUMEL, "all_gather": 2 * 4 * NUMEL, "reduce_scatter": 4 * NUMEL}
"""Bytes of what its graph contains once each, on two ranks."""

STAMP_TOLERANCE_NS = 5_000
SLACK_NS = 20_000
"""Between two clocks: a replay lasts from a mark before its first kernel to one behind its last, so never less."""


def figures(folder: Path, rank: int) -> str:
    """Return how long the replays of a rank took in the recording."""
    spans = load_run(folder).ranks[rank].spans
    replays = spans.take(spans.kind == schema.REPLAY)
    took = (replays.end - replays.start) / 1e6
    return f"{len(replays)} replays, {np.median(took):.2f} ms in the median" if len(took) else "no replays"


class Compared(NamedTuple):
    """Stamps of a rank beside the kernels of torch.profiler."""

    figures: str
    misses: list[str]


def stamps_against_kernels(folder: Path, rank: int) -> Compared:
    """Return how far starts and ends of stamped communication are from those of their kernels."""
    spans = load_run(folder).ranks[rank].spans
    stamped = spans.take((spans.timing == schema.GRAPH_STAMP_TIMING) & (spans.kind == schema.COLLECTIVE))
    replayed = spans.take(spans.kind == schema.REPLAY)
    expected = len(CONTAINED) * (STEPS - EAGER_STEPS)
    if len(stamped) != expected:
        return Compared(f"{len(replayed)} replays", [f"{len(stamped)} calls have stamps, not {expected}"])
    per_step = len(CONTAINED) + 1
    kernels = sorted(nccl_kernels(folder / f"trace-{rank}.json"), key=lambda kernel: kernel.start)
    if len(kernels) != per_step * (STEPS - PROFILED_FROM):
        return Compared("", [f"there are {len(kernels)} kernels of NCCL, not {per_step} in each step"])
    of_graph = [kernel for at, kernel in enumerate(kernels) if at % per_step < len(CONTAINED)]
    profiled = stamped.take(stamped.step >= PROFILED_FROM)
    order = np.lexsort((profiled.seq, profiled.step))
    starts = profiled.start[order] - np.array([kernel.start for kernel in of_graph], np.int64)
    ends = profiled.end[order] - np.array([kernel.end for kernel in of_graph], np.int64)
    offset = np.median(ends)  # of the two clocks
    p95 = [float(np.percentile(np.abs(errors - offset), 95)) for errors in (starts, ends)]
    lowest = [
        f"95 % of the {name} are within {ns / 1e3:.1f} µs" for name, ns in zip(("starts", "ends"), p95, strict=True)
    ]
    late = [f"{line} only" for line, ns in zip(lowest, p95, strict=True) if ns > STAMP_TOLERANCE_NS]
    return Compared(", ".join(lowest), late)


def step_ms(folder: Path, rank: int) -> float:
    """Return how long a replaying step took that nobody profiled, ms, in the median."""
    seconds = json.loads((folder / f"steps-{rank}.json").read_text())
    return float(np.median(seconds[EAGER_STEPS + 1 : PROFILED_FROM])) * 1e3


def misses(with_commtrace: Path, without: Path, rank: int) -> list[str]:
    """Return what is wrong with what a rank recorded of the program graph_replays.py, in words."""
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for folder in (with_commtrace, without)]
    found = [] if results[0] == results[1] else ["results differ from those without commtrace"]
    run = load_run(with_commtrace)
    return [*found, *_wrong_rows(run, rank), *_kernels_outside(run, with_commtrace / f"trace-{rank}.json", rank)]


def _wrong_rows(run: Run, rank: int) -> Iterator[str]:
    spans = run.ranks[rank].spans
    replays = spans.take(spans.kind == schema.REPLAY)
    if replays.step.tolist() != list(range(EAGER_STEPS, STEPS)):
        yield f"replays are in the steps {replays.step.tolist()}"
    if set(replays.timing.tolist()) != {schema.CUDA_EVENT_TIMING}:
        yield "replays are not timed by events"
    for step in range(STEPS):
        own = spans.take((spans.kind == schema.COLLECTIVE) & (spans.step == step))
        sent = Counter({run.names[code]: 0 for code in own.name.tolist()})
        for code, num_bytes in zip(own.name.tolist(), own.bytes.tolist(), strict=True):
            sent[run.names[code]] += num_bytes
        expected = Counter(CONTAINED) + Counter({"all_reduce": 4})
        if sent != expected:
            yield f"step {step} sent {dict(sent)}, not {dict(expected)}"
    collectives = spans.take(spans.kind == schema.COLLECTIVE)
    if sorted(collectives.seq.tolist()) != list(range(len(collectives))):
        yield "sequence numbers have gaps"


def _kernels_outside(run: Run, trace: Path, rank: int) -> Iterator[str]:
    """Yield a sentence if kernels of NCCL lie outside of the replays, by the lengths of both."""
    spans = run.ranks[rank].spans
    replays = spans.take((spans.kind == schema.REPLAY) & (spans.step >= PROFILED_FROM))
    per_step = len(CONTAINED) + 1
    kernels = sorted(nccl_kernels(trace), key=lambda kernel: kernel.start)
    if len(kernels) != per_step * (STEPS - PROFILED_FROM):
        yield f"there are {len(kernels)} kernels of NCCL, not {per_step} in each step"
        return
    for number, replay_ns in enumerate((replays.end - replays.start).tolist()):
        own = kernels[number * per_step : number * per_step + len(CONTAINED)]
        spread_ns = own[-1].end - own[0].start
        if not spread_ns <= replay_ns + SLACK_NS:
            yield f"replay {number} took {replay_ns} ns, its kernels {spread_ns} ns"
