from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from commtrace.trace import schema
from commtrace.trace.files import file_process
from commtrace.trace.files.budget import Budget
from commtrace.trace.files.file_process import FileProcess
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter, segment_step_ranges
from commtrace.trace.spans import Spans
from tests.factory import span
from tests.trace.rows import mark, metadata, row, steps, write_rank


def _segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _plain(path: Path) -> pa.Table:
    """The file as a user's own script reads it."""
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()


def test_a_rank_has_its_own_folder_and_segments_rotate_by_steps(tmp_path: Path) -> None:
    directory = write_rank(tmp_path, steps(0, 25), rank=3, world_size=4, steps_per_segment=10)

    assert directory == tmp_path / "rank-00003"
    assert _segments(directory) == ["spans-0000.arrows", "spans-0001.arrows", "spans-0002.arrows"]
    assert _plain(directory / "spans-0001.arrows")["step"].to_pylist() == list(range(10, 20))


def test_nothing_to_write_makes_no_segment(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.write([])
    writer.close()
    writer.close()

    assert _segments(writer.directory) == []


def test_a_batch_of_many_short_steps_is_split_where_segments_end(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata(), steps_per_segment=10)
    writer.write(steps(0, 7))
    writer.write([*steps(7, 24), row(step=3)])
    writer.close()

    held = [_plain(path)["step"].to_pylist() for path in sorted(writer.directory.iterdir())]
    assert held == [[*range(10), 3], [*range(10, 20)], [*range(20, 24)]]
    for step in range(24):
        assert load_run(tmp_path, steps=str(step)).ranks[0].spans.step.tolist().count(step) == 1 + (step == 3)


def test_rows_before_the_first_step_are_kept_with_it(tmp_path: Path) -> None:
    directory = write_rank(tmp_path, [mark("topology", {}), *steps(0, 2)], steps_per_segment=10)

    assert _plain(directory / "spans-0000.arrows")["step"].to_pylist() == [-1, 0, 1]


def test_a_recorder_that_starts_again_never_writes_over_what_is_there(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 5))
    first = (tmp_path / "rank-00000" / "spans-0000.arrows").read_bytes()
    directory = write_rank(tmp_path, steps(0, 5))

    assert _segments(directory) == ["spans-0000.arrows", "spans-0001.arrows"]
    assert (directory / "spans-0000.arrows").read_bytes() == first


def test_every_word_is_readable_without_commtrace(tmp_path: Path) -> None:
    rows = [
        row(kind=schema.COLLECTIVE, name="all_reduce", lane=schema.COMMUNICATION, dtype="float32", bytes=64),
        row(kind=schema.FORWARD, name="forward", timing=schema.CUDA_EVENT_TIMING),
        row(kind=schema.COLLECTIVE, name="all_gather", lane=schema.COMMUNICATION, dtype="bfloat16", is_async=True),
    ]
    table = _plain(write_rank(tmp_path, rows) / "spans-0000.arrows")

    columns = ["kind", "name", "lane", "bytes", "dtype", "is_async", "timing"]
    assert [tuple(line.values()) for line in table.select(columns).to_pylist()] == [
        ("collective", "all_reduce", "communication", 64, "float32", False, "host"),
        ("forward", "forward", "compute", -1, None, False, "cuda_event"),
        ("collective", "all_gather", "communication", -1, "bfloat16", True, "host"),
    ]
    assert table.schema.remove_metadata() == schema.SCHEMA


def test_the_vocabulary_grows_with_every_batch_and_later_batches_can_use_old_words(tmp_path: Path) -> None:
    names = [f"layers.{i}" for i in range(300)]
    directory = write_rank(tmp_path, [row(name=name) for name in [*names, *reversed(names)]])

    assert _plain(directory / "spans-0000.arrows")["name"].to_pylist() == [*names, *reversed(names)]
    run = load_run(tmp_path)
    assert [run.names[code] for code in run.ranks[0].spans.name] == [*names, *reversed(names)]


def test_a_known_vocabulary_is_not_written_again(tmp_path: Path) -> None:
    """The dictionary of a long run would otherwise dominate its files."""
    writer = SegmentWriter(tmp_path, metadata())
    path = writer.directory / "spans-0000.arrows"
    writer.write([row(name=f"a.long.module.name.{i:05d}") for i in range(2_000)])
    with_vocabulary = path.stat().st_size
    writer.write([row(name="a.long.module.name.00007")])
    one_more = path.stat().st_size - with_vocabulary
    writer.close()

    assert one_more < 4_000 < with_vocabulary


