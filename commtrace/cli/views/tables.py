"""Tables of a run: the mean step of each rank, and the time of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.markup import escape
from rich.table import Table

from commtrace.analysis.breakdown.modules import ModuleTime
from commtrace.analysis.breakdown.rank_means import PARTS, RankMean
from commtrace.analysis.summary import Summary
from commtrace.cli.units import UNKNOWN, milliseconds, share

_MOST_RANKS: Final = 16
_ALWAYS_SHOWN: Final = ("compute", "exposed", "bubble", "other")
_WORTH_A_COLUMN: Final = 0.001
_WORTH_A_MARK: Final = 0.005
"""Least share of the step, stalled on communications without all of their members, that is marked."""

_PARTS_THAT_FIT_ON_ONE_LINE: Final = 4


def rank_table(summary: Summary, *, all_ranks: bool) -> tuple[Table, str]:
    """Return the table, and a note on how to read it."""
    ranks = summary.ranks
    shown = ranks if all_ranks else _extremes(ranks, {one.rank for one in summary.stragglers})
    parts = [part for part in PARTS if part in _ALWAYS_SHOWN or _largest_share(ranks, part) >= _WORTH_A_COLUMN]
    gap = " " if len(parts) <= _PARTS_THAT_FIT_ON_ONE_LINE else "\n"
    communicates = any(row.count for row in summary.communication)
    several_hosts = len(summary.run.hosts) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rank", justify="right", no_wrap=True)
    if several_hosts:
        table.add_column("host", overflow="fold")
    table.add_column("where", overflow="fold")
    for heading in ("step", *parts, "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in shown:
        host = [escape(rank.host)] if several_hosts else []
        cells = [_cell(rank, part, gap, communicates=communicates) for part in parts]
        table.add_row(
            str(rank.rank),
            *host,
            _where(rank, summary.run.parallel),
            milliseconds(rank.wall_ns),
            *cells,
            milliseconds(rank.hidden_ns) if communicates else UNKNOWN,
        )
    return table, _note(ranks, parts, len(ranks) - len(shown))


def _largest_share(ranks: Sequence[RankMean], part: str) -> float:
    return max(rank.part(part) / max(rank.wall_ns, 1) for rank in ranks)


def _extremes(ranks: Sequence[RankMean], named: set[int]) -> Sequence[RankMean]:
    # At most 16 ranks: those that compute most and least, and those that are named elsewhere.
    if len(ranks) <= _MOST_RANKS:
        return ranks
    by_compute = sorted(ranks, key=lambda rank: (rank.part("compute"), rank.rank))
    half = _MOST_RANKS // 2
    chosen = {rank.rank for rank in (*by_compute[:half], *by_compute[-half:])} | named
    return [rank for rank in ranks if rank.rank in chosen]


def _cell(rank: RankMean, part: str, gap: str, *, communicates: bool) -> str:
    part_ns, wall_ns = rank.part(part), rank.wall_ns
    of_communication = part in ("exposed", "bubble")
    unsure = of_communication and rank.unmatched_ns > _WORTH_A_MARK * wall_ns
    if not part_ns and ((unsure and part == "bubble") or (of_communication and not communicates)):
        return f"{UNKNOWN}{gap}    "  # none was recorded: that does not mean there was none
    mark = "*" if unsure else ""
    return f"{milliseconds(part_ns)}{mark}{gap}{share(part_ns, wall_ns):>4}"


def _where(rank: RankMean, parallel: Mapping[str, int]) -> str:
    coordinates = rank.coordinates.items()
    return escape(" ".join(f"{name}{position}" for name, position in coordinates if parallel.get(name, 2) > 1))


def _note(ranks: Sequence[RankMean], shown_parts: Sequence[str], hidden_ranks: int) -> str:
    note = "The parts add up to the step; other is in no span. hidden: communication in parallel, not a part."
    unsure = max(rank.unmatched_ns for rank in ranks)
    if any(rank.unmatched_ns > _WORTH_A_MARK * rank.wall_ns for rank in ranks):
        note += (
            f"\n* up to {milliseconds(unsure)} ms of exposed is on communications whose other members are not known: "
            "wait,\ntransfer and bubble cannot be separated there."
        )
    small = {part: max(rank.part(part) for rank in ranks) for part in PARTS if part not in shown_parts}
    listed = [f"{part} at most {milliseconds(most)} ms" for part, most in small.items() if most]
    if listed:
        note += f"\nBelow 0.1 % of every step: {', '.join(listed)}."
    if hidden_ranks:
        note += f"\n{hidden_ranks} ranks between the extremes of compute are not shown: --all-ranks shows them."
    return note


MOST_ROWS: Final = 25
_LEAST_SHARE: Final = 0.01
NOTE: Final = (
    "Nested modules are included. exposed: stalls for communication in that time. median, p95: forward "
    "and backward of a step. slowest: the rank whose median is largest, and how much it exceeds that of ranks."
)


def module_table(summary: Summary) -> Table | None:
    """Return times per rank and step; None if no module was recorded."""
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
            *(milliseconds(row.step_quantile(percent)) for percent in (50, 95)),
            _slowest(row),
        )
    return table


def _slowest(row: ModuleTime) -> str:
    # Empty if no rank is slower than the others by a visible share.
    rank, slower = row.slowest()
    return "" if slower is None or slower < _LEAST_SHARE else f"rank {rank} +{slower:.0%}"
