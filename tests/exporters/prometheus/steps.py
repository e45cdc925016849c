"""Summaries and ranks for the tests of the exporter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commtrace.live.rank import LiveRank
from commtrace.live.summary import MessageSummary, OperationSummary, StepSummary
from tests.trace.rows import mark, metadata

SECOND = 1_000_000_000


def rank(directory: Path = Path("run"), number: int = 3, **changes: Any) -> LiveRank:
    """Rank 3, with a place in the parallel dimensions."""
    live = LiveRank(metadata(rank=number, world_size=8, **changes), directory)
    live.learn(mark("topology", {"coordinates": {"tp": 1, "pp": 0, "dp": 1}}))
    return live


def summary(step: int = 0, **changes: Any) -> StepSummary:
    """Step of 2 s: 1 s forward, 0.25 s exposed dp, 0.5 s bubble, 0.25 s other."""
    fields: dict[str, Any] = {
        "run_id": "r1",
        "rank": 3,
        "step": step,
        "start_ns": 10 * SECOND,
        "duration_ns": 2 * SECOND,
        "compute_ns": {"forward": SECOND, "backward": 0},
        "exposed_ns": {"dp": SECOND // 4},
        "bubble_ns": SECOND // 2,
        "other_ns": SECOND // 4,
        "operations": (
            OperationSummary(
                "all_reduce",
                "dp",
                2,
                8_000,
                SECOND,
                SECOND // 4,
                3 * SECOND // 4,
                12_000.0,
                SECOND,
                expected_ns=SECOND / 5,
                compared_ns=SECOND // 2,
            ),
            OperationSummary("recv", "pp", 4, 400, SECOND // 2, SECOND // 2, 0, 400.0, SECOND // 2),
        ),
        "messages": (MessageSummary("all_reduce", "between", "64KiB", 2, SECOND, 12_000.0),),
    }
    return StepSummary(**{**fields, **changes})
