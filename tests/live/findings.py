"""Findings of the monitor, for the tests of what shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from commtrace.live.monitoring.findings import LiveStraggler, MonitorStatus

_RANK_1 = LiveStraggler(
    rank=1, host="node0", who="rank 1 on node0", place="ranks", cause="compute", since=5.0, cost_ms_per_step=12.0,
    gpu_hours_per_day=1.0, evidence="Evidence.", next_step="Do this.", ranks=(1,), since_step=30,
)  # fmt: skip


def live_straggler(rank: int = 1, **changes: Any) -> LiveStraggler:
    """One that is slow in all that it computes."""
    return replace(_RANK_1, rank=rank, ranks=(rank,), **changes)


def status(*stragglers: LiveStraggler, abstentions: tuple[str, ...] = ()) -> MonitorStatus:
    """A job of eight ranks that all report."""
    return MonitorStatus(5.0, 8, 8, (), 100.0, 3, False, None, abstentions, stragglers)
