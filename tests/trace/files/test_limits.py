"""What the files of a run may take: for all of them together, however many there are."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from commtrace.synth.job import Job
from commtrace.synth.synthesis import synthesize, write
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.segment_index import ROOM_OF_RUN


def rewritten(path: Path, table: pa.Table, metadata: dict[bytes, bytes], compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    schema = table.schema.with_metadata(metadata)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema, options=options) as stream:
        stream.write_table(table)


def read(path: Path) -> tuple[pa.Table, dict[bytes, bytes]]:
    with pa.OSFile(str(path)) as file:
        stream = pa.ipc.open_stream(file)
        return stream.read_all().unify_dictionaries().combine_chunks(), dict(stream.schema.metadata)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(synthesize(Job(pp=2, dp=2, microbatches=2, steps=4, layers=2)), tmp_path / "run")
    return tmp_path / "run"


def blow_up(run: Path, rows: int) -> int:
    """Add equal rows to the files of all ranks; return how many bytes the files have."""
    for path in run.rglob("*.arrows"):
        table, metadata = read(path)
        alike = table["detail"].to_pylist().index(None)  # of a span without details
        more = table.take(pa.array(np.full(rows, alike)))
        rewritten(path, pa.concat_tables([table, more]).unify_dictionaries().combine_chunks(), metadata, "zstd")
    return sum(path.stat().st_size for path in run.rglob("*.arrows"))


def test_small_files_that_unpack_to_much_are_left_out(run: Path) -> None:
    assert blow_up(run, 1_000_000) < 200_000
    program = (
        f"from commtrace.analysis.summary import summarise; summarise({str(run)!r})"  # all commands read in this way
    )

    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
    )

    assert "it would take" in ended.stderr
    assert "MemoryError" not in ended.stderr


def test_the_room_is_that_of_the_run_and_not_of_a_file(run: Path) -> None:
    """Each of four files alone would fit."""
    blow_up(run, 180_000)
    sizes = [table.nbytes for table, _ in map(read, run.rglob("*.arrows"))]
    assert max(sizes) < ROOM_OF_RUN < sum(sizes)

    with pytest.raises(Exception, match="it would take"):
        load_run(run)


def test_usual_files_need_no_room(run: Path) -> None:
    assert load_run(run).problems == ()


@pytest.mark.parametrize("column", ["name", "timing", "kind", "dtype", "lane"])
def test_a_null_among_the_words_of_a_column_is_damage(run: Path, column: str) -> None:
    path = next(iter(sorted(run.rglob("*.arrows"))))
    table, metadata = read(path)
    at = table.schema.get_field_index(column)
    coded = table.column(at).combine_chunks()
    coded = pa.DictionaryArray.from_arrays(coded.indices, pa.array([*coded.dictionary.to_pylist(), None], pa.string()))
    rewritten(path, table.set_column(at, pa.field(column, coded.type), coded), metadata)

    loaded = load_run(run)

    assert any(f"a null is among the words of its column {column}" in problem for problem in loaded.problems)
    assert sorted(loaded.ranks) == [1, 2, 3]
