"""What lies beside the segments of a rank: spans that it could not write, its last stack, ends that it saw."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import commtrace
from commtrace.trace import schema
from commtrace.trace.files.rank_files import forget_gone_peers, note_gone_peers, stack_path, write_losses
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.side_files import with_side_files
from commtrace.trace.run import PeerLook, RankTrace
from commtrace.trace.spans import Spans
from tests.factory import metadata
from tests.trace.rows import mark, steps, write_rank

SESSION = metadata(0).session


def trace(**dropped: int) -> RankTrace:
    return RankTrace(metadata=metadata(0), spans=Spans.empty(), dropped=dropped, closed=False)


def test_losses_are_added_to_what_the_segments_tell_and_the_rank_has_ended(tmp_path: Path) -> None:
    write_losses(tmp_path, SESSION, {"collective": 12, "step": 3})
    read = with_side_files(trace(collective=1, gc=2), tmp_path)
    assert (read.closed, read.dropped) == (True, {"collective": 13, "step": 3, "gc": 2})


def test_a_disk_without_room_for_a_byte_has_room_for_a_name(tmp_path: Path) -> None:
    (tmp_path / f"lost-{SESSION}-15").touch()
    read = with_side_files(trace(), tmp_path)
    assert (read.closed, read.dropped) == (True, {"span": 15})


def test_nothing_lost_but_the_end_is_an_end(tmp_path: Path) -> None:
    write_losses(tmp_path, SESSION, {})
    read = with_side_files(trace(), tmp_path)
    assert (read.closed, read.dropped) == (True, {})


def test_another_recording_in_the_directory_is_not_meant(tmp_path: Path) -> None:
    write_losses(tmp_path, SESSION + 1, {"step": 3})
    read = with_side_files(trace(), tmp_path)
    assert (read.closed, read.dropped) == (False, {})


@pytest.mark.parametrize("name", ["lost-x-5", f"lost-{SESSION}-", f"lost-{SESSION}-²", f"lost-{SESSION}-{'9' * 200}"])
def test_files_with_other_names_say_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    read = with_side_files(trace(), tmp_path)
    assert (read.closed, read.dropped) == (False, {})


@pytest.mark.parametrize(
    "content",
    ["[" * 3_000, "{}", json.dumps({"step": 9}), json.dumps({"step": 16, "gc": -1}), json.dumps({"a": 15}), "x" * 9_999,
     json.dumps({"step": 15.0}), json.dumps({"step": True, "gc": 14}), "é"],
)  # fmt: skip
def test_content_that_does_not_fit_the_name_is_not_believed(tmp_path: Path, content: str) -> None:
    (tmp_path / f"lost-{SESSION}-15").write_text(content)
    assert with_side_files(trace(), tmp_path).dropped == {"span": 15}


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_losses(tmp_path / "gone", SESSION, {"step": 1})
    assert list(tmp_path.iterdir()) == []


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


def test_a_stack_of_another_session_is_left_out(folder: Path) -> None:
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


def noted(tmp_path: Path) -> tuple[PeerLook, ...]:
    return load_run(tmp_path).ranks[0].gone_peers


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    write_rank(tmp_path, [mark("end", {})], rank=0, world_size=4, session=SESSION)
    return tmp_path / "rank-00000"


def test_looks_are_read_in_their_order(tmp_path: Path, ended: Path) -> None:
    note_gone_peers(ended, SESSION, 10, {2})
    note_gone_peers(ended, SESSION, 12, {3, 1})
    note_gone_peers(ended, SESSION, 24, ())
    note_gone_peers(ended, SESSION + 1, 11, {1})
    assert noted(tmp_path) == ((10, (2,)), (12, (1, 3)), (24, ())), "the one of another session is not this one's"


def test_a_note_of_gone_peers_can_be_forgotten(tmp_path: Path, ended: Path) -> None:
    note_gone_peers(ended, SESSION, 10, {2})
    forget_gone_peers(ended, SESSION)
    assert noted(tmp_path) == ()
    forget_gone_peers(ended, SESSION)


@pytest.mark.parametrize(
    "text", ["[11, [4]]", "[11, [-1]]", "[11, [true]]", "[-1, [1]]", "[11]", '{"ranks": 1}', "[1", "[" * 100_000]
)
def test_nothing_in_a_damaged_file_is_believed(tmp_path: Path, ended: Path, text: str) -> None:
    (ended / f"gone-{SESSION}").write_text(f"[10, [2]]\n{text}\n")
    assert noted(tmp_path) == ()


@pytest.mark.parametrize("name", [f"lost-{SESSION}-3", f"gone-{SESSION}", f"stack-{SESSION}"])
def test_a_fifo_of_its_name_stops_no_reader(tmp_path: Path, folder: Path, name: str) -> None:
    os.mkfifo(folder / name)
    read = load_run(tmp_path).ranks[0]
    assert (read.stack, read.gone_peers, read.spans.kind.tolist()) == ((), (), [schema.STEP])


@pytest.mark.parametrize(
    ("session", "suffix", "end_signal"), [(SESSION, "15", 15), (SESSION, "0", 0), (SESSION + 1, "15", None)]
)
def test_the_signal_before_an_end_is_read(tmp_path: Path, session: int, suffix: str, end_signal: int | None) -> None:
    (tmp_path / f"ended-{session}-{suffix}").touch()
    assert with_side_files(trace(), tmp_path).end_signal == end_signal
    assert with_side_files(replace(trace(), closed=True), tmp_path).end_signal is None