@contextmanager
def _files_limited_to(num_bytes: int) -> Iterator[None]:
    """Beyond it the kernel fails a write, as it does on a full disk (Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_once_keeps_what_was_written_and_a_new_segment_goes_on(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.write(steps(0, 3))
    written = (writer.directory / "spans-0000.arrows").stat().st_size
    with _files_limited_to(written + 100), pytest.raises(OSError, match="large"):
        writer.write(steps(3, 6) * 2_000)
    writer.write(steps(6, 8))
    writer.close()

    assert _segments(writer.directory) == ["spans-0000.arrows", "spans-0001.arrows"]
    run = load_run(tmp_path)
    assert run.ranks[0].spans.step.tolist() == [0, 1, 2, 6, 7]
    assert len(run.problems) == 1
    assert "spans-0000.arrows: torn after 1 batches" in run.problems[0]


def test_a_disk_that_is_full_from_the_start_leaves_no_open_file(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    with _files_limited_to(0):
        for _ in range(3):
            with pytest.raises(OSError, match="large"):
                writer.write(steps(0, 1))
    held = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert [path for path in held if path.is_relative_to(writer.directory)] == []
    writer.write(steps(1, 2))
    writer.close()

    assert _segments(writer.directory) == ["spans-0000.arrows"]
    run = load_run(tmp_path)
    assert run.ranks[0].spans.step.tolist() == [1]
    assert run.problems == ()


def test_a_segment_whose_process_has_died_is_deleted_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_process, "_RESTART_SECONDS", 0.0)
    files = FileProcess()
    writer = SegmentWriter(tmp_path, metadata(0), budget=Budget(steps=8), files=files)
    writer.write(steps(0, 1))
    os.kill(files.pid, signal.SIGKILL)
    with pytest.raises(OSError, match="has died"):
        writer.write(steps(0, 1))
    assert "spans-0000.arrows" in _segments(writer.directory)
    for number in range(2, 20):
        writer.write(steps(number, number + 1))
    writer.close()
    files.close()
    assert "spans-0000.arrows" not in _segments(writer.directory)


def test_a_directory_that_is_removed_while_it_is_written_is_an_os_error(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.write(steps(0, 1))
    shutil.rmtree(writer.directory)

    with pytest.raises(OSError, match="rank-00000"):
        writer.write(steps(1, 2))


def test_a_segment_begun_after_a_failure_is_found_by_its_steps(tmp_path: Path) -> None:
    """Also if it begins with rows of no step: it stands behind the segment that failed."""
    writer = SegmentWriter(tmp_path, metadata(), steps_per_segment=10)
    writer.write(steps(0, 25))
    with _files_limited_to(0), pytest.raises(OSError, match="large"):
        writer.write(steps(25, 26))
    writer.write([mark("topology", {})])
    writer.write(steps(26, 45))
    writer.close()

    assert load_run(tmp_path, steps="14:16").ranks[0].spans.step.tolist() == [14, 15]
    assert load_run(tmp_path, steps="26:29").ranks[0].spans.step.tolist() == [26, 27, 28]


def test_a_directory_that_was_removed_is_an_os_error(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.directory.rmdir()

    with pytest.raises(OSError, match="rank-00000"):
        writer.write(steps(0, 1))


@pytest.mark.parametrize(
    ("first_steps", "ranges"),
    [([0], [(-1, 2**31 - 1)]), ([0, 10, 25], [(-1, 10), (9, 25), (24, 2**31 - 1)])],
)
def test_a_segment_holds_steps_until_the_next_ones_first(first_steps: list[int], ranges: list[Any]) -> None:
    assert segment_step_ranges(first_steps) == ranges


def test_columns_between_marks(tmp_path: Path) -> None:
    """Every segment describes the rank; the last one has its end."""
    names = ["forward"]
    spans = Spans.from_rows([span("forward", step, step + 1, step=step) for step in range(25)], names)
    writer = SegmentWriter(tmp_path, metadata(), steps_per_segment=10)
    writer.write_spans(spans, names, before=[mark("topology", {"a": 1})], after=[mark("end", {})])
    writer.close()

    held = [_plain(path).select(["name", "step", "detail"]).to_pylist() for path in sorted(writer.directory.iterdir())]
    assert [[row["step"] for row in rows] for rows in held] == [
        [-1, *range(10)], [-1, *range(10, 20)], [-1, *range(20, 25), -1],
    ]  # fmt: skip
    assert {rows[0]["detail"] for rows in held} == {'{"a": 1}'}
    assert {rows[1]["name"] for rows in held} == {"forward"}
    assert (held[-1][-1]["name"], held[-1][-1]["detail"], held[-1][-2]["detail"]) == ("end", "{}", None)


def test_marks_without_columns(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.write_spans(Spans.empty(), [], before=[mark("topology", {})], after=[mark("end", {})])
    writer.close()

    assert _plain(next(writer.directory.iterdir()))["name"].to_pylist() == ["topology", "end"]
