"""Sum up steps that are not recorded in detail, in marks named ``aggregate``; several marks of a step add up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from commtrace.trace import schema
from commtrace.trace.inputs import printable
from commtrace.trace.quiet import QUIET, quiet_steps, read_change
from commtrace.trace.schema import Row, mark_row
from commtrace.trace.spans import RowBatch, Spans

AGGREGATE: Final = "aggregate"
"""Name of the mark."""

_POINT_TO_POINT: Final = frozenset({"send", "recv"})
_OUTSIDE: Final = -1
_NEVER: Final = (1 << 63) - 1


class Aggregate(NamedTuple):
    """Sums over the spans of one step with the same kind, name, group and peer."""

    kind: str
    name: str
    group: int
    peer: int  # of p2p operations and waits for them; else −1
    num_spans: int
    total_ns: int
    num_bytes: int  # 0 without any
    longest_ns: int


def read_aggregates(details: Iterable[str]) -> list[Aggregate]:
    """Add up the marks of one step."""
    sums: dict[tuple[str, str, int, int], Aggregate] = {}
    for detail in details:
        for entry in json.loads(detail):  # the reader has checked it
            new = Aggregate(entry[0], printable(entry[1]), *entry[2:])
            old = sums.get(new[:4])
            sums[new[:4]] = new if old is None else _added(old, new)
    return list(sums.values())


def _added(old: Aggregate, new: Aggregate) -> Aggregate:
    return new._replace(
        num_spans=old.num_spans + new.num_spans,
        total_ns=old.total_ns + new.total_ns,
        num_bytes=old.num_bytes + new.num_bytes,
        longest_ns=max(old.longest_ns, new.longest_ns),
    )


class _RowSink(Protocol):
    def write(self, rows: Sequence[Row]) -> None: ...
    def close(self) -> None: ...


_Sums = dict[tuple[int, str, int, int], list[int]]


class AggregatingSink:
    """Passes on steps in detail, and rows from before the first step ended; sums up others in ``aggregate`` marks."""

    def __init__(self, sink: _RowSink, in_detail: Callable[[int], bool]) -> None:
        self._sink = sink
        self._in_detail = in_detail
        self._sums: dict[int, _Sums] = {}
        self._quiet: set[int] = set()  # steps of which nothing is recorded, that have not ended
        self._last_ended = _OUTSIDE
        self._first_end_ns = _NEVER

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows like :meth:`commtrace.recording.recorder.Sink.write`. If it fails, exactly ``rows`` are lost."""
        before = {
            step: {key: list(sums) for key, sums in sums_of_step.items()} for step, sums_of_step in self._sums.items()
        }
        last_ended, first_end_ns, quiet = self._last_ended, self._first_end_ns, self._quiet.copy()
        try:
            handed_on = self._handed_on(RowBatch.of(rows))
            if handed_on:
                self._sink.write(handed_on)
        except Exception:
            self._sums, self._last_ended, self._first_end_ns, self._quiet = before, last_ended, first_end_ns, quiet
            raise

    def close(self) -> None:
        """Write the sums of steps that never ended, and close the sink."""
        rest = [self._aggregate_mark(step) for step in sorted(self._sums)]
        try:
            if rest:
                self._sink.write(rest)
        finally:
            self._sink.close()

    def _handed_on(self, batch: RowBatch) -> RowBatch:
        spans = batch.columns
        if not len(spans):
            return batch
        is_step = spans.kind == schema.STEP
        in_detail = np.isin(spans.step, [step for step in np.unique(spans.step).tolist() if self._is_in_detail(step)])
        # By time: rows of one pass come from several recorders, and what began before may end, and come, later.
        self._first_end_ns = min(self._first_end_ns, int(spans.end[is_step].min(initial=_NEVER)))
        is_before = (spans.step < 0) & (spans.start < self._first_end_ns)
        is_kept = in_detail | is_before | np.isin(spans.kind, (schema.STEP, schema.BETWEEN, schema.MARK))
        self._add(spans.take(~is_kept), batch.names)
        self._last_ended = max(self._last_ended, int(spans.step[is_step].max(initial=_OUTSIDE)))
        self._quiet.update(quiet_steps(read_change(row.detail) for row in batch.rows if row.name == QUIET))
        ended = [step for step in spans.step[is_step & ~in_detail].tolist() if step not in self._quiet]
        self._quiet.difference_update(spans.step[is_step].tolist())
        late = [step for step in sorted(self._sums) if step <= self._last_ended and step not in ended]
        return batch.where(is_kept).followed_by([self._aggregate_mark(step) for step in (*ended, *late)])

    def _is_in_detail(self, step: int) -> bool:
        return step >= 0 and self._in_detail(step)

    def _add(self, spans: Spans, names: Sequence[str]) -> None:
        if not len(spans):
            return
        point_to_point = [code for code, name in enumerate(names) if name in _POINT_TO_POINT]
        peer = np.where(np.isin(spans.name, point_to_point), spans.peer, schema.NOT_APPLICABLE)
        keys = (spans.step, spans.kind, spans.name, spans.group, peer)
        order = np.lexsort(keys)
        changes = np.zeros(len(order), np.bool_)
        changes[0] = True
        for key in keys:
            changes[1:] |= np.diff(key[order]) != 0
        begins = np.flatnonzero(changes)
        duration = (spans.end - spans.start)[order]
        sums = (
            np.diff(begins, append=len(order)),
            np.add.reduceat(duration, begins),
            np.add.reduceat(np.maximum(spans.bytes[order], 0), begins),
            np.maximum.reduceat(duration, begins),
        )
        first = order[begins]  # row of each group, as the sort is stable
        columns = [column[np.argsort(first)].tolist() for column in (*(key[first] for key in keys), *sums)]
        for step, kind, name, group, peer_of_group, *new in zip(*columns, strict=True):
            totals = self._sums.setdefault(step, {}).setdefault((kind, names[name], group, peer_of_group), [0, 0, 0, 0])
            count, total_ns, num_bytes, longest_ns = new
            totals[:] = totals[0] + count, totals[1] + total_ns, totals[2] + num_bytes, max(totals[3], longest_ns)

    def _aggregate_mark(self, step: int) -> Row:
        sums_of_step = self._sums.pop(step, {})
        detail = [[schema.KINDS[key[0]], *key[1:], *sums] for key, sums in sums_of_step.items()]
        return mark_row(AGGREGATE, detail, step)
