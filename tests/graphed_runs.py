"""Runs of a job whose forward and backward are replayed from a CUDA graph, and of the same job without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commtrace.trace import schema
from commtrace.trace.schema import Row
from tests.factory import group
from tests.trace.rows import mark, row, write_rank

MS = 1_000_000
STEP_NS = 100 * MS
WORLD = group("dp", 0, 1)
GRAPH = 7
OPERATIONS = (("all_gather", 4_000), ("all_gather", 4_000), ("reduce_scatter", 6_000))
"""Of forward and backward, with their bytes; a step's eager all_reduce follows."""


def graph_mark(**changes: Any) -> Row:
    """What the graph contains."""
    operations = [
        [name, 0, at, 0, size, -1, "float32", -1, True, -1, -1, -1, "Block"]
        for at, (name, size) in enumerate(OPERATIONS)
    ]
    detail = {
        "id": GRAPH, "phases": "forward+backward", "is_known": True, "unlisted": 0,
        "counters": [[WORLD.id, None, -1, 0]], "operations": operations,
    }  # fmt: skip
    return mark("graph", {**detail, **changes})


def replay(step: int, start: int, end: int, first: int, **columns: Any) -> Row:
    return row(
        kind=schema.REPLAY, name="forward+backward", step=step, start=start, end=end, seq=step, id=GRAPH,
        op_in_seq=len(OPERATIONS), bytes=sum(size for _, size in OPERATIONS),
        timing=schema.CUDA_EVENT_TIMING, detail=f'{{"launched_ns":{start},"first":[{first}]}}',
    )._replace(**columns)  # fmt: skip


def _collective(name: str, size: int, step: int, seq: int, start: int, end: int, number: int) -> Row:
    return row(
        kind=schema.COLLECTIVE, name=name, lane=schema.COMMUNICATION, step=step, start=start, end=end, group=WORLD.id,
        seq=seq, op_in_seq=0, bytes=size, dtype="float32", is_async=True, id=number, timing=schema.CUDA_EVENT_TIMING,
    )  # fmt: skip


def _step(step: int, rank: int, *, is_graphed: bool) -> list[Row]:
    begin = step * STEP_NS
    first = step * (len(OPERATIONS) + 1)
    rows = [row(kind=schema.STEP, name="step", step=step, start=begin, end=begin + STEP_NS)]
    end = begin + 80 * MS
    if is_graphed:
        rows.append(replay(step, begin, end, first))
    else:
        rows.append(row(kind=schema.FORWARD, name="forward", step=step, start=begin, end=begin + 30 * MS))
        rows.append(row(kind=schema.BACKWARD, name="backward", step=step, start=begin + 30 * MS, end=end))
        for at, (name, size) in enumerate(OPERATIONS):
            start = begin + (at + 1) * 20 * MS + rank
            rows.append(_collective(name, size, step, first + at, start, start + 5 * MS, 10 * step + at))
    norm = _collective("all_reduce", 8, step, first + len(OPERATIONS), end + rank, end + 10 * MS, 10 * step + 9)
    stall = row(
        kind=schema.STALL, name="all_reduce", step=step, start=end, end=end + 10 * MS, group=WORLD.id, seq=norm.seq,
        stalled_on=norm.id, timing=schema.CUDA_EVENT_TIMING,
    )  # fmt: skip
    return [*rows, norm, stall]


def write_run(
    folder: Path,
    *,
    is_graphed: bool,
    steps: int = 4,
    steps_per_segment: int = 100,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write both ranks; ``changes`` are those of the graph's mark, by rank."""
    for rank in range(2):
        rows = [mark("process_group", WORLD.to_json())]
        rows += [graph_mark(**(changes or {}).get(rank, {}))] if is_graphed else []
        rows += [one for step in range(steps) for one in _step(step, rank, is_graphed=is_graphed)]
        write_rank(folder, rows, steps_per_segment=steps_per_segment, rank=rank, world_size=2)
    return folder
