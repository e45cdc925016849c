"""The communication of replays, which a run's files hold once for each graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commtrace.trace import graphs, schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.spans import Spans
from tests.graphed_runs import (
    GRAPH,
    MS,
    OPERATIONS,
    STAMPS,
    WORLD,
    graph_mark,
    replay,
    stamped_detail,
    stamps,
    write_run,
)
from tests.trace.rows import mark, row, write_rank


def read(folder: Path, *rows: Any) -> Spans:
    write_rank(folder, rows, rank=0, world_size=2)
    return load_run(folder).ranks[0].spans


def test_a_replay_stands_for_rows_with_its_times_and_numbers_that_go_on(tmp_path: Path) -> None:
    spans = read(tmp_path, graph_mark(), replay(0, 100, 200, 5), replay(1, 300, 450, 9))

    inside = spans.take(spans.timing == schema.REPLAY_TIMING)
    assert inside.seq.tolist() == [5, 6, 7, 9, 10, 11]
    assert inside.start.tolist() == [100] * 3 + [300] * 3
    assert inside.end.tolist() == [200] * 3 + [450] * 3
    assert inside.bytes.tolist() == [size for _, size in OPERATIONS] * 2
    assert set(inside.group.tolist()) == {WORLD.id}
    assert set(inside.kind.tolist()) == {schema.COLLECTIVE}
    assert set(inside.id.tolist()) == {-1}
    assert spans.kind.tolist() == [schema.REPLAY, *[schema.COLLECTIVE] * 3] * 2


def test_names_and_types_are_those_of_the_graph(tmp_path: Path) -> None:
    write_rank(tmp_path, [graph_mark(), replay(0, 100, 200, 0)], rank=0, world_size=2)
    run = load_run(tmp_path)

    spans = run.ranks[0].spans
    assert [run.names[code] for code in spans.name.tolist()] == ["forward+backward", *(name for name, _ in OPERATIONS)]
    assert [run.names[code] for code in spans.dtype[1:].tolist()] == ["float32"] * 3
    assert run.ranks[0].graphs[GRAPH].operations[0].module == "Block"
    assert run.ranks[0].details == {}


def test_each_rank_of_several_has_its_own(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, is_graphed=True))

    for rank in range(2):
        spans = run.ranks[rank].spans
        collectives = spans.take(spans.kind == schema.COLLECTIVE)
        assert collectives.seq.tolist() == list(range(4 * (len(OPERATIONS) + 1)))
        assert (np.diff(spans.start) >= 0).all()


def test_some_steps_can_be_read_alone(tmp_path: Path) -> None:
    write_run(tmp_path, is_graphed=True, steps=6, steps_per_segment=2)

    spans = load_run(tmp_path, "4").ranks[1].spans
    assert spans.seq[spans.kind == schema.COLLECTIVE].tolist() == [16, 17, 18, 19]


def test_messages_are_recognised_by_their_counter(tmp_path: Path) -> None:
    counters = [[WORLD.id, True, 1, 7], [WORLD.id, False, 1, 0]]
    operations = [
        ["send", 0, 0, 0, 8, -1, None, 1, False, 3, 1, 0, ""],
        ["recv", 1, 0, 1, 8, -1, None, 1, False, -1, -1, -1, ""],
    ]
    detail = json.dumps({"launched_ns": 1, "first": [(7 << 32) + 4, 2]})
    spans = read(
        tmp_path,
        graph_mark(counters=counters, operations=operations),
        replay(0, 100, 200, 0, detail=detail, microbatch=5),
    )

    inside = spans.take(spans.kind == schema.P2P)
    assert inside.seq.tolist() == [(7 << 32) + 4, 2]
    assert inside.op_in_seq.tolist() == [0, 1]
    assert inside.peer.tolist() == [1, 1]
    # Where the replay has a place in the schedule, that of the capture does not count.
    assert inside.microbatch.tolist() == [5, 5]
    assert inside.chunk.tolist() == [1, -1]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([replay(0, 100, 200, 0)], False),
        ([graph_mark(), replay(0, 100, 200, 0, detail=None)], False),
        ([graph_mark(), replay(0, 100, 200, 0, detail='{"first":[1,2]}')], False),
        ([graph_mark(), replay(0, 100, 200, 0, detail='{"first":[-1]}')], False),
        ([graph_mark(counters=[]), replay(0, 100, 200, 0)], True),
        ([mark("graph", {"id": GRAPH}), replay(0, 100, 200, 0)], True),
        ([graph_mark(operations=[["send", 0, 0, 0, 8, -1, None, 2, False, 0, 0, 0, ""]]), replay(0, 1, 2, 0)], True),
    ],
)
def test_damaged_or_lost_graphs_make_contents_unknown(rows: list[Any], problem: bool, tmp_path: Path) -> None:
    write_rank(tmp_path, rows, rank=0, world_size=2)
    run = load_run(tmp_path)

    (kind,) = run.ranks[0].spans.kind.tolist()
    assert kind == schema.REPLAY
    assert run.ranks[0].spans.bytes.tolist() == [-1]
    assert any("mark graph is damaged" in message for message in run.problems) == problem


def test_stamps_of_a_clock_that_is_far_off_are_not_exact(tmp_path: Path) -> None:
    def stamped(step: int, error_ns: int) -> Any:
        start = step * 200 * MS
        detail = stamped_detail(start, 3 * step, stamps(1, 1, 1), 100 + 3 * step, error_ns)
        return replay(step, start, start + 190 * MS, 3 * step, detail=detail)

    within, beyond = graphs.MOST_EXACT_ERROR_NS, graphs.MOST_EXACT_ERROR_NS + 1
    spans = read(tmp_path, graph_mark(stamps=STAMPS, unstamped={}), stamped(0, within), stamped(1, beyond))

    for kind in (schema.COLLECTIVE, schema.STALL):
        inside = spans.take(spans.kind == kind)
        order = np.argsort(inside.seq)
        assert inside.timing.tolist() == [schema.GRAPH_STAMP_TIMING] * len(inside)
        assert inside.start_exact[order].tolist() == [True] * 3 + [False] * 3
        assert inside.end_exact[order].tolist() == [True] * 3 + [False] * 3


def test_stamps_whose_error_is_not_said_are_exact(tmp_path: Path) -> None:
    facts = json.loads(stamped_detail(0, 0, stamps(), 100))
    del facts["error_ns"]
    rows = [graph_mark(stamps=STAMPS, unstamped={}), replay(0, 0, 190 * MS, 0, detail=json.dumps(facts))]
    spans = read(tmp_path, *rows)

    assert spans.end_exact[spans.kind == schema.COLLECTIVE].tolist() == [True] * 3


@pytest.mark.parametrize("error", [-1, 2**62 + 1, "1"])
def test_an_error_of_stamps_that_cannot_be_makes_contents_unknown(error: Any, tmp_path: Path) -> None:
    detail = stamped_detail(0, 0, stamps(), 100, error)
    spans = read(tmp_path, graph_mark(stamps=STAMPS, unstamped={}), replay(0, 0, 190 * MS, 0, detail=detail))

    assert spans.kind.tolist() == [schema.REPLAY]
    assert spans.bytes.tolist() == [-1]


def test_more_rows_than_any_job_has_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_ROWS", 4)
    spans = read(tmp_path, graph_mark(), replay(0, 100, 200, 0), replay(1, 300, 400, 4))

    assert spans.kind.tolist() == [schema.REPLAY, *[schema.COLLECTIVE] * 3, schema.REPLAY]
    assert spans.bytes[spans.kind == schema.REPLAY].tolist() == [14_000, -1]


def test_a_graph_without_communication_adds_nothing(tmp_path: Path) -> None:
    detail = '{"launched_ns":1,"first":[]}'
    spans = read(
        tmp_path,
        graph_mark(counters=[], operations=[]),
        replay(0, 100, 200, 0, detail=detail, bytes=0, op_in_seq=0),
        row(start=300, end=400),
    )

    assert spans.kind.tolist() == [schema.REPLAY, schema.FORWARD]
    assert spans.bytes[0] == 0
