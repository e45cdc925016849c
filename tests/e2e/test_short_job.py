"""A job that is over before its first harvest: since Python 3.12 no thread can be started where it is written."""

from __future__ import annotations

import sys
from pathlib import Path

from commtrace.trace.files.reader import load_run
from tests.e2e.launch import run


def test_a_job_that_ends_at_once_is_recorded_whole(tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "ends_at_once.py"

    completed = run([sys.executable, str(program)], {"COMMTRACE_DIR": str(tmp_path), "PYTHONPATH": "."})

    assert completed.returncode == 0, completed.stdout
    assert completed.stdout.splitlines() == [
        f"commtrace: recording to {tmp_path}. Read it with: commtrace summary {tmp_path}"
    ]
    recorded = load_run(tmp_path)
    spans = recorded.ranks[0].spans
    assert recorded.ranks[0].closed
    assert recorded.problems == ()
    assert "all_reduce" in {recorded.names[number] for number in spans.name}
