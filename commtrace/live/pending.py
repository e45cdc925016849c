"""Rows whose step is not complete: as they came, and as columns, which are made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from commtrace.live.gil import GilYield
from commtrace.trace import schema
from commtrace.trace.files.row_batch import RowBatch
from commtrace.trace.rows import Row
from commtrace.trace.spans import Bool, Int64, Spans

_SPARE_NAMES: Final = 1_000
"""Names that no row bears any more are forgotten when there are this many and twice as many as rows."""


class PendingRows:
    """Rows by their arrival.

    Args:
        gil_yield: taken in long work.

    Attributes:
        rows: as they came.
        names: the words of ``columns``.
    """

    def __init__(self, gil_yield: GilYield) -> None:
        self._gil_yield = gil_yield
        self.rows: list[Row] = []
        self.names: list[str] = []
        self._columns: list[Spans] = []
        self._handed: list[Bool] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> Spans:
        """All rows."""
        self._columns = [Spans.concatenate(self._columns)]
        return self._columns[0]

    @property
    def handed(self) -> Bool:
        """Which rows a listener has had."""
        self._handed = [np.concatenate([np.empty(0, np.bool_), *self._handed])]
        return self._handed[0]

    def add(self, batch: RowBatch) -> None:
        """Take new ones; of marks, those of a step."""
        spans, rows = batch.columns, list[Row](batch)
        is_wanted = (spans.kind != schema.MARK) | (spans.step >= 0)
        if not is_wanted.all():
            kept = np.flatnonzero(is_wanted)
            spans, rows = spans.take(kept), [batch[at] for at in kept.tolist()]
        self._columns.append(self._recoded(spans, batch.names))
        self._handed.append(np.zeros(len(rows), np.bool_))
        self.rows += rows
        self._gil_yield.maybe_yield()

    def _recoded(self, spans: Spans, words: Sequence[str]) -> Spans:
        """With our codes for the words."""
        own = {name: code for code, name in enumerate(self.names)}
        for word in words:
            if word not in own:
                own[word] = len(self.names)
                self.names.append(word)
        codes = np.array([*(own[word] for word in words), schema.NOT_APPLICABLE], np.int32)  # −1 is the last one
        return spans.replace(name=codes[spans.name], dtype=codes[spans.dtype])

    def keep(self, kept: Int64, handed: Bool) -> None:
        """Only these rows, ascending.

        Args:
            kept: positions.
            handed: which of all rows listeners have had.
        """
        self._columns = [self.columns.take(kept)]
        self._handed = [handed[kept]]
        self.rows = [self.rows[at] for at in kept.tolist()]
        self._forget_names()

    def drop_oldest(self, count: int) -> None:
        """Let go of so many."""
        del self.rows[:count]
        self._handed = [self.handed[count:]]
        while count:
            oldest = self._columns.pop(0)
            if len(oldest) > count:
                self._columns.insert(0, oldest.take(slice(count, None)))
            count -= min(count, len(oldest))
        self._forget_names()

    def _forget_names(self) -> None:
        if len(self.names) > _SPARE_NAMES + 2 * len(self.rows):
            self.names = []
            self._columns = [Spans.from_tuples(self.rows, self.names)]
