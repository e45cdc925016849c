"""cli/ended_command.py: what ``commtrace run`` says once its command has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.cli.ended_command import EndedCommand, tell
from tests.trace.rows import steps, write_rank


@pytest.mark.parametrize(("exit_code", "following"), [(0, "summary"), (1, "doctor"), (137, "doctor")])
def test_after_a_command_that_failed_the_doctor_is_next(tmp_path: Path, exit_code: int, following: str) -> None:
    run = tmp_path / "gpt"
    write_rank(run, steps(0, 4))
    ended = EndedCommand({run / "rank-00000": False}, 0, {"COMMTRACE_DIR": str(run)}, exit_code)

    last = tell(ended)[-1]

    assert last.startswith("Next: ")
    assert last.endswith(f"commtrace {following} {run}")
