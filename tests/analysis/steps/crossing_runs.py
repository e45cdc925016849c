"""Runs in which communication crosses the border between two steps."""

from __future__ import annotations

from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, span, stall

STEPS, STEP_NS, LATE_NS, TRANSFER_NS = 7, 100, 30, 5
PAIR = group("dp", 0, 1)


def crossing_run() -> Run:
    """Both ranks launch an all_reduce at the end of a step, rank 1 late, and wait for it at the start of the next."""
    rows: dict[int, list[Row]] = {0: [], 1: []}
    for step in range(STEPS):
        begin, end = STEP_NS * step, STEP_NS * (step + 1)
        for rank, launched in ((0, end - 10), (1, end + LATE_NS - 10)):
            done = end + LATE_NS - 10 + TRANSFER_NS
            # Rank 1 counts the launch to the next step: the members of one communication have different numbers.
            number = step if rank == 0 else step + 1
            row = collective("all_reduce", PAIR, step, launched, done, id=step, step=number)
            rows[rank] += [span("step", begin, end, step=step), row]
            rows[rank].append(stall(row, max(launched, end), done, step=step + 1))
    return make_run(rows, [PAIR])
