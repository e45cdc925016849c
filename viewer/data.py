"""The data of a run as the page reads them: the resources of docs/viewer-data.md.

``run`` is JSON; a step is five tables of integer columns, ``step/12/work`` and so on, each an Arrow stream. A report
holds its resources, gzipped, in the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commtrace.analysis.timeline import RankBoxes, StepBoxes

VERSION: Final = 2
"""Of the data interface. A page refuses data of another version."""

BoxTable = Literal["work", "stalls", "host", "communication"]

BOX_TABLES: Final[tuple[BoxTable, ...]] = ("work", "stalls", "host", "communication")

_DELTA: Final = {"encoding": "delta"}
"""Metadata of a column that holds the differences of neighbouring rows: starts compress to a third that way."""

_DELTA_COLUMNS: Final = frozenset({"start", "join", "seq"})


def step_tables(step: StepBoxes, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield the tables of a step of a timeline (:meth:`commtrace.analysis.timeline.Timeline.step`), by resource name.

    Rows of a rank are consecutive; the column ``rank`` is the rank's index in the outline. Times are ns after the
    begin of the step.
    """
    ranks = step["ranks"]
    bounds = {
        "rank": np.array([rank["rank_index"] for rank in ranks], np.int64),
        "start": np.array([rank["start"] for rank in ranks], np.int64),
        "end": np.array([rank["end"] for rank in ranks], np.int64),
    }
    yield f"{prefix}/bounds", encode_table(bounds)
    for table in BOX_TABLES:
        yield f"{prefix}/{table}", encode_table(_joined(ranks, table))


def _joined(ranks: Sequence[RankBoxes], table: BoxTable) -> dict[str, npt.NDArray[np.int64]]:
    counts = [len(rank[table]["start"]) for rank in ranks]
    columns = {"rank": np.repeat([rank["rank_index"] for rank in ranks], counts).astype(np.int64)}
    names = list(ranks[0][table]) if ranks else []
    return columns | {
        name: np.concatenate([np.asarray(rank[table][name], np.int64) for rank in ranks]) for name in names
    }


def encode_table(columns: Mapping[str, npt.NDArray[np.int64]]) -> bytes:
    """Return integer columns of equal length as an Arrow stream, each in the smallest type that holds it."""
    arrays, fields = [], []
    for name, values in columns.items():
        stored = np.diff(values, prepend=0) if name in _DELTA_COLUMNS else values
        array = pa.array(_smallest(stored))
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata=_DELTA if name in _DELTA_COLUMNS else None))
    sink = pa.BufferOutputStream()
    schema = pa.schema(fields)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def _smallest(values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return values.astype(dtype)
    return values
