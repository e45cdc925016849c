"""Steps of which nothing but the length was recorded, so that the run itself shows what recording costs.

Communication goes on being numbered in them, so that ranks stay joined: these numbers are missing on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from commtrace.trace.bounds import Count, Identity, Step

QUIET: Final = "quiet"
"""Name of the mark."""

_CountByGroup: TypeAlias = Annotated[tuple[tuple[Identity, Count], ...], Meta(max_length=65_536)]


class QuietChange(Struct, frozen=True):
    """A step began in which nothing is recorded, or, behind such a stretch, everything again.

    ``collectives`` and ``messages`` are counts of what each group has launched until then.
    """

    step: Step
    is_quiet: bool
    collectives: _CountByGroup = ()
    messages: _CountByGroup = ()


def read_change(detail: str | None) -> QuietChange:
    """Return the change in the detail of a mark of this process's own."""
    return msgspec.json.decode(detail or "", type=QuietChange)


def quiet_steps(changes: Iterable[QuietChange]) -> frozenset[int]:
    return frozenset(change.step for change in changes if change.is_quiet)


class Unrecorded(Struct, frozen=True):
    """What a rank launched on a group in its quiet stretches."""

    collectives: tuple[tuple[int, int], ...] = ()  # their numbers: the first, and the end, exclusive
    messages: int = 0

    def among(self, first: int, end: int) -> int:
        """Return how many of the collective numbers from ``first`` to below ``end`` these are."""
        return sum(max(0, min(end, last) - max(first, begin)) for begin, last in self.collectives)


def unrecorded(changes: Sequence[QuietChange], group: int, collectives: int, messages: int = 0) -> Unrecorded:
    """Return what was launched on a group in quiet stretches.

    Args:
        collectives: how many the rank has launched in all, for a stretch that it was in at its end.
        messages: the same of messages.
    """
    numbers, count = [], 0
    for begin, end in _stretches(changes):
        first = dict(begin.collectives).get(group, 0)
        last = collectives if end is None else dict(end.collectives).get(group, 0)
        if last > first:
            numbers.append((first, last))
        so_far = dict(begin.messages).get(group, 0)
        count += max(0, (messages if end is None else dict(end.messages).get(group, 0)) - so_far)
    return Unrecorded(tuple(numbers), count)


def _stretches(changes: Iterable[QuietChange]) -> Iterator[tuple[QuietChange, QuietChange | None]]:
    begin = None
    for change in changes:
        if begin is None and change.is_quiet:
            begin = change
        elif begin is not None and not change.is_quiet:
            yield begin, change
            begin = None
    if begin is not None:
        yield begin, None
