"""The lanes of several blocks of ranks become those of one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.replay.lanes import Lanes, Launches, ReadLanes, Starts, Waits, concatenate_lanes
from commtrace.analysis.replay.segments import WorkSegments
from commtrace.trace.spans import Int64

STEPS = 2


_DTYPES = {"Int8": np.int8, "Int32": np.int32, "Int64": np.int64, "Bool": np.bool_}


def _columns(kind: type[Any], count: int, rng: np.random.Generator, **given: Int64) -> Any:
    columns = {
        field.name: given.get(field.name, rng.integers(0, 100, count).astype(_DTYPES[str(field.type)]))
        for field in fields(kind)
    }
    return kind(**columns)


def _part(ranks: int, calls: int, rng: np.random.Generator) -> ReadLanes:
    """So many ranks, on each of which so many communications are launched and waited for in a step; one of them is for
    a launch that nobody knows."""
    steps, per_step = ranks * STEPS, calls + 2
    first_node = np.arange(steps) * per_step
    nodes, pieces, launches = steps * per_step, steps * (calls + 1), steps * calls
    launch = np.arange(launches)
    launch[0] = -1
    wait_node = (first_node[:, None] + np.arange(1, calls + 1)).reshape(-1)
    given: dict[str, Any] = {
        "node_piece": np.minimum(np.arange(nodes), pieces),
        "first_node": first_node.reshape(ranks, STEPS),
        "last_node": (first_node + per_step - 1).reshape(ranks, STEPS),
        "step_start": rng.integers(0, 1000, (ranks, STEPS)),
        "step_end": rng.integers(0, 1000, (ranks, STEPS)),
        "between_ns": rng.integers(0, 1000, (ranks, STEPS)),
        "piece_ns": rng.integers(0, 1000, pieces),
        "piece_segment": np.arange(pieces) // 2,
        "segments": _columns(WorkSegments, -(-pieces // 2), rng),
        "starts": _columns(Starts, launches, rng, node=wait_node - 1, piece=np.arange(launches) % pieces),
        "waits": _columns(Waits, launches, rng, node=wait_node, launch=launch),
    }
    return ReadLanes(Lanes(**given), _columns(Launches, launches, rng))


def _expected(parts: list[ReadLanes]) -> dict[str, list[Any]]:
    """Worked out number by number."""
    expected: dict[str, list[Any]] = {}
    before = {"node": 0, "piece": 0, "segment": 0, "start": 0}
    counted = {
        "node_piece": "piece",
        "first_node": "node",
        "last_node": "node",
        "piece_segment": "segment",
        "starts.node": "node",
        "starts.piece": "piece",
        "waits.node": "node",
        "waits.launch": "start",
    }
    for part in parts:
        for name, values in _flat(part).items():
            by = before[counted[name]] if name in counted else 0
            added = np.vectorize(lambda value, by=by: value if value < 0 else value + by)(values)
            expected.setdefault(name, []).extend(added.tolist())
        lanes = part.lanes
        before["node"] += len(lanes.node_piece)
        before["piece"] += len(lanes.piece_ns)
        before["segment"] += len(lanes.segments)
        before["start"] += len(lanes.starts)
    return expected


def _flat(read: ReadLanes) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in [
        *((field.name, getattr(read.lanes, field.name)) for field in fields(Lanes)),
        ("launches", read.launches),
    ]:
        if isinstance(value, np.ndarray):
            flat[name] = value
        else:
            flat |= {f"{name}.{own.name}": getattr(value, own.name) for own in fields(value)}
    return flat


def _types(read: ReadLanes) -> dict[str, Any]:
    return {name: values.dtype for name, values in _flat(read).items()}


def _columns_of(read: ReadLanes) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in _flat(read).items()}


@pytest.mark.parametrize("sizes", [[(2, 3), (3, 40), (1, 5), (2, 1)], [(1, 1), (1, 2)]])
def test_lanes_of_parts_are_numbered_on_from_those_before(sizes: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(1)
    parts = [_part(*size, rng) for size in sizes]

    joined = concatenate_lanes(parts)

    assert _columns_of(joined) == _expected(parts)
    assert _types(joined) == _types(parts[0])
