"""What is known of an accelerator's operations beside their times, and the rows that both together are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from commtrace.capture.device.placement import DeviceOperations, PlacedTimes
from commtrace.capture.records import DeviceCall, communication_row, kind_of
from commtrace.recording.recorder import Recorder
from commtrace.trace.schema import Row
from commtrace.trace.spans import Bool

_ROWS_BETWEEN_YIELDS: Final = 64


class Handed(NamedTuple):
    """When a call was handed to its backend: ns, before and after; 0 where that is not known."""

    id: int
    batch: int
    backend: str
    group: str
    launched_at: int
    returned_at: int


class OperationFacts(Protocol):
    """What is known of operations beside their times, in the order of their ``DeviceOperations``."""

    @property
    def kinds(self) -> Sequence[int]:
        """Return the kinds of their rows."""

    @property
    def is_in_detail(self) -> Bool:
        """Return which of them belong to steps in detail."""

    def take(self, rows: Bool) -> OperationFacts:
        """Select some by a mask."""

    def handed(self) -> Sequence[Handed]:
        """Return when they were handed to their backends, by the host's clock."""

    def rows(self, placed: PlacedTimes) -> list[Row]:
        """Return their rows."""


Part: TypeAlias = "tuple[DeviceOperations, OperationFacts]"
"""Operations of one source."""


class CallFacts:
    """The facts of calls that were recorded one by one."""

    def __init__(self, calls: Sequence[DeviceCall]) -> None:
        self._calls = calls

    @property
    def kinds(self) -> Sequence[int]:
        return [kind_of(call.launch) for call in self._calls]

    @property
    def is_in_detail(self) -> Bool:
        return np.array([call.launched_at > 0 for call in self._calls], np.bool_)

    def take(self, rows: Bool) -> CallFacts:
        return CallFacts([self._calls[row] for row in np.flatnonzero(rows).tolist()])

    def handed(self) -> Sequence[Handed]:
        return [
            Handed(
                call.id,
                call.batch,
                call.launch.state.nccl.name,
                call.launch.state.group.name,
                call.launched_at,
                call.returned_at,
            )
            for call in self._calls
        ]

    def rows(self, placed: PlacedTimes) -> list[Row]:
        columns = (placed.start, placed.end, placed.timing, placed.start_exact, placed.end_exact)
        rows: list[Row] = []
        for call, (start, end, timing, *exact) in zip(
            self._calls, zip(*(column.tolist() for column in columns), strict=True), strict=True
        ):
            if len(rows) % _ROWS_BETWEEN_YIELDS == 0:
                time.sleep(0)  # lets a training thread that waits for the GIL have it
            rows.append(
                communication_row(call.launch, start, end, call.id, timing, False, call.op_in_seq, (exact[0], exact[1]))
            )
        return rows


def rows_of(parts: Sequence[Part], placed: PlacedTimes) -> list[Row]:
    """Return the rows of operations that were placed together, in the order of ``parts``."""
    rows: list[Row] = []
    begin = 0
    for calls, facts in parts:
        rows += facts.rows(placed.take(slice(begin, begin + len(calls))))
        begin += len(calls)
    return rows


@contextmanager
def dropped_on_failure(parts: Sequence[Part], recorder: Recorder) -> Iterator[None]:
    """Count operations as dropped if they could not be made into rows."""
    try:
        yield
    except Exception:
        for kind in (kind for _, facts in parts for kind in facts.kinds):
            recorder.drop((None, kind))
        raise
