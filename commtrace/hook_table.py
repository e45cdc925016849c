"""What stands in for torch's tables of optimizer hooks (:mod:`commtrace.capture.model.optimizer_hooks`).

It is a file of its own outside of ``commtrace.capture`` because ``torch.compile`` must trace it where the script
compiles an optimizer's step: see :mod:`commtrace.called`. Nothing of ours is in the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Protocol


class Hook(Protocol):
    """One of ours."""

    def __call__(self, *arguments: Any) -> None:
        """As torch calls it."""

    def failed(self, error: Exception) -> None:
        """Is told what fails."""


class HookTable(MutableMapping[int, Any]):
    """One of torch's tables, with our hooks in front of it when it is gone through; for everything else, the table.

    Args:
        table: torch's own.
        is_compiling: ``torch.compiler.is_dynamo_compiling``.

    Attributes:
        table: torch's own.
        ours: hooks, in the order in which they are called.
    """

    def __init__(self, table: MutableMapping[int, Any], is_compiling: Callable[[], bool]) -> None:
        self.table = table
        self.ours: list[Hook] = []
        self.original: Callable[[], Iterable[Any]] = table.values
        self.is_compiling = is_compiling

    def values(self) -> Iterable[Any]:  # type: ignore[override]
        """Return all hooks. Ours are those of now; a change of the table meanwhile is noticed as torch notices it."""
        if self.is_compiling():  # first of all: the compiler reads no further
            return self.table.values()
        ours: tuple[Hook, ...] = ()
        try:
            ours = tuple(self.ours)
        except Exception as error:
            self._failed(error)
        theirs = self.original()
        try:
            return itertools.chain(ours, theirs)
        except Exception as error:
            self._failed(error)
        return theirs

    def __getitem__(self, number: int) -> Any:
        return self.table[number]

    def __setitem__(self, number: int, hook: Any) -> None:
        self.table[number] = hook

    def __delitem__(self, number: int) -> None:
        del self.table[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __reduce__(self) -> Any:
        return self.table.__reduce__()

    def _failed(self, error: Exception) -> None:
        for hook in tuple(self.ours):
            hook.failed(error)
