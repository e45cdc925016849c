"""Files of a job whose nodes wrote to disks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commtrace.trace.metadata import ClockAnchor
from tests.trace.rows import mark, row, steps, write_rank

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
UNTIL = 50 * SECOND
"""On the monotonic clock of every host, which says 5 s when a rank begins."""


def write_node(directory: Path, ranks: list[int], run_id: str, began_s: float = 0, **changes: Any) -> None:
    """Ranks of one node that record for 45 s."""
    groups = changes.pop("groups", [list(range(changes.get("world_size", 4)))])
    began = BEGAN + round(began_s * SECOND)
    for rank in ranks:
        marks = [
            mark("process_group", {"id": 100 + sum(group), "ranks": group, "ordinal": 0, "role": "", "name": "",
                                   "description": "", "backend": "gloo"})
            for group in groups
            if rank in group
        ]  # fmt: skip
        fields = {
            "world_size": 4,
            "run_id": run_id,
            "host": run_id,
            "node": run_id,
            "boot_id": run_id,
            "session": began + rank,
            "anchor": ClockAnchor(5 * SECOND, began),
            **changes,
        }
        write_rank(directory, [*marks, *steps(0, 3), row(start=6 * SECOND, end=UNTIL)], rank=rank, **fields)
