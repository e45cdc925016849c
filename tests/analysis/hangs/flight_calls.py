"""A hang, and what torch's flight recorder kept of it."""

from __future__ import annotations

from commtrace.analysis.hangs.flight_recorder import FlightCall
from commtrace.trace.run import Run
from tests.analysis.hung_runs import done, flight, stopped_run
from tests.factory import group

TP = group("tp", 0, 1)


def calls(rank: int, last: int, *, first: int = 1, state: str = "completed", order: int = 1) -> list[FlightCall]:
    """all_reduces of one rank, the last one in this state."""
    numbers = range(first, last + 1)
    return [
        FlightCall(
            rank, (0, 1), order, "all_reduce", seq, state if seq == last else "completed", (f"train.py:{seq} step",)
        )
        for seq in numbers
    ]


def hung() -> Run:
    return stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 5)]})
