"""A complete segment becomes smaller and stays the same; whatever happens meanwhile, one of its forms is whole."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from commtrace.trace import schema
from commtrace.trace.files import compaction, segment_index
from commtrace.trace.files.budget import Budget
from commtrace.trace.files.rank_files import COMPACTING
from commtrace.trace.files.reader import load_newest, load_run
from commtrace.trace.files.writer import SegmentWriter
from tests.trace.rows import mark, metadata, row, steps

GROUP = {"id": 7, "ranks": [0], "ordinal": 0, "role": "dp", "name": "", "description": "", "backend": "gloo"}


def written(tmp_path: Path, last: int, **options: Any) -> SegmentWriter:
    """A batch for every step, with words that are new from time to time."""
    writer = SegmentWriter(tmp_path, metadata(), **options)
    writer.write([mark("process_group", GROUP)])
    for step in range(last):
        spans = [
            row(name=f"layer.{step // 4}", step=step, start=step * 1000 + i, end=step * 1001 + i) for i in range(9)
        ]
        writer.write([*spans, *steps(step, step + 1)])
    return writer


def content(path: Path) -> tuple[list[int], pa.Table]:
    """Rows of each batch, and all rows."""
    with pa.OSFile(str(path)) as file:
        batches = list(pa.ipc.open_stream(file))
    return [batch.num_rows for batch in batches], pa.Table.from_batches(batches).unify_dictionaries()


def test_rows_their_order_and_the_header_stay_and_the_bytes_do_not(tmp_path: Path) -> None:
    writer = written(tmp_path, 20)
    path = writer.directory / "spans-0000.arrows"
    counts, before = content(path)
    num_bytes = path.stat().st_size
    writer.close()

    compacted, after = content(path)
    assert len(counts) == 21
    assert compacted == [201]
    assert after.to_pylist() == before.to_pylist()
    assert after.schema.equals(before.schema, check_metadata=True)
    assert schema.METADATA_KEY in after.schema.metadata
    assert path.stat().st_size < num_bytes / 4
    assert os.listdir(writer.directory) == ["spans-0000.arrows"]


def test_a_segment_is_compacted_when_the_next_one_begins(tmp_path: Path) -> None:
    writer = written(tmp_path, 11, steps_per_segment=5)
    paths = sorted(writer.directory.iterdir())

    # 5 steps of 10 rows; the first segment has the group's mark in a batch of its own, the later ones repeat it.
    assert [content(path)[0] for path in paths] == [[51], [51], [11]]
    writer.close()


def test_batches_are_merged_up_to_a_size_that_bounds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "ROWS_PER_BATCH", 40)
    writer = written(tmp_path, 12)
    _, before = content(writer.directory / "spans-0000.arrows")
    writer.close()

    counts, after = content(writer.directory / "spans-0000.arrows")
    assert counts == [41, 40, 40]
    assert after.to_pylist() == before.to_pylist()


@pytest.mark.parametrize(
    ("batches", "rows", "worthwhile"),
    [(1, 100, False), (2, 100, True), (100, compaction.MOST_ROWS, True), (10_000, compaction.MOST_ROWS + 1, False)],
)
def test_a_single_batch_and_what_takes_too_long_stay(batches: int, rows: int, worthwhile: bool) -> None:
    assert compaction.is_worthwhile(batches, rows) == worthwhile


LZ4, ZSTD = b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"
"""How a frame of each begins."""


def compressions(directory: Path) -> list[str]:
    """Of each segment, oldest first."""
    found = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        found.append("lz4" * (LZ4 in content) + "zstd" * (ZSTD in content))
    return found


def test_small_batches_are_compressed_quickly_and_well_once_they_are_compacted(tmp_path: Path) -> None:
    writer = written(tmp_path, 12, steps_per_segment=5)

    assert compressions(writer.directory) == ["zstd", "zstd", "lz4"]
    writer.close()
    assert compressions(writer.directory) == ["zstd", "zstd", "zstd"]


def test_a_segment_ends_before_it_is_too_long_to_be_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MOST_ROWS", 55)
    writer = written(tmp_path, 12)
    writer.close()

    assert [sum(content(path)[0]) for path in sorted(writer.directory.iterdir())] == [51, 51, 21]
    spans = load_run(tmp_path).ranks[0].spans
    assert spans.step[spans.kind == schema.STEP].tolist() == list(range(12))


def test_a_full_disk_leaves_the_segment_and_is_no_error(tmp_path: Path) -> None:
    writer = written(tmp_path, 20)
    path = writer.directory / "spans-0000.arrows"
    writer._end_segment()
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert path.read_bytes() == before
    assert os.listdir(writer.directory) == ["spans-0000.arrows"]


def test_a_segment_that_somebody_shortened_or_deleted_is_left_alone(tmp_path: Path) -> None:
    writer = written(tmp_path, 20)
    path = writer.directory / "spans-0000.arrows"
    writer._end_segment()
    shortened = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(shortened)
    writer.close()
    assert path.read_bytes() == shortened

    writer.write(steps(20, 22))
    writer.write(steps(22, 24))
    (writer.directory / "spans-0001.arrows").unlink()
    with pytest.raises(FileNotFoundError):
        writer.write(steps(24, 25))
    writer.close()
    assert not list(writer.directory.glob(f"*{COMPACTING}"))


def test_a_segment_that_was_damaged_meanwhile_is_left_alone_and_reported(tmp_path: Path) -> None:
    writer = written(tmp_path, 20)
    path = writer.directory / "spans-0000.arrows"
    writer._end_segment()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    path.write_bytes(damaged)
    writer.close()

    assert path.read_bytes() == damaged
    assert "is damaged and was left out (its checksum differs" in " ".join(load_run(tmp_path).problems)


def test_leftovers_of_a_killed_process_are_ignored_and_removed_by_the_next(tmp_path: Path) -> None:
    writer = written(tmp_path, 3)
    writer.close()
    leftover = writer.directory / f"spans-0000.arrows{COMPACTING}"
    leftover.write_bytes(b"half a file")

    assert load_run(tmp_path).problems == ()
    SegmentWriter(tmp_path, metadata())
    assert not leftover.exists()


def test_the_budget_counts_what_is_there_and_never_holds_both_forms_beyond_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(num_bytes=100_000)
    most = 0
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in target.parent.iterdir()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    writer = written(tmp_path, 400, budget=budget)
    one_batch = 6_000
    held = sum(path.stat().st_size for path in writer.directory.iterdir())
    assert most <= budget.num_bytes + one_batch
    assert budget.num_bytes / 2 < held <= budget.num_bytes + one_batch
    assert load_run(tmp_path).ranks[0].discarded is not None
    writer.close()


def test_a_segment_that_is_replaced_after_its_header_was_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.write([row(step=0, start=0, id=7), *steps(0, 1)])
    writer.close()
    (path,) = (tmp_path / "rank-00000").glob("*.arrows")
    read = segment_index.SegmentIndex.read_all
    replaced: list[Path] = []

    def replace_and_read(self: Any) -> Any:
        if not replaced:
            copy = path.with_suffix(".new")
            copy.write_bytes(path.read_bytes())
            copy.replace(path)
            replaced.append(path)
        return read(self)

    monkeypatch.setattr(segment_index.SegmentIndex, "read_all", replace_and_read)
    run = load_run(tmp_path)

    assert replaced == [path]
    assert run.problems == ()
    assert 7 in run.ranks[0].spans.id


def test_a_run_that_is_read_while_it_is_written_and_compacted_has_every_row_once(tmp_path: Path) -> None:
    """Readers open each file twice, for its header and for its rows: it may be replaced in between."""
    writer = SegmentWriter(tmp_path, metadata(), steps_per_segment=4)
    writer.write([row(step=0, start=0, id=i) for i in range(3)])
    over = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for step in range(160):
                if step:
                    writer.write([row(step=step, start=step, id=step * 3 + i) for i in range(3)])
                writer.write(steps(step, step + 1))
        except BaseException as error:
            failures.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=write)
    thread.start()
    reads = 0
    while not over.is_set() or reads == 0:
        for load in (load_run, load_newest):
            spans = load(tmp_path).ranks[0].spans
            own = spans.step[spans.kind == schema.STEP]
            ids = sorted(spans.id[spans.id >= 0].tolist())
            assert sorted(set(ids)) == ids
            if len(ids):
                assert ids == list(range(ids[0], ids[-1] + 1))
            assert own.tolist() == sorted(set(own.tolist()))
        reads += 1
    thread.join()
    writer.close()

    assert failures == []
    assert load_run(tmp_path).ranks[0].spans.id.max() == 479
