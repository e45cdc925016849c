"""A rank's folder stays within its budget, says what it deleted, and can be read at any moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commtrace.trace import schema
from commtrace.trace.files import reader as reader_module
from commtrace.trace.files.budget import Budget
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.schema import Row
from tests.trace.rows import mark, metadata, row, steps, write_rank

GROUP = {"id": 7, "ranks": [0], "ordinal": 0, "role": "dp", "name": "", "description": "", "backend": "gloo"}


def work(step: int, count: int = 50) -> list[Row]:
    """Rows that do not compress to nothing, and their step."""
    spans = [row(step=step, start=(step * 7919 + i * i * 104729) % 10**9, end=10**9 + i * step) for i in range(count)]
    return [*spans, *steps(step, step + 1)]


def written(tmp_path: Path, budget: Budget, last: int, **options: Any) -> SegmentWriter:
    writer = SegmentWriter(tmp_path, metadata(), budget=budget, **options)
    writer.write([mark("process_group", GROUP), mark("topology", {"coordinates": {"dp": 1}})])
    for step in range(last):
        writer.write(work(step))
    return writer


def recorded(tmp_path: Path) -> list[int]:
    spans = load_run(tmp_path).ranks[0].spans
    return [int(step) for step in spans.step[spans.kind == schema.STEP]]


def test_the_last_steps_are_kept_with_what_describes_the_rank(tmp_path: Path) -> None:
    written(tmp_path, Budget(steps=16), 100).close()

    steps_kept = recorded(tmp_path)
    assert steps_kept[-1] == 99
    assert 16 <= len(steps_kept) <= 16 + 2 * (16 // 8)
    trace = load_run(tmp_path).ranks[0]
    assert trace.groups[7].role == "dp"
    assert trace.coordinates == {"dp": 1}
    assert trace.discarded is not None
    assert trace.discarded.last_step == steps_kept[0] - 1
    assert trace.discarded.first_step == 0
    assert trace.discarded.bytes > 0


def test_the_folder_never_holds_more_than_its_budget(tmp_path: Path) -> None:
    budget = Budget(num_bytes=200_000)
    writer = SegmentWriter(tmp_path, metadata(), budget=budget)
    one_batch = 0
    for step in range(200):
        before = sum(path.stat().st_size for path in writer.directory.iterdir())
        writer.write(work(step))
        held = sum(path.stat().st_size for path in writer.directory.iterdir())
        one_batch = max(one_batch, held - before)
        assert held <= budget.num_bytes + one_batch
    writer.close()

    kept = recorded(tmp_path)
    assert kept == list(range(kept[0], 200))
    assert held > budget.num_bytes / 2


def test_a_step_of_which_a_part_is_gone_is_not_shown(tmp_path: Path) -> None:
    """Segments that are limited by bytes end within a step."""
    writer = SegmentWriter(tmp_path, metadata(), budget=Budget(num_bytes=100_000))
    for step in range(20):
        for one in work(step):
            writer.write([one])
    writer.close()

    run = load_run(tmp_path)
    spans = run.ranks[0].spans
    counts = {int(step): int((spans.step == step).sum()) for step in set(spans.step.tolist())}
    assert set(counts.values()) == {51}
    assert max(counts) == 19
    assert min(counts) > 0


def test_without_a_budget_nothing_is_deleted(tmp_path: Path) -> None:
    written(tmp_path, Budget(), 30, steps_per_segment=3).close()

    assert recorded(tmp_path) == list(range(30))
    assert load_run(tmp_path).ranks[0].discarded is None


def test_segments_of_earlier_recordings_go_first(tmp_path: Path) -> None:
    directory = write_rank(tmp_path, steps(0, 20), steps_per_segment=2)
    earlier = set(directory.iterdir())
    written(tmp_path, Budget(steps=8), 30).close()

    assert earlier & set(directory.iterdir()) == set()


def test_segments_that_are_limited_by_bytes_are_found_by_their_steps(tmp_path: Path) -> None:
    written(tmp_path, Budget(num_bytes=10**5), 24).close()

    assert len(list((tmp_path / "rank-00000").iterdir())) > 1
    discarded = load_run(tmp_path).ranks[0].discarded
    for step in range(discarded.last_step + 1 if discarded else 0, 24, 4):
        spans = load_run(tmp_path, str(step)).ranks[0].spans
        assert (spans.step == step).sum() == 51


def test_the_reader_goes_on_when_a_segment_vanishes_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, Budget(), 9, steps_per_segment=3).close()
    read_header = reader_module._read_header

    def read_and_delete(path: Path) -> object:
        header = read_header(path)
        if path.name == "spans-0000.arrows":
            path.unlink()
        return header

    monkeypatch.setattr(reader_module, "_read_header", read_and_delete)
    run = load_run(tmp_path)

    assert sorted(set(run.ranks[0].spans.step.tolist())) == [3, 4, 5, 6, 7, 8]
    assert run.ranks[0].groups[7].role == "dp"
    assert "was deleted while the run was read" in run.problems[0]
