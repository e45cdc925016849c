"""Findings that hold for as long as they are seen again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from commtrace.live.monitoring.findings import LiveEvent, LiveStraggler, cleared, found

_Key: TypeAlias = tuple[str, str]
"""The cause, and who."""


@dataclass(slots=True)
class _Seen:
    straggler: LiveStraggler
    windows: int = 0
    is_named: bool = False


class StandingFindings:
    """Names what was seen often enough in a row, and clears what is not seen any more.

    Args:
        windows_to_name: in so many windows in a row it must be seen.
    """

    def __init__(self, windows_to_name: int) -> None:
        self._windows_to_name = windows_to_name
        self._seen: dict[_Key, _Seen] = {}

    @property
    def named(self) -> list[LiveStraggler]:
        """What holds now."""
        return [one.straggler for one in self._seen.values() if one.is_named]

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
        seen: dict[_Key, LiveStraggler] = {(one.cause, one.who): one for one in stragglers}
        events = list(self._clear([key for key in self._seen if key not in seen and key[0] not in kept], now))
        for key, straggler in seen.items():
            known = self._seen.setdefault(key, _Seen(straggler))
            known.straggler = replace(straggler, since=known.straggler.since, since_step=known.straggler.since_step)
            known.windows += windows
            if not known.is_named and known.windows >= self._windows_to_name:
                known.is_named = True
                events.append(found(known.straggler, now, device))
        return events

    def _clear(self, gone: Sequence[_Key], now: float) -> Iterator[LiveEvent]:
        for key in gone:
            one = self._seen.pop(key)
            if one.is_named:
                yield cleared(one.straggler, now)
