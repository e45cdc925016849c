"""The rows of one pass of the recorder, with columns that are made once for all sinks."""

from __future__ import annotations

import time
from typing import Final

from commtrace.trace.rows import Row
from commtrace.trace.spans import Spans

_ROWS_AT_A_TIME: Final = 500


class RowBatch(list[Row]):
    """A list of rows that must not be changed any more.

    Attributes:
        has_columns: whether they were requested before.
    """

    __slots__ = ("_columns", "_names")

    @property
    def has_columns(self) -> bool:
        return hasattr(self, "_columns")

    @property
    def names(self) -> list[str]:
        """Return what the codes of ``columns`` stand for."""
        self._make()
        return self._names

    @property
    def columns(self) -> Spans:
        """The rows as columns, without ``detail``."""
        self._make()
        return self._columns

    def _make(self) -> None:
        if self.has_columns:
            return
        self._names: list[str] = []
        parts = []
        for begin in range(0, len(self), _ROWS_AT_A_TIME):
            parts.append(Spans.from_tuples(self[begin : begin + _ROWS_AT_A_TIME], self._names))
            time.sleep(0)  # lets a training thread that waits for the GIL have it
        self._columns = Spans.concatenate(parts)
