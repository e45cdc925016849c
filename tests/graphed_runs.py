"""Runs of a job whose forward and backward are replayed from a CUDA graph, and of the same job without one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


STAMPS = [[at, 3 * at, 3 * at + 1, 3 * at + 2, 3 * at + 1, True, True, True] for at in range(len(OPERATIONS))]
"""Start, end, and where the stream came to the wait, of each operation."""


def stamps(*waits_ms: int) -> list[int]:
    """What a replay's stamps say if it does as the job without a graph; how long after a launch it is waited for."""
    offsets = []
    for at, wait in enumerate(waits_ms or (10,) * len(OPERATIONS)):
        start = (at + 1) * 20 * MS
        offsets += [start, start + 5 * MS, start + wait * MS]
    return offsets


def stamped_detail(start: int, first: int, offsets: list[int], first_id: int, error_ns: int = 500) -> str:
    facts = {"launched_ns": start, "first": [first], "first_id": first_id, "stamps": offsets, "error_ns": error_ns}
    return json.dumps(facts)


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


def _step(step: int, rank: int, *, is_graphed: bool, waits_ms: Sequence[int] | None) -> list[Row]:
    begin = step * STEP_NS
    first = step * (len(OPERATIONS) + 1)
    rows = [row(kind=schema.STEP, name="step", step=step, start=begin, end=begin + STEP_NS)]
    end = begin + 80 * MS
    if is_graphed:
        of_stamps = {}
        if waits_ms is not None:
            offsets = [offset + (rank if at % 3 < 2 else 0) for at, offset in enumerate(stamps(*waits_ms))]
            of_stamps = {"detail": stamped_detail(begin, first, offsets, 10 * step)}
        rows.append(replay(step, begin, end, first, **of_stamps))
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
    waits_ms: Mapping[int, Sequence[int]] | None = None,
) -> Path:
    """Write both ranks; ``changes`` are those of the graph's mark, by rank.

    Replays of the ranks in ``waits_ms`` have stamps: each operation is waited for so long after its launch.
    """
    waits = waits_ms or {}
    for rank in range(2):
        rows = [mark("process_group", WORLD.to_json())]
        stamped = {"stamps": STAMPS, "unstamped": {}} if waits else {}
        rows += [graph_mark(**{**stamped, **(changes or {}).get(rank, {})})] if is_graphed else []
        for step in range(steps):
            rows += _step(step, rank, is_graphed=is_graphed, waits_ms=waits.get(rank))
        write_rank(folder, rows, steps_per_segment=steps_per_segment, rank=rank, world_size=2)
    return folder
