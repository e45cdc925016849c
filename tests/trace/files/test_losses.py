"""What could not be written up to the end of a recording."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commtrace.trace.files.losses import with_losses, write_losses
from commtrace.trace.run import RankTrace
from commtrace.trace.spans import Spans
from tests.factory import metadata

SESSION = metadata(0).session


def trace(**dropped: int) -> RankTrace:
    return RankTrace(metadata=metadata(0), spans=Spans.empty(), dropped=dropped, closed=False)


def test_losses_are_added_to_what_the_segments_tell_and_the_rank_has_ended(tmp_path: Path) -> None:
    write_losses(tmp_path, SESSION, {"collective": 12, "step": 3})
    read = with_losses(trace(collective=1, gc=2), tmp_path)
    assert (read.closed, read.dropped) == (True, {"collective": 13, "step": 3, "gc": 2})


def test_a_disk_without_room_for_a_byte_has_room_for_a_name(tmp_path: Path) -> None:
    (tmp_path / f"lost-{SESSION}-15").touch()
    read = with_losses(trace(), tmp_path)
    assert (read.closed, read.dropped) == (True, {"span": 15})


def test_nothing_lost_but_the_end_is_an_end(tmp_path: Path) -> None:
    write_losses(tmp_path, SESSION, {})
    read = with_losses(trace(), tmp_path)
    assert (read.closed, read.dropped) == (True, {})


def test_another_recording_in_the_directory_is_not_meant(tmp_path: Path) -> None:
    write_losses(tmp_path, SESSION + 1, {"step": 3})
    read = with_losses(trace(), tmp_path)
    assert (read.closed, read.dropped) == (False, {})


@pytest.mark.parametrize("name", ["lost-x-5", f"lost-{SESSION}-", f"lost-{SESSION}-²", f"lost-{SESSION}-{'9' * 200}"])
def test_files_with_other_names_say_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    read = with_losses(trace(), tmp_path)
    assert (read.closed, read.dropped) == (False, {})


@pytest.mark.parametrize(
    "content",
    ["[" * 3_000, "{}", json.dumps({"step": 9}), json.dumps({"step": 16, "gc": -1}), json.dumps({"a": 15}), "x" * 9_999,
     json.dumps({"step": 15.0}), json.dumps({"step": True, "gc": 14}), "é"],
)  # fmt: skip
def test_content_that_does_not_fit_the_name_is_not_believed(tmp_path: Path, content: str) -> None:
    (tmp_path / f"lost-{SESSION}-15").write_text(content)
    assert with_losses(trace(), tmp_path).dropped == {"span": 15}


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_losses(tmp_path / "gone", SESSION, {"step": 1})
    assert list(tmp_path.iterdir()) == []
