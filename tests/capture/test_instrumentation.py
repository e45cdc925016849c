"""A process notes its folder for `commtrace run`; a failure to do so stops nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commtrace.capture import instrumentation
from commtrace.capture.graphs.replays import PART as GRAPHS
from commtrace.capture.instrumentation import Instrumentation
from commtrace.config import BY_SHELL, NOTES_VARIABLE, Config
from commtrace.errors import RunNotFoundError
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.capture.recording import device_clock
from tests.capture.simulated_cuda import SimulatedCuda
from tests.e2e.launch import REPOSITORY
from tests.waiting import until


def test_a_folder_is_noted_where_commtrace_run_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv(NOTES_VARIABLE, str(notes))
    assert instrumentation._note(tmp_path / "rank-00000")
    assert notes.read_text() == f"{tmp_path / 'rank-00000'}\n"


@pytest.mark.parametrize(
    ("command", "by_shell"),
    [
        ('{python} -c "{code}"', False),
        ("sh -c '{python} -c \"{code}\" || true'", True),
        ("env A=1 bash -c '{python} -c \"{code}\"; echo done'", True),
        ("sh -c 'exec {python} -c \"{code}\"'", False),
    ],
)
def test_a_shell_that_may_hide_an_exit_code_is_noted(tmp_path: Path, command: str, by_shell: bool) -> None:
    """The shell that runs the command, which has no variable of commtrace yet, does not count."""
    notes = tmp_path / "notes"
    notes.touch()
    code = "from commtrace.capture import instrumentation as one; one._note(one.Path(str(7)))"
    line = f"{NOTES_VARIABLE}={notes} {command.format(python=sys.executable, code=code)} || exit 1"
    subprocess.run(["bash", "-c", line], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert notes.read_text() == f"7{BY_SHELL if by_shell else ''}\n"


@pytest.mark.parametrize("notes", ["/dev/full", "/nowhere/notes"])
def test_notes_that_cannot_be_written_are_left_out(notes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES_VARIABLE, notes)
    assert not instrumentation._note(Path("rank-00000"))


KILLED = """
import os, sys, time
if sys.argv[2] == "without pidfd_open":
    del os.pidfd_open
import commtrace
commtrace.start(commtrace.Config(dir=sys.argv[1]))
with commtrace.step(0):
    pass
time.sleep(60)
"""


@pytest.mark.parametrize("system", ["with pidfd_open", "without pidfd_open"])
def test_how_a_rank_ends_is_noted_whether_or_not_it_can_watch_others(tmp_path: Path, system: str) -> None:
    def has_a_step() -> bool:
        try:
            return bool((load_run(tmp_path).ranks[0].spans.kind == schema.STEP).any())
        except RunNotFoundError:
            return False

    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, system]) as rank:
        try:
            until(has_a_step)
        finally:
            rank.kill()
    until(lambda: load_run(tmp_path).ranks[0].end_signal is not None)
    assert load_run(tmp_path).ranks[0].end_signal == 0


@pytest.mark.parametrize(("graphs", "is_followed"), [("replays", True), ("off", False)])
def test_graphs_are_followed_unless_that_is_switched_off(
    graphs: str, is_followed: bool, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimulatedCuda()
    monkeypatch.setattr(instrumentation, "_device_clock", lambda native: device_clock(cuda, native))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.CUDAGraph)
    methods = dict(vars(cuda.CUDAGraph))
    warm_up = torch.cuda.make_graphed_callables
    started = Instrumentation(Config(dir=str(tmp_path), engine=engine, graphs=graphs))
    started.start()
    try:
        assert (vars(cuda.CUDAGraph)["replay"] is not methods["replay"]) == is_followed
        assert (torch.cuda.make_graphed_callables is not warm_up) == is_followed
        assert started.tracer.captures.are_followed == is_followed
    finally:
        started.stop()

    assert {name: vars(cuda.CUDAGraph)[name] for name in methods} == methods
    assert torch.cuda.make_graphed_callables is warm_up


def test_if_graphs_cannot_be_followed_no_communication_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank would number its communication otherwise than others."""
    cuda = SimulatedCuda()
    monkeypatch.setattr(instrumentation, "_device_clock", lambda native: device_clock(cuda, native))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.CUDAGraph)
    allreduce = dist.ProcessGroup.__dict__["allreduce"]
    started = Instrumentation(Config(dir=str(tmp_path)))
    started.start()
    try:
        assert dist.ProcessGroup.__dict__["allreduce"] is not allreduce
        started.tracer.failed(GRAPHS, ZeroDivisionError())
        assert dist.ProcessGroup.__dict__["allreduce"] is allreduce
    finally:
        started.stop()
