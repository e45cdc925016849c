"""The data of a run as the page reads them: the resources of docs/viewer-data.md.

A step is JSON, ``step/12.json``, and five tables of integer columns, ``step/12/work`` and so on. A report holds its
resources in the page; a server makes them when they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commtrace.analysis.breakdown.critical_path import KINDS
from commtrace.analysis.pipeline.plan import PlanTimeline
from commtrace.analysis.timeline import Lane, Outline, RankBounds, RankBoxes, StepBoxes, Timeline
from commtrace.viewer.choice import DrawnSteps

VERSION: Final = 2
"""Of the data interface. A page refuses data of another version."""

Resources = dict[str, bytes]
"""By name: JSON if the name ends in ``.json``, else a table, as an Arrow stream."""

BoxTable = Literal["work", "stalls", "host", "communication"]

BOX_TABLES: Final[tuple[BoxTable, ...]] = ("work", "stalls", "host", "communication")

_DELTA: Final = {"encoding": "delta"}
"""Metadata of a column that holds the differences of neighbouring rows: starts compress to a third that way."""

_DELTA_COLUMNS: Final = frozenset({"start", "join", "seq"})


def encode_json(value: Mapping[str, object]) -> bytes:
    """Return a resource of JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def run_json(
    title: str, drawn: DrawnSteps, steps: Sequence[int], note: str, *, has_plan: bool, can_show_all: bool = False
) -> dict[str, object]:
    """Return the resource that a page reads first: the steps that it lists, and a note on their choice."""
    return {
        "version": VERSION,
        "title": title,
        "steps": [drawn.entry(step) for step in steps],
        "can_show": sorted(drawn.durations) if can_show_all else list(steps),
        "first_shown": drawn.preferred[0] if steps else None,
        "critical_kinds": KINDS,
        "has_plan": has_plan,
        "note": note,
    }


def step_resources(timeline: Timeline, step: int, outline: str, ranks: Collection[int] | None = None) -> Resources:
    """Return a step with the boxes of all ranks, or of these, by index; ``outline`` names the outline's resource."""
    return {
        f"step/{step}.json": encode_json(step_json(timeline, step, outline)),
        f"step/{step}/ranks": ranks_table(timeline.bounds(step), ranks),
        **box_tables(timeline.step(step, ranks), f"step/{step}"),
    }


def step_json(timeline: Timeline, step: int, outline: str) -> dict[str, object]:
    """Return what a step is, without its tables; ``outline`` names the resource of its outline."""
    return {"step": step, "duration_ns": timeline.duration_ns(step), "outline": outline}


def plan_resources(plan: PlanTimeline) -> Resources:
    """Return an ideal schedule, which is a step with an outline of its own."""
    step = plan["step"]
    described = {"step": step["step"], "duration_ns": step["duration_ns"], "outline": "plan/outline.json"}
    bounds = [RankBounds(one["rank_index"], one["start"], one["end"], 0) for one in step["ranks"]]
    return {
        "plan.json": encode_json(described),
        "plan/outline.json": encode_json(outline_json(plan["outline"])),
        "plan/ranks": ranks_table(bounds),
        **box_tables(step, "plan"),
    }


def outline_json(outline: Outline) -> dict[str, object]:
    """Return an outline with each lane written once: a group of many ranks is a lane of each of them."""
    numbers: dict[tuple[str, str, tuple[int, ...]], int] = {}
    lanes: list[Lane] = []
    ranks = []
    for rank in outline["ranks"]:
        own = []
        for lane in rank["lanes"]:
            key = (lane["role"], lane["group"], tuple(lane["ranks"]))
            if key not in numbers:
                numbers[key] = len(lanes)
                lanes.append(lane)
            own.append(numbers[key])
        ranks.append({**rank, "lanes": own})
    return {**outline, "lanes": lanes, "ranks": ranks}


def ranks_table(bounds: Sequence[RankBounds], with_boxes: Collection[int] | None = None) -> bytes:
    """Return the table of the ranks in a step; ``with_boxes``: indices of those whose boxes can be had, if not all."""
    rank = np.array([one.rank_index for one in bounds], np.int64)
    has_boxes = np.ones(len(rank), np.bool_) if with_boxes is None else np.isin(rank, list(with_boxes))
    return encode_table(
        {
            "rank": rank,
            "start": np.array([one.start for one in bounds], np.int64),
            "end": np.array([one.end for one in bounds], np.int64),
            "own": np.array([one.own_ns for one in bounds], np.int64),
            "has_boxes": has_boxes.astype(np.int64),
        }
    )


def box_tables(step: StepBoxes, prefix: str) -> Resources:
    """Return the boxes of a step (:meth:`commtrace.analysis.timeline.Timeline.step`), a table per kind.

    Rows of a rank are consecutive; the column ``rank`` is the rank's index in the outline. Times are ns after the
    begin of the step.
    """
    return {f"{prefix}/{table}": encode_table(_joined(step["ranks"], table)) for table in BOX_TABLES}


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


def _smallest(values: npt.NDArray[np.int64]) -> npt.NDArray[np.integer]:
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return values.astype(dtype)
    return values
