"""Jobs of two ranks to compare with each other."""

from __future__ import annotations

from typing import Any

from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, span, stall

DP = group("dp", 0, 1)


def job(*, compute: int = 100, transfer: int = 40, steps: int = 8, num_bytes: int = 4000, **of_every_rank: Any) -> Run:
    """Two ranks: compute, then a synchronous all_reduce that both start at once."""
    length = compute + transfer
    rows: dict[int, list[Row]] = {0: [], 1: []}
    for rank, own in rows.items():
        for step in range(steps):
            start = 1000 * step
            own.append(span("step", start, start + length, step=step))
            own.append(span("forward", start, start + compute, step=step))
            reduce = collective(
                "all_reduce", DP, step, start + compute, start + length, step=step, bytes=4000, id=10 * step + rank
            )
            own += [reduce, stall(reduce, start + compute, start + length)]
    return make_run(rows, [DP], **of_every_rank)
