"""What the summary says of an imported run."""

from __future__ import annotations

from pathlib import Path

from commtrace.analysis.breakdown.rank_means import PARTS, RankMean
from commtrace.analysis.summary import summarise


def rank_of(run: Path, rank: int = 0) -> RankMean:
    """Return the rank's row of the summary; its parts add up."""
    row = {row.rank: row for row in summarise(run).ranks}[rank]
    assert sum(map(row.part, PARTS)) == row.wall_ns
    return row
