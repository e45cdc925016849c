"""Rows and metadata as a rank would write them, for the tests of the trace package and of what reads runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from commtrace.trace import schema
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.metadata import ClockAnchor, RankMetadata
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row as Row  # what these functions make

_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(schema.SCHEMA.names, schema.NOT_APPLICABLE),
    "kind": schema.FORWARD,
    "name": "forward",
    "lane": schema.COMPUTE,
    "start": 0,
    "end": 0,
    "dtype": None,
    "is_async": False,
    "timing": schema.HOST_TIMING,
    "start_exact": True,
    "end_exact": True,
    "detail": None,
    "start_lead_us": schema.UNKNOWN_LEAD,
    "end_lead_us": schema.UNKNOWN_LEAD,
}


def row(**columns: Any) -> Row:
    """One span; columns that are not given do not apply, and it takes no time if its end is not given."""
    assert set(columns) <= set(_DEFAULTS), columns
    return Row(**{**_DEFAULTS, "end": columns.get("start", 0), **columns})


def steps(first: int, end: int) -> list[Row]:
    """A ``step`` row of 100 ns for every step from ``first`` to ``end``, without the last one."""
    return [row(kind=schema.STEP, name="step", step=i, start=100 * i, end=100 * i + 100) for i in range(first, end)]


def mark(name: str, detail: Any) -> Row:
    return row(kind=schema.MARK, name=name, detail=json.dumps(detail))


def metadata(rank: int = 0, **changes: Any) -> RankMetadata:
    fields: dict[str, Any] = {
        "run_id": "r1",
        "attempt": 0,
        "session": 1_000,
        "rank": rank,
        "local_rank": rank,
        "world_size": 1,
        "host": "alpha",
        "node": "alpha",
        "boot_id": "b1",
        "pid": 10 + rank,
        "backend": "gloo",
        "device": "cpu",
        "device_uuid": "",
        "versions": {"torch": "2.13.0"},
        "environment": {},
        "anchor": ClockAnchor(monotonic_ns=5, realtime_ns=1_700_000_000_000_000_000, bracket_ns=40),
    }
    return RankMetadata(**{**fields, **changes})


def write_rank(directory: Path, rows: Iterable[Row], *, steps_per_segment: int = 100, **changes: Any) -> Path:
    """Write one batch per row and close cleanly; returns the folder of the rank."""
    writer = SegmentWriter(directory, metadata(**changes), steps_per_segment=steps_per_segment)
    for one in rows:
        writer.write([one])
    writer.close()
    return writer.directory


def row_at(run: Run, trace: RankTrace, position: int) -> Row:
    """Return a row of a run that is in memory, as a recorder writes it."""
    columns = [name for name in schema.SCHEMA.names if name != "detail"]
    values: dict[str, Any] = {name: getattr(trace.spans, name)[position].item() for name in columns}
    for name in ("name", "dtype"):
        values[name] = run.names[values[name]] if values[name] >= 0 else None
    return Row(**values, detail=trace.details.get(values["id"]))


def write_run(directory: Path, run: Run) -> Path:
    """Write the spans of a made run, without its groups and topology, and close cleanly; returns the directory."""
    for trace in run.ranks.values():
        writer = SegmentWriter(directory, trace.metadata)
        writer.write([row_at(run, trace, position) for position in range(len(trace.spans))])
        writer.close()
    return directory
