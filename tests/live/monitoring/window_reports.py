"""Reports of ranks on a window of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commtrace.live.monitoring.window import WindowReport

MS = 1_000_000
SECONDS = 4.0


def report(rank: int, window: int, work: Sequence[float] = (60, 5, 0, 5), **columns: Any) -> WindowReport:
    """A rank of a job whose steps last 100 ms; work in ms, what is left is waiting for dp."""
    waiting = max(100 - sum(work), 0)
    reported: dict[str, Any] = {
        "host": f"node{rank // 4}",
        "stage": 0,
        "steps": 40,
        "last_step": 40 * window + 39,
        "duration_ns": 100 * MS,
        "error_ns": MS // 10,
        "on_gpu": True,
        "exposed_ns": {"dp": round(waiting * MS)},
        **columns,
    }
    compute, data, garbage, unknown = (round(part * MS) for part in work)
    return WindowReport(rank=rank, window=window, work_ns=(compute, data, garbage, 0, 0, unknown), **reported)
