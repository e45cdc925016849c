"""The modules of a run as a table: where their forward and backward time goes, and what of it is communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from commtrace.cli.units import milliseconds

MOST_ROWS: Final = 25
_LEAST_SHARE: Final = 0.01
NOTE: Final = (
    "Nested modules are contained. exposed: of that time, the lane stood still for communication. median, p95: forward "
    "and backward of a step. slowest: the rank whose median is largest, and how much it exceeds that of ranks."
)


def module_table(summary: Mapping[str, Any]) -> Table | None:
    """Mean per rank and step; None where no module was recorded."""
    rows = summary["modules"]
    divisor = max(len(summary["ranks"]), 1) * max(summary["run"]["steps"]["count"], 1)
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("module", overflow="fold")
    for heading in ("modules", "calls", "forward", "backward", "recompute", "exposed", "median", "p95", "slowest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:MOST_ROWS]:
        parts = [row[f"{way}_ns"] for way in ("forward", "backward", "recompute")]
        table.add_row(
            escape(row["module"]),
            str(row["modules"]),
            f"{row['calls'] / divisor:.3g}",
            *(milliseconds(part / divisor) for part in (*parts, row["exposed_ns"])),
            *(milliseconds(row[f"{part}_step_ns"]) for part in ("median", "p95")),
            _slowest(row),
        )
    return table


def _slowest(row: Mapping[str, Any]) -> str:
    """Empty where no rank is slower than the others by a share that the table could show."""
    slower = row["slowest_rank_slower"]
    return "" if slower is None or slower < _LEAST_SHARE else f"rank {row['slowest_rank']} +{slower:.0%}"
