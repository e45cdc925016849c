"""Hold spans as columns, for analysis."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from commtrace.trace import schema
from commtrace.trace.schema import Row, row_of

Int8 = npt.NDArray[np.int8]
Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

DTYPE_OF_COLUMN: Mapping[str, type[np.signedinteger | np.bool_]] = {
    "kind": np.int8,
    "name": np.int32,
    "lane": np.int8,
    "start": np.int64,
    "end": np.int64,
    "step": np.int32,
    "microbatch": np.int32,
    "chunk": np.int32,
    "stage": np.int32,
    "group": np.int64,
    "seq": np.int64,
    "op_in_seq": np.int32,
    "bytes": np.int64,
    "self_bytes": np.int64,
    "dtype": np.int32,
    "peer": np.int32,
    "is_async": np.bool_,
    "id": np.int64,
    "stalled_on": np.int64,
    "timing": np.int8,
    "start_exact": np.bool_,
    "end_exact": np.bool_,
    "start_lead_us": np.int16,
    "end_lead_us": np.int16,
}
"""Every column but ``detail``, which the reader reads into marks."""

_columns_of: Final = attrgetter(*DTYPE_OF_COLUMN)

_ROWS_AT_A_TIME: Final = 500


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows of one rank as columns; −1 means "does not apply"; ``name`` and ``dtype`` index ``Run.names``."""

    kind: Int8
    name: Int32
    lane: Int8
    start: Int64
    end: Int64
    step: Int32
    microbatch: Int32
    chunk: Int32
    stage: Int32
    group: Int64
    seq: Int64
    op_in_seq: Int32
    bytes: Int64
    self_bytes: Int64
    dtype: Int32
    peer: Int32
    is_async: Bool
    id: Int64
    stalled_on: Int64
    timing: Int8
    start_exact: Bool
    end_exact: Bool
    start_lead_us: Int16
    end_lead_us: Int16

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: npt.NDArray[np.integer | np.bool_] | slice) -> Spans:
        """Select rows by a mask, by indices (in that order) or by a slice (without copying)."""
        if not isinstance(rows, slice) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)  # once instead of once for each column
        return Spans(*[column[rows] for column in _columns_of(self)])

    def replace(self, **columns: npt.NDArray[np.generic]) -> Spans:
        return Spans(*(columns.get(column.name, getattr(self, column.name)) for column in fields(self)))

    def narrowed(self) -> Spans:
        """Return the same rows; columns in which all are equal hold the value once, and are read-only."""
        return Spans(*(_narrowed(getattr(self, column.name)) for column in fields(self)))

    @classmethod
    def empty(cls) -> Spans:
        return cls(*(np.empty(0, dtype) for dtype in DTYPE_OF_COLUMN.values()))

    @classmethod
    def concatenate(cls, parts: Sequence[Spans]) -> Spans:
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in DTYPE_OF_COLUMN))

    @classmethod
    def from_tuples(cls, rows: Sequence[Row], names: list[str]) -> Spans:
        """Turn rows into columns; new names are appended to ``names``."""
        if not rows:
            return cls.empty()
        codes: dict[str | None, int] = {None: schema.NOT_APPLICABLE}
        codes.update((name, code) for code, name in enumerate(names))
        columns = dict(zip(schema.SCHEMA.names, zip(*rows, strict=True), strict=True))
        for column in ("name", "dtype"):
            for word in set(columns[column]) - set(codes):
                codes[word] = len(names)
                names.append(word)
            columns[column] = tuple(map(codes.__getitem__, columns[column]))
        return cls(*(np.fromiter(columns[name], dtype, len(rows)) for name, dtype in DTYPE_OF_COLUMN.items()))

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], names: list[str]) -> Spans:
        """Return spans from dictionaries, with strings for codes, for tests; new names are appended to ``names``."""
        table = [_coded(row, names) for row in rows]
        defaults = {
            "start": 0, "end": 0, "op_in_seq": 0, "is_async": False, "timing": 0, "lane": schema.COMPUTE,
            "start_exact": True, "end_exact": True,
            "start_lead_us": schema.UNKNOWN_LEAD, "end_lead_us": schema.UNKNOWN_LEAD,
        }  # fmt: skip
        return cls(
            *(
                np.array([row.get(name, defaults.get(name, schema.NOT_APPLICABLE)) for row in table], dtype)
                for name, dtype in DTYPE_OF_COLUMN.items()
            )
        )


