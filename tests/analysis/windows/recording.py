"""Writes a made run as its recorders would: row by row as they end, in small segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from commtrace.trace import schema
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row
from tests.trace.rows import mark

_ROWS_PER_BATCH = 40
_COLUMNS = [field.name for field in schema.SCHEMA]


def record(run: Run, directory: Path, *, steps_per_segment: int = 2) -> Path:
    """Write every rank of a run; returns the directory."""
    for trace in run.ranks.values():
        writer = SegmentWriter(directory, trace.metadata, steps_per_segment=steps_per_segment)
        writer.write([mark("process_group", group._asdict()) for group in trace.groups.values()])
        if trace.coordinates:
            writer.write([mark("topology", {"coordinates": trace.coordinates, "parallel": trace.parallel})])
        rows = [_row(run, trace, at) for at in np.argsort(trace.spans.end, kind="stable").tolist()]
        for first in range(0, len(rows), _ROWS_PER_BATCH):
            writer.write(rows[first : first + _ROWS_PER_BATCH])
        writer.write([mark("end", {})])
        writer.close()
    return directory


def _row(run: Run, trace: RankTrace, at: int) -> Row:
    values = {name: getattr(trace.spans, name)[at].item() for name in _COLUMNS if name != "detail"}
    for name in ("name", "dtype"):
        values[name] = run.names[values[name]] if values[name] >= 0 else None
    values["detail"] = trace.details.get(values["id"])
    return Row(*(values[name] for name in _COLUMNS))
