"""Writes a made run as its recorders would: row by row as they end, in small segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.run import Run
from tests.trace.rows import mark, row_at

_ROWS_PER_BATCH = 40


def record(run: Run, directory: Path, *, steps_per_segment: int = 2) -> Path:
    """Write every rank of a run; returns the directory."""
    for trace in run.ranks.values():
        writer = SegmentWriter(directory, trace.metadata, steps_per_segment=steps_per_segment)
        writer.write([mark("process_group", group.to_json()) for group in trace.groups.values()])
        if trace.coordinates:
            writer.write([mark("topology", {"coordinates": trace.coordinates, "parallel": trace.parallel})])
        rows = [row_at(run, trace, at) for at in np.argsort(trace.spans.end, kind="stable").tolist()]
        for first in range(0, len(rows), _ROWS_PER_BATCH):
            writer.write(rows[first : first + _ROWS_PER_BATCH])
        writer.write([mark("end", {})])
        writer.close()
    return directory
