"""Rows that no recorder writes are left out, counted and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.trace.rows import metadata, row, steps, write_rank

IMPOSSIBLE: list[dict[str, Any]] = [
    {"start": 10, "end": 9},
    {"start": -(2**63), "end": 2**63 - 1},
    {"start": 0, "end": 2**55},
    {"start": 2**61, "end": 2**61},
    {"start": -(2**63), "end": -(2**63)},
    {"step": -2},
    {"group": -(2**63)},
    {"seq": -2},
    {"bytes": 2**60},
    {"bytes": -7},
    {"peer": 1},
    {"id": -2},
]


@pytest.mark.parametrize("columns", IMPOSSIBLE)
def test_an_impossible_row_is_left_out_and_reported(tmp_path: Path, columns: dict[str, Any]) -> None:
    write_rank(tmp_path, [*steps(0, 3), row(name="bad", **columns)])
    run = load_run(tmp_path)
    assert run.ranks[0].spans.step.tolist() == [0, 1, 2]
    assert run.ranks[0].last_written_ns == 300
    (problem,) = run.problems
    assert problem.startswith("rank 0: 1 rows are impossible (an end before its start")


def test_rows_that_lack_something_are_left_out_and_the_others_keep_every_digit(tmp_path: Path) -> None:
    path = write_rank(tmp_path, [row(start=2**60 + 1, end=2**60 + 3, step=n) for n in range(3)]) / "spans-0000.arrows"
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    for name, value in (("start", None), ("kind", None), ("name", None), ("is_async", None)):
        rows = table.to_pylist()
        rows[1][name] = value
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(pa.Table.from_pylist(rows, schema=table.schema))
        run = load_run(tmp_path)
        assert run.ranks[0].spans.step.tolist() == [0, 2], name
        np.testing.assert_array_equal(run.ranks[0].spans.start, [2**60 + 1] * 2)
        assert "rank 0: 1 rows are impossible" in run.problems[0]


def test_the_largest_numbers_that_can_be_are_read(tmp_path: Path) -> None:
    columns = {"start": 2**61 - 2, "end": 2**61 - 1, "group": 2**63 - 1, "seq": 2**63 - 1, "bytes": 2**47 - 1}
    write_rank(tmp_path, [row(kind=schema.COLLECTIVE, **columns)])
    spans = load_run(tmp_path).ranks[0].spans
    assert {name: getattr(spans, name)[0].item() for name in columns} == columns


def test_a_header_of_a_rank_that_cannot_be_is_refused() -> None:
    for changes in (
        {"rank": 1},
        {"rank": -1},
        {"world_size": 2**21},
        {"world_size": 0},
        {"session": 2**63},
        {"pid": "7"},
        {"versions": {"torch": 2}},
    ):
        with pytest.raises(ValueError, match=r"."):
            type(metadata()).from_json(metadata(**changes).to_json())
