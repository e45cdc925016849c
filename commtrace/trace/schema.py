"""Define the table of spans: one row per span of time on one rank.

Times are int64 ns of ``CLOCK_MONOTONIC``, which all ranks of one boot of a host share; anchors in the metadata
translate them to the epoch. Codes are positions in ``KINDS``, ``LANES`` and ``TIMINGS``: append, never reorder, because
files hold the codes of the version that wrote them.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from commtrace.trace import schema

FORMAT_VERSION: Final = 1

KINDS: Final = (
    "step",
    "forward",
    "backward",
    "recompute",
    "module",
    "optimizer",
    "collective",
    "p2p",
    "stall",
    "data",
    "checkpoint",
    "gc",
    "mark",
    "evaluation",
    "user",
    "phase",
    "kernel",
    "memory",
    "replay",
    "between",
)
LANES: Final = ("host", "compute", "communication")
TIMINGS: Final = ("host", "cuda_event", "nccl_timing", "kernel", "unknown", "replay", "graph_stamp")

STEP, FORWARD, BACKWARD, RECOMPUTE, MODULE, OPTIMIZER, COLLECTIVE, P2P, STALL, DATA, CHECKPOINT, GC, MARK = range(13)
EVALUATION, USER, PHASE = 13, 14, 15
KERNEL, MEMORY, REPLAY, BETWEEN = 16, 17, 18, 19
HOST, COMPUTE, COMMUNICATION = range(3)
HOST_TIMING, CUDA_EVENT_TIMING, NCCL_TIMING, KERNEL_TIMING, UNKNOWN_TIMING, REPLAY_TIMING = range(6)
GRAPH_STAMP_TIMING: Final = 6

NOT_APPLICABLE: Final = -1
"""In an integer column: this field has no meaning for this row."""

_WORD = pa.dictionary(pa.int8(), pa.string())

SCHEMA: Final = pa.schema(
    [
        ("kind", _WORD),
        ("name", pa.dictionary(pa.int32(), pa.string())),  # the operation of a communication; else a free name
        ("lane", _WORD),
        ("start", pa.int64()),  # ns, host monotonic clock
        ("end", pa.int64()),
        ("step", pa.int32()),
        ("microbatch", pa.int32()),
        ("chunk", pa.int32()),  # virtual pipeline chunk on this rank
        ("stage", pa.int32()),  # pipeline stage
        ("group", pa.int64()),  # process group: the same number on every member (trace/metadata.py)
        ("seq", pa.int64()),  # per group for collectives; per (group, ordered pair) for P2P
        ("op_in_seq", pa.int32()),  # index inside a coalesced group of operations, which takes one seq
        ("bytes", pa.int64()),  # of the full tensor (docs/definitions.md)
        ("self_bytes", pa.int64()),  # uneven all_to_all: what goes to itself; sparse: 0; else -1
        ("dtype", _WORD),
        ("peer", pa.int32()),  # P2P partner, or root of a rooted collective: its rank in the world, or OUTSIDE + n
        ("is_async", pa.bool_()),
        ("id", pa.int64()),  # of a communication: unique on this rank
        ("stalled_on", pa.int64()),  # of a stall: the id of the communication that it waited for
        ("timing", _WORD),  # the source of start and end
        ("start_exact", pa.bool_()),  # False: the span started then or later
        ("end_exact", pa.bool_()),  # False: it ended then or earlier
        ("detail", pa.string()),  # JSON payload of marks and rare extras; null otherwise
        ("start_lead_us", pa.int16()),  # how far the host was ahead of the device at the start (below)
        ("end_lead_us", pa.int16()),
    ]
)

LATER_COLUMNS: Final = frozenset({"start_exact", "end_exact", "start_lead_us", "end_lead_us"})
"""Columns that recordings of older versions lack. commtrace/trace/files/exactness.py tells which of their times are
exact; leads are not known."""

UNKNOWN_LEAD: Final = -32_768
"""The lead of an instant that is the host's, or for which the host's time is not known well."""
SYNCHRONIZED_LEAD: Final = -32_767
"""The lead of the first mark after the host has waited for the device: it is small by necessity."""
LEAST_LEAD_US: Final = -32_766
MOST_LEAD_US: Final = 32_767
"""Leads beyond these are recorded as them."""

METADATA_KEY: Final = b"commtrace"
"""Key of the schema metadata that holds the rank's metadata as JSON."""


_NO = schema.NOT_APPLICABLE


class Coordinates(NamedTuple):
    """A place in the schedule; −1 where one does not apply."""

    step: int = _NO
    microbatch: int = _NO
    chunk: int = _NO
    stage: int = _NO


class Row(NamedTuple):
    """One span: the columns of ``SCHEMA``. Kind, lane and timing are codes, name and dtype strings."""

    kind: int
    name: str
    lane: int
    start: int
    end: int
    step: int = _NO
    microbatch: int = _NO
    chunk: int = _NO
    stage: int = _NO
    group: int = _NO
    seq: int = _NO
    op_in_seq: int = 0
    bytes: int = _NO
    self_bytes: int = _NO
    dtype: str | None = None
    peer: int = _NO
    is_async: bool = False
    id: int = _NO
    stalled_on: int = _NO
    timing: int = schema.HOST_TIMING
    start_exact: bool = True
    end_exact: bool = True
    detail: str | None = None
    start_lead_us: int = schema.UNKNOWN_LEAD
    end_lead_us: int = schema.UNKNOWN_LEAD


row_of: Final[Callable[[tuple[Any, ...]], Row]] = functools.partial(tuple.__new__, Row)
"""Makes a row from all its columns, in a third of the time of ``Row(…)``."""


MarkDetail: TypeAlias = Mapping[str, object] | Sequence[object]
"""The JSON of a mark: see commtrace/trace/marks.py."""


def mark_row(name: str, detail: MarkDetail, step: int = _NO, at_ns: int = 0) -> Row:
    """Return a row of kind ``mark``, at ``at_ns`` or now."""
    now = at_ns or time.monotonic_ns()
    return Row(schema.MARK, name, schema.HOST, now, now, step, detail=json.dumps(detail, separators=(",", ":")))
