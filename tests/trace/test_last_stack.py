"""The stack of a rank in which no thread of Python could run."""

from __future__ import annotations

from pathlib import Path

import pytest

import commtrace
from commtrace.trace.files.reader import load_run
from commtrace.trace.last_stack import stack_path
from tests.trace.rows import mark, steps, write_rank

SESSION = 7
WRITTEN = f"""Stack (most recent call first):
  File "/job/tokens.py", line 12 in split
  File "{commtrace.__path__[0]}/integrations/loop.py", line 3 in backward
  File "/job/a "quoted" name.py", line 30 in <module>
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rank(tmp_path, steps(0, 1), rank=0, session=SESSION)
    return tmp_path / "rank-00000"


def stack(folder: Path) -> tuple[str, ...]:
    return load_run(folder.parent).ranks[0].stack


def test_a_rank_that_lives_has_none(folder: Path) -> None:
    assert stack(folder) == ()


def test_its_frames_are_those_of_the_program(folder: Path) -> None:
    stack_path(folder, SESSION).write_text(WRITTEN)
    assert stack(folder) == ("/job/tokens.py:12 split", '/job/a "quoted" name.py:30 <module>')


def test_that_of_another_session_is_not_this_ones(folder: Path) -> None:
    stack_path(folder, SESSION + 1).write_text(WRITTEN)
    assert stack(folder) == ()


@pytest.mark.parametrize("text", [b"", b"Stack (most recent call first):\n  File", b"\xff" * 100_000])
def test_a_damaged_file_has_none(folder: Path, text: bytes) -> None:
    stack_path(folder, SESSION).write_bytes(text)
    assert stack(folder) == ()


def test_a_rank_that_ended_in_order_is_in_no_such_place(tmp_path: Path) -> None:
    write_rank(tmp_path, [mark("end", {})], rank=0, session=SESSION)
    folder = tmp_path / "rank-00000"
    stack_path(folder, SESSION).write_text(WRITTEN)
    assert stack(folder) == ()
