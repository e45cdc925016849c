"""recording/findings_at_end.py: whatever becomes of the process that judges the run, rank 0 ends soon and as it was."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from commtrace.recording import findings_at_end
from commtrace.recording.findings_at_end import findings_told
from commtrace.trace import side_process

HELPERS = "tests.recording.helpers_at_end"


def tell(helper: str, monkeypatch: pytest.MonkeyPatch, seconds: float = 20.0) -> float:
    """Return how long the end took."""
    monkeypatch.setattr(findings_at_end, "_MODULE", f"{HELPERS}.{helper}")
    with findings_told(Path("/runs/gpt"), seconds, lambda: True):
        began = time.monotonic()
    return time.monotonic() - began


def test_what_the_process_answers_is_said_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tell("answers", monkeypatch)

    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[0] == "commtrace: Run gpt in /runs/gpt"


@pytest.mark.parametrize("helper", ["never_answers", "ignores_signals"])
def test_a_process_that_does_not_answer_is_waited_for_as_long_as_was_asked_for(
    helper: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    took = tell(helper, monkeypatch, seconds=0.5)

    assert 0.4 < took < 5.0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("helper", ["dies", "raises", "is_missing"])
def test_a_process_that_dies_is_not_waited_for(
    helper: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    took = tell(helper, monkeypatch, seconds=60.0)

    assert took < 20.0
    assert capfd.readouterr().err == ""


def test_where_no_process_can_be_started_files_are_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(side_process, "start", start)
    closed = []
    with findings_told(Path("/runs/gpt"), 60.0, lambda: True):
        closed.append(True)

    assert closed


def test_an_error_as_files_are_closed_is_not_lost_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings_at_end, "_MODULE", f"{HELPERS}.never_answers")
    started = []
    start = side_process.start

    def noted(module: str, *, stderr: int) -> object:
        started.append(start(module, stderr=stderr))
        return started[-1]

    monkeypatch.setattr(side_process, "start", noted)
    with pytest.raises(RuntimeError, match="on purpose"), findings_told(Path("/runs/gpt"), 60.0, lambda: True):
        raise RuntimeError("on purpose")
    (process, connection) = started[0]

    assert process.wait(20) == -9
    assert connection.closed


def test_a_full_pipe_that_nobody_reads_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, bytes(4096)):
            pass
    os.set_blocking(writing, True)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        thread = threading.Thread(target=findings_at_end._say, args=(["commtrace: Run gpt"],), daemon=True)
        thread.start()
        thread.join(20)
        has_ended = not thread.is_alive()
        os.read(reading, 1 << 20)
    os.close(reading)

    assert has_ended


def test_nothing_is_said_of_files_that_could_not_be_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(findings_at_end, "_MODULE", f"{HELPERS}.answers")
    with findings_told(Path("/runs/gpt"), 60.0, lambda: False):
        pass

    assert capfd.readouterr().err == ""
