"""Chooses the ranks to show if there are more than lines: those that stand out, and the extremes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from commtrace.top.frame import Frame, RankRow


def choose_ranks(frame: Frame, most: int) -> list[RankRow]:
    """At most so many ranks, in their order: slow and silent ones, who is waited for, the extremes of compute."""
    rows = frame.ranks
    if len(rows) <= most:
        return list(rows)
    chosen: dict[int, RankRow] = {}
    for row in _by_interest(frame):
        if len(chosen) >= most:
            break
        chosen.setdefault(row.rank, row)
    return [row for row in rows if row.rank in chosen]


def _by_interest(frame: Frame) -> Iterable[RankRow]:
    rows = frame.ranks
    slow = {rank for one in frame.stragglers for rank in (one.rank, *one.others)}
    yield from (row for row in rows if row.rank in slow)
    # A few of each kind first: a thousand silent ranks must not hide the one that all wait for.
    yield from _most(rows, lambda row: row.blame_ns or 0)[:2]
    silent = [row for row in rows if row.state == "silent"]
    yield from silent[:4]
    by_work = sorted(rows, key=lambda row: (-row.parts.get("compute", row.step_ns or 0), row.rank))
    for heaviest, lightest in zip(by_work, reversed(by_work), strict=True):
        yield heaviest
        yield lightest


def _most(rows: Sequence[RankRow], of: Callable[[RankRow], int]) -> list[RankRow]:
    return sorted((row for row in rows if of(row)), key=lambda row: (-of(row), row.rank))
