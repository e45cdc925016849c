"""A process notes its folder for `commtrace run`; a failure to do so stops nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.capture import instrumentation
from commtrace.config import NOTES_VARIABLE


def test_a_folder_is_noted_where_commtrace_run_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv(NOTES_VARIABLE, str(notes))
    assert instrumentation._note(tmp_path / "rank-00000")
    assert notes.read_text() == f"{tmp_path / 'rank-00000'}\n"


@pytest.mark.parametrize("notes", ["/dev/full", "/nowhere/notes"])
def test_notes_that_cannot_be_written_are_left_out(notes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES_VARIABLE, notes)
    assert not instrumentation._note(Path("rank-00000"))
