"""Spans of all ranks from the columns of a trace of the what-if study."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.importers.stalls import Intervals, gaps, stalls
from commtrace.importers.whatif_grid import Grid, Worker
from commtrace.importers.whatif_types import OperationType
from commtrace.trace import schema
from commtrace.trace.spans import DTYPE_OF_COLUMN, Int64, Spans

STEP_NAME: Final = "step"
_NO: Final = schema.NOT_APPLICABLE


class Operations(NamedTuple):
    """The operations of a job, column by column; ascending by worker, step, start, end and number.

    Attributes:
        worker, type, step: positions among the workers, the types and the steps of the job.
        start, end: ns since the start of the run.
        seq: number among the operations of its type in its step.
    """

    worker: Int64
    type: Int64
    step: Int64
    start: Int64
    end: Int64
    seq: Int64
    chunk: Int64
    microbatch: Int64

    def take(self, rows: npt.NDArray[Any]) -> Operations:
        return Operations(*(column[rows] for column in self))


class Steps(NamedTuple):
    """The steps of a job, which lie one behind the other; ns since the start of the run."""

    number: Int64
    begin: Int64
    end: Int64


class Job(NamedTuple):
    """The workers of a trace and the types of their operations.

    Attributes:
        stride: from one step to the next, of the numbers that a communication has among those of its group.
        names: the words that the codes of the spans stand for.
    """

    workers: Sequence[Worker]
    types: Sequence[OperationType]
    steps: Steps
    grid: Grid
    stride: int
    names: Sequence[str]


def spans_by_worker(job: Job, operations: Operations) -> list[Spans]:
    """Return the spans of each worker: by step the step, what was computed, what was communicated, what stalled."""
    rows = _Rows.of(job, operations)
    spans = _spans(job, operations, rows)
    bounds = np.searchsorted(operations.worker[rows.operation], np.arange(len(job.workers) + 1))
    return [spans.take(slice(first, last)) for first, last in pairwise(bounds.tolist())]


_STEPS, _WORK, _COMMUNICATIONS, _STALLS = range(4)


class _Rows(NamedTuple):
    """The rows of all workers, in order.

    Attributes:
        part: which kind of row it is.
        operation: that it is of; of a step the first one, of a stall that which was waited for.
        start, end: ns since the start of the run.
        id: of communications, and of those that stalls are on; counted by worker.
    """

    part: Int64
    operation: Int64
    start: Int64
    end: Int64
    id: Int64

    @classmethod
    def of(cls, job: Job, operations: Operations) -> _Rows:
        cell = operations.worker * len(job.steps.number) + operations.step
        first = np.flatnonzero(np.diff(cell, prepend=-1))
        communicates = np.array([bool(one.group) for one in job.types])[operations.type]
        work, communications = np.flatnonzero(~communicates), np.flatnonzero(communicates)
        bounds = Intervals(job.steps.begin[operations.step[first]], job.steps.end[operations.step[first]])
        # Workers one behind the other, as their steps are: the gaps of all are found at once.
        shift = operations.worker * int(job.steps.end[-1])
        idle = gaps(
            _shifted(bounds, shift[first]),
            _shifted(Intervals(operations.start[work], operations.end[work]), shift[work]),
            np.searchsorted(first, work, "right") - 1,
        )
        in_flight = Intervals(operations.start[communications], operations.end[communications])
        stalled = stalls(idle, _shifted(in_flight, shift[communications]))
        parts = [first, work, communications, communications[stalled.on]]
        operation = np.concatenate(parts)
        part = np.repeat(np.arange(len(parts)), [len(own) for own in parts])
        before = -shift[parts[_STALLS]]
        order = np.argsort(cell[operation] * len(parts) + part, kind="stable")
        rank_begin = np.searchsorted(operations.worker[communications], np.arange(len(job.workers)))
        number = np.cumsum(communicates) - 1 - rank_begin[operations.worker]
        return cls(
            part[order],
            operation[order],
            np.concatenate([bounds.start, operations.start[work], in_flight.start, stalled.start + before])[order],
            np.concatenate([bounds.end, operations.end[work], in_flight.end, stalled.end + before])[order],
            number[operation][order],
        )


def _shifted(intervals: Intervals, by: Int64) -> Intervals:
    return Intervals(intervals.start + by, intervals.end + by)


def _spans(job: Job, operations: Operations, rows: _Rows) -> Spans:
    of = operations.take(rows.operation)
    code = {name: position for position, name in enumerate(job.names)}
    kind, name, groups, peers = _by_type(job, code)
    type_kind = kind[of.type]
    is_step, is_work, is_stall = rows.part == _STEPS, rows.part == _WORK, rows.part == _STALLS
    communicates = ~(is_step | is_work)
    is_phase = is_work & ((type_kind == schema.FORWARD) | (type_kind == schema.BACKWARD))
    lane = np.where(rows.part == _COMMUNICATIONS, schema.COMMUNICATION, schema.COMPUTE)
    columns = {
        "kind": np.where(is_step, schema.STEP, np.where(is_stall, schema.STALL, type_kind)),
        "name": np.where(is_step, code[STEP_NAME], name[of.type]),
        "lane": np.where(is_work & (type_kind == schema.GC), schema.HOST, lane),
        "start": rows.start,
        "end": rows.end,
        "step": job.steps.number[of.step],
        "microbatch": np.where(is_phase, of.microbatch, _NO),
        "chunk": np.where(is_phase | communicates, of.chunk, _NO),
        "stage": np.where(is_step, _NO, np.array([worker.stage for worker in job.workers])[of.worker]),
        "group": np.where(communicates, groups[of.worker, of.type], _NO),
        "seq": np.where(communicates, of.step * job.stride + of.seq, _NO),
        "op_in_seq": np.zeros(len(rows.part)),
        "peer": np.where(communicates, peers[of.worker, of.type], _NO),
        "is_async": communicates,
        "id": np.where(rows.part == _COMMUNICATIONS, rows.id, _NO),
        "stalled_on": np.where(is_stall, rows.id, _NO),
        "timing": np.full(len(rows.part), schema.CUDA_EVENT_TIMING),
    }
    none = np.full(len(rows.part), _NO)
    return Spans(*(columns.get(name, none).astype(dtype) for name, dtype in DTYPE_OF_COLUMN.items()))


def _by_type(job: Job, code: dict[str, int]) -> tuple[Int64, Int64, Int64, Int64]:
    """Kind and name of each type; by worker and type, the group and the rank at the other end."""
    kind = np.array([one.kind for one in job.types])
    name = np.array([code[one.name] for one in job.types])
    groups, peers = (np.full((len(job.workers), len(job.types)), _NO, np.int64) for _ in range(2))
    for row, worker in enumerate(job.workers):
        for column, one in enumerate(job.types):
            if one.group:
                groups[row, column] = job.grid.group(one.group, worker).id
            if one.distance:
                peers[row, column] = job.grid.neighbour(worker, one.distance)
    return kind, name, groups, peers
