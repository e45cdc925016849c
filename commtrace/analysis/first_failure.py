"""Which rank of a job that ended badly failed first, as far as the files tell.

A rank whose own communication failed was cut off by another one. A rank that raised anything else, or whose files break
off without such a word, may be the one. Launchers kill what is left once one has failed, a tenth of a second later.

>>> find_first_failure(run, find_endings(run, now_ns))          # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from commtrace.analysis.endings import SILENT, STOPPED, Ending
from commtrace.trace.processes import GONE
from commtrace.trace.run import RankTrace, Run

_SURELY_EARLIER_NS: Final = 1_000_000_000
"""A rank at work writes twice a second: of two that are killed together, one's last word may be so much earlier."""

_OF_COMMUNICATION: Final = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"})
"""What torch raises where another rank, or the network, is at fault."""


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Who failed first.

    Attributes:
        ranks: the rank; several where it is one of them and nothing tells which.
        raised: it ended with an exception of its own; else its files break off.
        cut_off: ranks whose communication failed because of it.
    """

    ranks: tuple[int, ...]
    raised: bool
    cut_off: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "raised": self.raised, "cut_off": list(self.cut_off)}


def find_first_failure(run: Run, endings: Mapping[int, Ending]) -> FirstFailure | None:
    """Return who failed first; None if nobody did, all did alike, or nothing tells."""
    if len(run.ranks) < 2:
        return None
    bad = {rank: ending for rank, ending in endings.items() if _ended_badly(ending)}
    cut_off = tuple(rank for rank in bad if _was_cut_off(run.ranks[rank]))
    own = [rank for rank, ending in bad.items() if ending.exception and rank not in cut_off]
    broken = [rank for rank, ending in bad.items() if not ending.exception and rank not in cut_off]
    earliest = _surely_first(broken, endings)
    if earliest is not None:
        return FirstFailure((earliest,), False, cut_off)
    alike = len({endings[rank].exception for rank in own}) == 1
    if not cut_off and alike and len(broken) == 1 and len(own) == len(run.ranks) - 1 > 1:
        return FirstFailure((broken[0],), False, tuple(own))  # recorded before failed communication was
    if own and (cut_off or broken or not alike):
        first = min(own, key=lambda rank: (endings[rank].last_ns is None, endings[rank].last_ns))
        return FirstFailure((first,), True, cut_off)
    if broken and cut_off:
        # The launcher kills the others soon: what the first to ask has seen is the least.
        seen = [{*run.ranks[rank].gone_peers} for rank in cut_off if run.ranks[rank].gone_peers]
        gone = [rank for rank in broken if seen and rank in set.intersection(*seen)]
        return FirstFailure(tuple(gone or broken), False, cut_off)
    return None


def _ended_badly(ending: Ending) -> bool:
    return bool(ending.exception) or ending.state == STOPPED or (ending.state == SILENT and ending.process == GONE)


def _was_cut_off(trace: RankTrace) -> bool:
    if trace.exception in _OF_COMMUNICATION:
        return True
    # One that failed and was caught says nothing of the exception that ended the rank.
    return bool(trace.failures) and trace.exception in ("", trace.failures[-1]["exception"])


def _surely_first(broken: list[int], endings: Mapping[int, Ending]) -> int | None:
    """The rank whose last word came so long before anybody else's that it cannot be chance."""
    if not broken or any(ending.last_ns is None for ending in endings.values()):
        return None
    (_, first), (second, _) = sorted((ending.last_ns or 0, rank) for rank, ending in endings.items())[:2]
    earlier = second - (endings[first].last_ns or 0) > _SURELY_EARLIER_NS
    return first if earlier and first in broken else None
