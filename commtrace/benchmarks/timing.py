"""Times calls one by one: on a GPU by its events, on a CPU by the clock of the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from commtrace.benchmarks.operations import Call


def timed(call: Call, device: torch.device) -> int:
    """Return how long a call took on its device, ns."""
    if device.type != "cuda":
        start = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - start
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return round(milliseconds * 1e6)


def timed_iterations(
    call: Call, device: torch.device, warmup: int, iterations: int, goes_on: Callable[[], bool] = lambda: True
) -> list[int]:
    """Return the times of the iterations behind the warm-up; ``goes_on`` is asked before each, warm-up included."""
    times = []
    for number in range(warmup + iterations):
        if not goes_on():
            break
        duration_ns = timed(call, device)
        if number >= warmup:
            times.append(max(duration_ns, 1))
    return times
