"""Lanes of parts of a run have their places whoever is through with which part first."""

from __future__ import annotations

import itertools
import threading
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.lane_columns import LaneColumns
from commtrace.analysis.replay_lane import Lanes, Launches, ReadLanes, Starts, Waits
from commtrace.analysis.replay_segments import Segments
from commtrace.trace.spans import Int64

STEPS = 2
TIMEOUT_S = 60


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
        "piece_ns": rng.integers(0, 1000, pieces),
        "piece_segment": np.arange(pieces) // 2,
        "segments": _columns(Segments, -(-pieces // 2), rng),
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


def _told(read: ReadLanes) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in _flat(read).items()}


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_parts_may_come_in_any_order(order: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    # The second one has far more than the first one's rows let expect, the last one less.
    parts = [_part(*size, rng) for size in [(2, 3), (3, 40), (1, 5), (2, 1)]]
    columns = LaneColumns([10, 10, 10, 10])
    for number in order:
        columns.put(number, parts[number])

    assert _told(columns.joined()) == _expected(parts)
    assert _types(columns.joined()) == _types(parts[0])


def test_a_single_part_stays_as_it_is() -> None:
    part = _part(2, 3, np.random.default_rng(2))
    columns = LaneColumns([7])
    columns.put(0, part)

    assert columns.joined() is part


def test_parts_without_rows_have_a_place() -> None:
    rng = np.random.default_rng(3)
    parts = [_part(1, 1, rng), _part(1, 2, rng)]
    columns = LaneColumns([0, 0])
    for number, part in enumerate(parts):
        columns.put(number, part)

    assert _told(columns.joined()) == _expected(parts)


def test_several_threads_may_put_at_once() -> None:
    rng = np.random.default_rng(4)
    parts = [_part(1, 1 + number % 7, rng) for number in range(40)]
    expected = _expected(parts)
    for _ in range(20):
        columns, numbers, begin = LaneColumns([5] * len(parts)), iter(range(len(parts))), threading.Barrier(4)

        def put(columns: LaneColumns = columns, numbers: Any = numbers, begin: threading.Barrier = begin) -> None:
            begin.wait(TIMEOUT_S)
            for number in numbers:
                columns.put(number, parts[number])

        threads = [threading.Thread(target=put, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert _told(columns.joined()) == expected
