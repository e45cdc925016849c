"""The critical path as one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.cli.units import duration, share

_NAMED: Final = 0.05
"""A rank with less of the path than this is one of the others."""

_MOST_RANKS: Final = 3
_WORTH_A_WORD: Final = 0.01
_NOT_OF_A_RANK: Final = ("transfer", "unknown")


def critical_path_lines(path: CriticalPath | None) -> Iterator[str]:
    """Yield whose work, and which communication, the steps are made of; nothing where that is not known."""
    if path is None or not path.ns:
        return
    whole = path.ns
    parts = [part for part in _parts(path.shares, whole) if part[0] >= _WORTH_A_WORD * whole]
    listed = ", ".join(words for _, words in sorted(parts, key=lambda part: -part[0]))
    unsure = path.uncertain_ns
    note = f"; {share(unsure, whole)} cannot be told by these clocks" if unsure >= _WORTH_A_WORD * whole else ""
    yield f"Critical path ({duration(whole / path.num_steps)} a step): {listed}{note}"


def _parts(shares: Sequence[Share], whole: int) -> Iterator[tuple[int, str]]:
    """Yield ranks that have much of it, the others together, and transfers by role: ns, and in words."""
    by_rank: dict[int, list[Share]] = {}
    by_communication: dict[str, int] = {}
    for one in shares:
        if one.kind in _NOT_OF_A_RANK:
            words = " ".join(filter(None, (one.role, one.kind)))
            by_communication[words] = by_communication.get(words, 0) + one.ns
        else:
            by_rank.setdefault(one.rank, []).append(one)
    ordered = sorted(by_rank, key=lambda rank: -_ns(by_rank[rank]))
    named = [rank for rank in ordered[:_MOST_RANKS] if _ns(by_rank[rank]) >= _NAMED * whole]
    for rank in named:
        yield _of_ranks(f"rank {rank}", by_rank.pop(rank), whole)
    if by_rank:
        other = "other " if named else ""
        who = f"{len(by_rank)} {other}rank{'s' * (len(by_rank) != 1)}"
        yield _of_ranks(who, [one for own in by_rank.values() for one in own], whole)
    for words, ns in by_communication.items():
        yield ns, f"{words} {share(ns, whole)}"


def _of_ranks(who: str, shares: Sequence[Share], whole: int) -> tuple[int, str]:
    by_kind: dict[str, int] = {}
    for one in shares:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + one.ns
    kinds = sorted(
        (kind for kind in by_kind if by_kind[kind] >= _WORTH_A_WORD * whole), key=lambda kind: -by_kind[kind]
    )
    listed = ", ".join(f"{kind} {share(by_kind[kind], whole)}" for kind in kinds)
    return _ns(shares), f"{who} {share(_ns(shares), whole)}" + (f" ({listed})" if listed else "")


def _ns(shares: Sequence[Share]) -> int:
    return sum(one.ns for one in shares)
