"""Made runs on disk, as a recorder would have left them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commtrace.trace import schema
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row


def record(run: Run, directory: Path) -> Path:
    """Write the spans of a run, without its groups and topology, into a run directory."""
    for trace in run.ranks.values():
        writer = SegmentWriter(directory, trace.metadata)
        writer.write([_row(run, trace, row) for row in range(len(trace.spans))])
        writer.close()
    return directory


def _row(run: Run, trace: RankTrace, row: int) -> Row:
    return Row(*(_value(run, trace, field.name, row) for field in schema.SCHEMA))


def _value(run: Run, trace: RankTrace, column: str, row: int) -> Any:
    if column == "detail":
        return None
    value = getattr(trace.spans, column)[row].item()
    if column in ("name", "dtype"):
        return run.names[value] if value >= 0 else None
    return value
