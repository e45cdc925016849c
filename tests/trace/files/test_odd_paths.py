"""Run directories may have any name that a file system takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter
from tests.factory import metadata
from tests.trace.rows import row


@pytest.mark.parametrize("name", [b"a b", b"a\nb", b"\xff\xfe", "é✓".encode(), b"\x1b[31m", b"{run}", b"-x", b"a'b\"c"])
def test_a_run_is_written_compacted_and_read(tmp_path: Path, name: bytes) -> None:
    directory = tmp_path / os.fsdecode(name)
    writer = SegmentWriter(directory, metadata(0, world_size=1))
    for step in range(40):
        writer.write([row(step=step) for _ in range(3)])
    writer.close()
    run = load_run(directory)
    assert len(run.ranks[0].spans) == 120
    assert not list(directory.rglob("*.tmp*"))