def _narrowed(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    is_one_value = len(column) > 0 and bool((column == column[0]).all())
    return np.broadcast_to(column[:1].copy(), len(column)) if is_one_value else column


def _coded(row: Mapping[str, Any], names: list[str]) -> dict[str, object]:
    unknown = set(row) - set(DTYPE_OF_COLUMN)
    if unknown:
        raise ValueError(f"no such columns: {sorted(unknown)}; the columns are {list(DTYPE_OF_COLUMN)}")
    coded = dict(row)
    for column, words in (("kind", schema.KINDS), ("lane", schema.LANES), ("timing", schema.TIMINGS)):
        if isinstance(coded.get(column), str):
            coded[column] = words.index(coded[column])
    for column in ("name", "dtype"):
        if isinstance(coded.get(column), str):
            if coded[column] not in names:
                names.append(coded[column])
            coded[column] = names.index(coded[column])
    return coded


class RowBatch(Sequence[Row]):
    """Immutable rows of one pass of the recorder: some made one by one, and then others that came as columns.

    Columns of the former, and rows of the latter, are made once for all sinks, when first requested.

    Args:
        rows: rows with their details; marks are among them.
        spans: further rows, without details.
        names: the strings for the codes of ``spans``.
    """

    __slots__ = ("_all_rows", "_columns", "_names", "rows", "spans")

    def __init__(self, rows: Iterable[Row] = (), spans: Spans | None = None, names: Sequence[str] = ()) -> None:
        self.rows = list(rows)
        self.spans = Spans.empty() if spans is None else spans
        self._names = list(names)
        self._columns: Spans | None = None
        self._all_rows: list[Row] | None = None

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowBatch:
        """Return rows as a batch; one that is a batch already as it is."""
        return rows if isinstance(rows, RowBatch) else cls(rows)

    def __len__(self) -> int:
        return len(self.rows) + len(self.spans)

    @overload
    def __getitem__(self, at: int) -> Row: ...

    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...

    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        return self._made_rows()[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._made_rows())

    @property
    def has_columns(self) -> bool:
        """Return whether columns are there, or cheaper than rows."""
        return self._columns is not None or len(self.spans) > 0

    @property
    def names(self) -> list[str]:
        """Return the strings for the codes of ``columns``."""
        self._make()
        return self._names

    @property
    def columns(self) -> Spans:
        """Return the rows as columns, without ``detail``."""
        return self._make()

    @property
    def last_step(self) -> int:
        """Return the highest step of all rows; −1 without any."""
        of_rows = max((row.step for row in self.rows), default=schema.NOT_APPLICABLE)
        of_spans = int(self.spans.step.max()) if len(self.spans) else schema.NOT_APPLICABLE
        return max(of_rows, of_spans)

    def first_step(self, default: int) -> int:
        """Return the lowest step of all rows; ``default`` if they belong to none."""
        steps = [row.step for row in self.rows if row.step >= 0]
        inside = self.spans.step[self.spans.step >= 0]
        if len(inside):
            steps.append(int(inside.min()))
        return min(steps, default=default)

    def of_steps(self, begin: int, end: int) -> RowBatch:
        """Return the rows of ``begin <= step < end``."""
        rows = [row for row in self.rows if begin <= row.step < end]
        inside = (self.spans.step >= begin) & (self.spans.step < end)
        return RowBatch(rows, self.spans.take(inside), self._names)

    def where(self, is_kept: Bool) -> RowBatch:
        """Return the rows that a mask of all rows keeps."""
        of_rows, of_spans = is_kept[: len(self.rows)], is_kept[len(self.rows) :]
        rows = [self.rows[at] for at in np.flatnonzero(of_rows).tolist()]
        return RowBatch(rows, self.spans.take(of_spans), self._names)

    def with_later_steps(self, last: int, shift: int) -> RowBatch:
        """Return the rows with ``shift`` added to all steps up to ``last``."""
        rows = [row._replace(step=row.step + shift) if 0 <= row.step <= last else row for row in self.rows]
        step = self.spans.step
        is_early = (step >= 0) & (step <= last)
        spans = self.spans.replace(step=np.where(is_early, step + shift, step).astype(step.dtype))
        return RowBatch(rows, spans, self._names)

    def followed_by(self, rows: Sequence[Row]) -> RowBatch:
        """Return a batch that has ``rows``, too, behind those that were made one by one."""
        return RowBatch([*self.rows, *rows], self.spans, self._names)

    def behind(self, rows: Sequence[Row]) -> RowBatch:
        """Return a batch that begins with ``rows``."""
        return RowBatch([*rows, *self.rows], self.spans, self._names)

    def counts_by_kind(self) -> Int64:
        """Return the number of rows of each of ``schema.KINDS``."""
        counts = np.bincount(self.spans.kind, minlength=len(schema.KINDS))
        for row in self.rows:
            counts[row.kind] += 1
        return counts

    def _make(self) -> Spans:
        if self._columns is not None:
            return self._columns
        parts = []
        for begin in range(0, len(self.rows), _ROWS_AT_A_TIME):
            parts.append(Spans.from_tuples(self.rows[begin : begin + _ROWS_AT_A_TIME], self._names))
            time.sleep(0)  # lets a training thread that waits for the GIL have it
        if len(self.spans):
            parts.append(self.spans)
        self._columns = Spans.concatenate(parts)
        return self._columns

    def _made_rows(self) -> list[Row]:
        if self._all_rows is None:
            self._all_rows = [*self.rows, *rows_of(self.spans, self._names)] if len(self.spans) else self.rows
        return self._all_rows


def rows_of(spans: Spans, names: Sequence[str]) -> list[Row]:
    """Turn columns into rows without a detail."""
    words: list[str | None] = [*names, None]  # −1 is the last one
    columns = {name: getattr(spans, name).tolist() for name in DTYPE_OF_COLUMN}
    for column in ("name", "dtype"):
        columns[column] = [words[code] for code in columns[column]]
    columns["detail"] = [None] * len(spans)
    return [row_of(values) for values in zip(*(columns[name] for name in Row._fields), strict=True)]
