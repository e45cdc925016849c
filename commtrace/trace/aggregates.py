"""Sum up steps that are not recorded in detail, in marks named ``aggregate``; several marks of a step add up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from commtrace.trace import schema
from commtrace.trace.inputs import printable
from commtrace.trace.schema import Row, mark_row

AGGREGATE: Final = "aggregate"
"""Name of the mark."""

_POINT_TO_POINT: Final = frozenset({"send", "recv"})
_OUTSIDE: Final = -1


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
    def write(self, rows: list[Row]) -> None: ...
    def close(self) -> None: ...


_Sums = dict[tuple[int, str, int, int], list[int]]


class AggregatingSink:
    """Passes on steps in detail, and rows before the first step's end; sums up others in ``aggregate`` marks."""

    def __init__(self, sink: _RowSink, in_detail: Callable[[int], bool]) -> None:
        self._sink = sink
        self._in_detail = in_detail
        self._sums: dict[int, _Sums] = {}
        self._last_ended = _OUTSIDE

    def write(self, rows: list[Row]) -> None:
        """Write rows like :meth:`commtrace.recorder.Sink.write`. If it fails, exactly ``rows`` are lost."""
        before = {step: {key: list(sums) for key, sums in own.items()} for step, own in self._sums.items()}
        last_ended = self._last_ended
        try:
            handed_on = self._handed_on(rows)
            if handed_on:
                self._sink.write(handed_on)
        except Exception:
            self._sums, self._last_ended = before, last_ended
            raise

    def close(self) -> None:
        """Write the sums of steps that never ended, and close the sink."""
        rest = [self._aggregate_mark(step) for step in sorted(self._sums)]
        try:
            if rest:
                self._sink.write(rest)
        finally:
            self._sink.close()

    def _handed_on(self, rows: Sequence[Row]) -> list[Row]:
        handed_on: list[Row] = []
        decided: dict[int, bool] = {}
        for row in rows:
            step = row.step
            kept = decided.get(step)
            if kept is None:
                kept = decided[step] = self._in_detail(step) if step >= 0 else False
            if row.kind == schema.STEP:
                handed_on.append(row)
                self._last_ended = max(self._last_ended, step)
                if not kept:
                    handed_on.append(self._aggregate_mark(step))
            elif kept or row.kind == schema.MARK or (step < 0 and self._last_ended < 0):
                handed_on.append(row)
            else:
                self._add(step, row)
        handed_on += [self._aggregate_mark(step) for step in sorted(self._sums) if step <= self._last_ended]
        return handed_on

    def _add(self, step: int, row: Row) -> None:
        peer = row.peer if row.name in _POINT_TO_POINT else schema.NOT_APPLICABLE
        key = (row.kind, row.name, row.group, peer)
        own = self._sums.setdefault(step, {})
        sums = own.get(key)
        if sums is None:
            sums = own[key] = [0, 0, 0, 0]
        duration = row.end - row.start
        sums[0] += 1
        sums[1] += duration
        sums[2] += max(0, row.bytes)
        sums[3] = max(sums[3], duration)

    def _aggregate_mark(self, step: int) -> Row:
        own = self._sums.pop(step, {})
        detail = [[schema.KINDS[key[0]], *key[1:], *sums] for key, sums in own.items()]
        return mark_row(AGGREGATE, detail, step)
