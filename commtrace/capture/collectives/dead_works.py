"""Notice Works that die without a wait, so that what is remembered of them does not pile up.

A Work may be dropped by the job as soon as it has its future, and the memory of the Work may go to an object that
lives on: only a callback of the weak reference tells that it is gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

Entry = TypeVar("Entry", bound="tuple[Any, ...]")

MOST_DEAD: Final = 1_000
"""Communications whose Work is gone, but whose end may yet be seen."""


class WorkReference(weakref.ref[object]):
    """A weak reference to a Work that is waited for.

    Attributes:
        key: id of the Work.
        futures: ids of the futures that the job has taken of it and still has; None if it took none.
    """

    __slots__ = ("futures", "key")

    key: int
    futures: set[int] | None


def has_future(reference: Callable[[], object]) -> bool:
    """Return whether the job still has a future of a Work, and may wait for that."""
    return isinstance(reference, WorkReference) and bool(reference.futures)


class DeadWorks(Generic[Entry]):
    """Takes what belongs to a Work out of ``pending`` as the Work dies; the last item of an entry is its reference.

    Args:
        pending: by the id of the Work.
        may_end: whether the end of a communication may yet be seen, by an entry: by a callback, or a wait for a future.
        give_up: is called, when the next communication is launched, with an entry of which nothing more will be seen.
    """

    def __init__(
        self, pending: dict[int, Entry], may_end: Callable[[Entry], bool], give_up: Callable[[Entry], None]
    ) -> None:
        self._pending = pending
        self._may_end = may_end
        self._give_up = give_up
        self.entries: deque[Entry] = deque()

    def reference(self, work: object) -> WorkReference:
        """Return a reference for the entry of a Work."""
        reference = WorkReference(work, self._died)
        reference.key, reference.futures = id(work), None
        return reference

    def _died(self, reference: weakref.ref[object]) -> None:
        # On any thread, and in the midst of any code of ours, as a garbage collection may end the Work: nothing but
        # operations of dictionary and queue, which take no lock.
        key: int = reference.key  # type: ignore[attr-defined]  # it is a WorkReference
        entry = self._pending.get(key)
        if entry is not None and entry[-1] is reference:
            self._pending.pop(key, None)
            self.entries.append(entry)

    def clear_away(self) -> None:
        """Give up the oldest of which nothing more will be seen."""
        entries = self.entries
        while entries:
            try:
                entry = entries.popleft()
            except IndexError:  # another thread was faster
                return
            if len(entries) < MOST_DEAD and self._may_end(entry):
                entries.appendleft(entry)
                return
            self._give_up(entry)

    def take(self, entry: Entry) -> bool:
        """Return whether the entry is among the dead, and take it out."""
        return bool(self.take_all(lambda dead: dead is entry))

    def take_all(self, chosen: Callable[[Entry], bool]) -> list[Entry]:
        """Take out the entries that are chosen, and return them."""
        entries = self.entries
        taken: list[Entry] = []
        for _ in range(len(entries)):
            try:
                entry = entries.popleft()
            except IndexError:  # another thread has taken some
                break
            (taken if chosen(entry) else entries).append(entry)
        return taken

    def unfinished(self) -> list[Entry]:
        """Return those whose end may yet be seen."""
        return [entry for entry in list(self.entries) if self._may_end(entry)]
