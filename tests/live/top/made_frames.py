"""A recording of two ranks while it grows."""

from __future__ import annotations

from typing import Any

from commtrace.trace.files.tail import Newest
from commtrace.trace.run import Run
from tests.factory import collective, group, make_run, span, stall

MS = 1_000_000
DP = group("dp", 0, 1)


def newest(run: Run, first: int, end: int) -> Newest:
    return Newest(run, first, end, dict.fromkeys(run.ranks, end - 1))


def two_ranks(steps: int = 3, *, sampled: bool = False) -> Run:
    """In every step of 10 ms, rank 1 computes 6 ms and rank 0 computes 2 ms, waits 4 ms, and both reduce for 3 ms."""
    rows: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for step in range(steps):
        begin = step * 10 * MS
        for rank, compute in ((0, 2 * MS), (1, 6 * MS)):
            reduced = collective("all_reduce", DP, step, begin + compute, begin + 9 * MS, step=step, id=step)
            rows[rank] += [
                span("step", begin, begin + 10 * MS, step=step),
                span("forward", begin, begin + compute, step=step),
                reduced,
                stall(reduced, begin + compute, begin + 9 * MS),
            ]
    aggregates: dict[str, Any] = {"aggregates": dict.fromkeys(range(steps), ("[]",))} if sampled else {}
    return make_run(rows, [DP], last_written_ns=steps * 10 * MS, closed=False, **aggregates)
