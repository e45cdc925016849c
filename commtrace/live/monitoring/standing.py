"""Findings that hold for as long as they are seen again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from commtrace.analysis.stragglers.microbatches import SEQUENCES
from commtrace.live.monitoring.findings import LiveEvent, LiveStraggler, changed, cleared, found


@dataclass(slots=True, eq=False)
class _Known:
    """One of them.

    Attributes:
        straggler: as it was seen last.
        told: as it was told last; None before it is named.
        windows: in how many it was seen.
    """

    straggler: LiveStraggler
    told: LiveStraggler | None = None
    windows: int = 0


class StandingFindings:
    """Names what was seen often enough in a row, and clears what is not seen any more.

    A finding is the same as before if it has the same cause and name, or more than half of its ranks or of those that
    it had: a set that grows or shrinks, and ranks that turn out to be a host, are not named anew.

    Args:
        windows_to_name: in so many windows in a row it must be seen.
    """

    def __init__(self, windows_to_name: int) -> None:
        self._windows_to_name = windows_to_name
        self._known: list[_Known] = []

    @property
    def named(self) -> list[LiveStraggler]:
        """What holds now."""
        return [one.straggler for one in self._known if one.told is not None]

    def join(
        self,
        stragglers: Sequence[LiveStraggler],
        now: float,
        device: str,
        kept: Collection[str] = (),
        windows: int = 1,
    ) -> list[LiveEvent]:
        """Take what is seen now; what has changed.

        Args:
            stragglers: each with the instant from which on it is seen.
            now: epoch seconds.
            device: what hours are counted of: ``GPU`` or ``rank``.
            kept: causes that could not be looked for now: what was known of them stands.
            windows: from how many what is seen now comes.
        """
        before, self._known = self._known, []
        continued = _continued(before, stragglers)
        gone = [one for one in before if all(one is not other for other in continued)]
        self._known = [one for one in gone if one.straggler.cause in kept]
        events = [cleared(one.straggler, now) for one in gone if one not in self._known and one.told is not None]
        for seen, known in zip(stragglers, continued, strict=True):
            straggler, one = seen, known or _Known(seen)
            if one.straggler.since < straggler.since:
                since, since_step = one.straggler.since, one.straggler.since_step
                straggler = replace(straggler, since=since, since_step=since_step)
            one.straggler = straggler
            one.windows += windows
            events += self._tell(one, now, device)
            self._known.append(one)
        return events

    def _tell(self, one: _Known, now: float, device: str) -> Iterator[LiveEvent]:
        if one.told is None:
            if one.windows >= self._windows_to_name:
                one.told = one.straggler
                yield found(one.straggler, now, device)
        elif _where(one.told) != _where(one.straggler):
            yield changed(one.straggler, one.told, now, device)
            one.told = one.straggler


def _continued(known: Sequence[_Known], stragglers: Sequence[LiveStraggler]) -> list[_Known | None]:
    """Of each that is seen now, which of those that are known it is."""
    found: list[_Known | None] = [None] * len(stragglers)
    left = list(known)
    for is_same in (_has_same_name, _has_same_ranks):
        for number, straggler in enumerate(stragglers):
            same = [one for one in left if found[number] is None and is_same(one.straggler, straggler)]
            if same:
                found[number] = max(same, key=lambda one: len({*one.straggler.ranks} & {*straggler.ranks}))
                left = [one for one in left if one is not found[number]]
    return found


def _where(one: LiveStraggler) -> tuple[str, tuple[int, ...], bool]:
    """Neither which rank is the slowest nor the cause, which may change from window to window; but whether it is the
    input of these ranks and not themselves.
    """
    return one.place, tuple(sorted(one.ranks)), one.cause == SEQUENCES


def _has_same_name(one: LiveStraggler, other: LiveStraggler) -> bool:
    return (one.cause, one.who) == (other.cause, other.who)


def _has_same_ranks(one: LiveStraggler, other: LiveStraggler) -> bool:
    """Whether most of the ranks of one are among those of the other."""
    first, second = {*one.ranks}, {*other.ranks}
    return 2 * len(first & second) > min(len(first), len(second))
