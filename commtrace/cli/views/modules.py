"""The modules of a run as a table: where their forward and backward time goes, and what of it is communication."""

from __future__ import annotations

from typing import Final

from rich.markup import escape
from rich.table import Table

from commtrace.analysis.breakdown.modules import ModuleTime
from commtrace.analysis.summary import Summary
from commtrace.cli.units import milliseconds

MOST_ROWS: Final = 25
_LEAST_SHARE: Final = 0.01
NOTE: Final = (
    "Nested modules are contained. exposed: of that time, the lane stood still for communication. median, p95: forward "
    "and backward of a step. slowest: the rank whose median is largest, and how much it exceeds that of ranks."
)


def module_table(summary: Summary) -> Table | None:
    """Mean per rank and step; None where no module was recorded."""
    rows = summary.modules
    divisor = max(len(summary.ranks), 1) * max(len(summary.run.steps.used), 1)
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("module", overflow="fold")
    for heading in ("modules", "calls", "forward", "backward", "recompute", "exposed", "median", "p95", "slowest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:MOST_ROWS]:
        table.add_row(
            escape(row.name),
            str(len(row.members)),
            f"{row.calls / divisor:.3g}",
            *(milliseconds(part / divisor) for part in (*row.ns.values(), row.exposed_ns)),
            *(milliseconds(row.step_quantile(share)) for share in (0.5, 0.95)),
            _slowest(row),
        )
    return table


def _slowest(row: ModuleTime) -> str:
    """Empty where no rank is slower than the others by a share that the table could show."""
    rank, slower = row.slowest()
    return "" if slower is None or slower < _LEAST_SHARE else f"rank {rank} +{slower:.0%}"
