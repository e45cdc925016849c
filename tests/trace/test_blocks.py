from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commtrace.errors import TraceFormatError
from commtrace.trace import blocks as blocks_module
from commtrace.trace.blocks import Block, end_to_end
from commtrace.trace.files.reader import load_run
from commtrace.trace.spans import Spans
from tests.trace.rows import row, steps, write_rank


def _spans(*times: tuple[int, int]) -> Spans:
    return Spans.from_rows([{"start": start, "end": end} for start, end in times], [])


def test_a_block_knows_whose_its_rows_are() -> None:
    block = Block.of_ranks({2: _spans((0, 5), (5, 9)), 3: Spans.empty(), 7: _spans((1, 2))})

    assert block.ranks == (2, 3, 7)
    assert block.bounds.tolist() == [0, 2, 2, 3]
    assert block.rank().tolist() == [2, 2, 7]
    assert {rank: part.tolist() for rank, part in block.split(block.spans.end).items()} == {2: [5, 9], 3: [], 7: [2]}


def test_end_to_end_no_rank_is_in_the_time_of_another() -> None:
    block = Block.of_ranks({0: _spans((1_000, 1_010), (1_005, 1_020)), 1: Spans.empty(), 2: _spans((3, 1), (2, 4))})

    shifts = end_to_end(block.spans.start, block.spans.end, block.bounds)

    axis = block.per_row(shifts)
    assert (block.spans.start + axis).tolist() == [0, 5, 23, 22]
    assert (block.spans.end + axis).tolist() == [10, 20, 21, 24]


def test_a_loaded_run_is_made_of_blocks_that_its_ranks_are_slices_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commtrace.trace.files.reader._BYTES_OF_BLOCK", 10_000)
    for rank in range(5):
        rows = [*steps(0, 3), row(kind=5, name=f"only here {rank}"), row(kind=5, name="everywhere", dtype="float32")]
        write_rank(tmp_path, rows, rank=rank, world_size=5)

    run = load_run(tmp_path)

    assert len([*run.blocks]) > 1
    assert [rank for block in run.blocks for rank in block.ranks] == [0, 1, 2, 3, 4]
    for block in run.blocks:
        for rank, own in block.slices().items():
            assert np.shares_memory(run.ranks[rank].spans.start, block.spans.start[own])
    for rank, trace in run.ranks.items():
        words = [run.names[code] for code in trace.spans.name]
        assert sorted(words) == ["everywhere", f"only here {rank}", "step", "step", "step"]
        assert {run.names[code] for code in trace.spans.dtype if code >= 0} == {"float32"}


def test_a_run_with_other_ranks_has_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "ROWS_OF_BLOCK", 4)
    for rank in range(3):
        write_rank(tmp_path, steps(0, 3), rank=rank, world_size=3)
    run = load_run(tmp_path)

    some = replace(run, ranks={rank: run.ranks[rank] for rank in (0, 2)})
    (block,) = run.blocks
    moved = run.with_blocks([replace(block, spans=block.spans.replace(start=block.spans.end))])

    assert [block.ranks for block in run.blocks] == [(0, 1, 2)]
    assert [block.ranks for block in some.blocks] == [(0, 2)]
    assert [len(block) for block in some.blocks] == [6]
    assert moved.ranks[1].spans.start.tolist() == [100, 200, 300]


def test_times_that_add_up_to_more_than_64_bits_are_an_error_and_not_another_ranks() -> None:
    start = np.array([0, 2**62, 0, 2**62])
    with pytest.raises(TraceFormatError, match="times that no clock showed"):
        end_to_end(start, start + 1, np.array([0, 2, 4]))
