"""Files in a folder into which others may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commtrace.trace.files.messages import SegmentFile
from commtrace.trace.files.rank_files import note_gone_peers, write_losses
from commtrace.trace.files.safe_files import open_new, open_to_append, replace_file
from tests.trace.rows import metadata, row, write_rank


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    path = tmp_path / "theirs"
    path.write_text("theirs")
    return path


def test_a_link_in_the_way_is_replaced_and_its_target_not_written(tmp_path: Path, theirs: Path) -> None:
    for number, put in enumerate((Path.symlink_to, Path.hardlink_to)):
        path = tmp_path / f"report-{number}"
        put(path, theirs)
        replace_file(path, "ours")
        assert (path.read_text(), theirs.read_text(), path.is_symlink()) == ("ours", "theirs", False)
    assert sorted(os.listdir(tmp_path)) == ["report-0", "report-1", "theirs"]


def test_a_file_that_cannot_be_put_there_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "report", "ours")
    assert os.listdir(tmp_path) == ["report"]


def test_a_new_file_is_not_one_that_was_there(tmp_path: Path, theirs: Path) -> None:
    link, nowhere = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(theirs)
    nowhere.symlink_to(tmp_path / "made by ours")
    for path in (theirs, link, nowhere):
        with pytest.raises(FileExistsError):
            open_new(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(link)
    assert not (tmp_path / "made by ours").exists()


def test_a_segment_does_not_follow_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000" / "spans-0000.arrows").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        SegmentFile(tmp_path / "rank-00000" / "spans-0000.arrows")
    write_rank(tmp_path, [row()])
    assert (tmp_path / "rank-00000" / "spans-0001.arrows").is_file()
    assert not (tmp_path / "target").exists()


def test_side_files_follow_no_link(tmp_path: Path, theirs: Path) -> None:
    session = metadata().session
    (tmp_path / f"lost-{session}-3").symlink_to(theirs)
    (tmp_path / f"gone-{session}").symlink_to(theirs)
    with pytest.raises(OSError, match="exists"):
        write_losses(tmp_path, session, {"step": 3})
    with pytest.raises(OSError, match="symbolic links"):
        note_gone_peers(tmp_path, session, 7, [1])
    assert theirs.read_text() == "theirs"
