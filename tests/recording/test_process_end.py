"""The ends of a process that atexit does not hear."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from commtrace.recording import process_end
from commtrace.recording.process_end import ExitCall


def in_a_process(program: str, *arguments: str) -> tuple[int, str]:
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return completed.returncode, completed.stdout + completed.stderr


def test_a_call_before_os_exit_gets_its_status() -> None:
    program = """
import os
from commtrace.recording.process_end import ExitCall
ExitCall(lambda status, how: print("before", status, flush=True)).install()
os._exit(3)
"""
    assert in_a_process(program) == (3, "before 3\n")


def test_a_thread_that_holds_a_lock_delays_os_exit_for_seconds_only() -> None:
    program = """
import os, threading
from commtrace.recording import process_end
lock = threading.Lock()
lock.acquire()
process_end._PATIENCE_SECONDS = 0.2
process_end.ExitCall(lambda status, how: lock.acquire()).install()
os._exit(3)
"""
    assert in_a_process(program) == (3, "")


def test_os_exit_is_put_back() -> None:
    original = os._exit
    call = ExitCall(lambda status, how: None)
    call.install()
    assert os._exit is not original
    call.uninstall()
    assert os._exit is original


def test_an_os_exit_of_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", os._exit)
    call = ExitCall(lambda status, how: None)
    call.install()
    of_others = threading.get_ident
    system: Any = os
    system._exit = of_others
    call.uninstall()
    assert system._exit is of_others


@pytest.mark.parametrize(
    ("error", "told"),
    [(None, None), (SystemExit(0), None), (SystemExit(1), None), (ValueError("x"), ValueError)],
)
def test_an_exception_is_told_and_a_plain_exit_is_none(
    error: BaseException | None, told: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_end, "_uncaught", None)
    process_end.note_uncaught(error)
    assert type(process_end._uncaught) is (told or type(None))


def test_the_exception_for_which_a_worker_of_torch_exits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "_uncaught", None)
    try:
        try:
            raise ValueError("on purpose")
        except ValueError:
            sys.exit(1)
    except SystemExit as error:
        process_end.note_uncaught(error)
    assert isinstance(process_end.uncaught_exception(), ValueError)


def test_a_child_of_multiprocessing_calls_it_with_its_exception(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing
from commtrace.recording import process_end

def work(fails):
    process_end.end_with_multiprocessing(lambda: print("end", process_end.how_it_ended().get("exception"), flush=True))
    if fails:
        raise KeyError("on purpose")

if __name__ == "__main__":
    for fails in (False, True):
        child = multiprocessing.get_context("fork").Process(target=work, args=(fails,))
        child.start()
        child.join()
""")
    completed = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert completed.stdout == "end None\nend KeyError\n", completed.stderr


REPORTS = """
import os, signal, sys
from commtrace.recording.process_end import ExitCall
ExitCall(lambda status, how: print(how, flush=True)).install()

def leave(status):
    os._exit(status)
"""


def told(program: str) -> dict[str, Any]:
    """What a call of os._exit in a program of its own tells."""
    _, output = in_a_process(REPORTS + program)
    told: dict[str, Any] = ast.literal_eval(output.splitlines()[-1])
    return told


def test_os_exit_tells_its_caller() -> None:
    how = told("leave(3)\n")
    assert (how["status"], how["exception"], how["signal"]) == (3, "", "")
    assert [frame.split()[-1] for frame in how["frames"]] == ["leave", "<module>"]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("try:\n    fails()\nexcept ValueError:\n    leave(1)\n", id="in a handler"),
        pytest.param("sys.excepthook = lambda *error: leave(1)\nfails()\n", id="in sys.excepthook"),
        pytest.param(
            "try:\n    try:\n        fails()\n    except ValueError:\n        sys.exit(1)\n"
            "except SystemExit:\n    leave(1)\n",
            id="in place of sys.exit",
        ),
    ],
)
def test_os_exit_tells_the_type_and_the_origin_of_the_exception_that_it_is_called_for(program: str) -> None:
    how = told(f"def fails():\n    raise ValueError('secret')\n\n{program}")
    assert (how["status"], how["exception"]) == (1, "ValueError")
    assert how["frames"][0].split()[-1] == "fails"
    assert "secret" not in str(how)


@pytest.mark.parametrize(
    "handler",
    [
        "lambda number, frame: leave(143)",
        "lambda *_: leave(143)",
        "Leaver().handle",
        "lambda number, frame: [signal.signal(number, signal.SIG_DFL), leave(128 + number)]",
    ],
)
def test_os_exit_tells_the_signal_whose_handler_calls_it(handler: str) -> None:
    how = told(f"""
class Leaver:
    def handle(self, number, frame):
        leave(143)

signal.signal(signal.SIGTERM, {handler})
os.kill(os.getpid(), signal.SIGTERM)
""")
    assert (how["status"], how["signal"]) == (143, "SIGTERM")


def test_a_function_that_is_given_a_number_and_a_frame_is_no_handler() -> None:
    how = told("""
def look(number, frame):
    leave(1)

def of_another_call():
    return sys._getframe()

look(15, of_another_call())
""")
    assert how["signal"] == ""


@pytest.mark.parametrize(
    "rebound",
    [
        "argparse.ArgumentParser().parse_args([])",
        "itertools.count()",
        "[15, sys._getframe().f_back]",
        "None",
    ],
)
def test_arguments_that_the_program_has_bound_anew_are_not_looked_through(rebound: str) -> None:
    how = told(f"""
import argparse, itertools

def main(*args):
    args = {rebound}
    leave(3)

main()
""")
    assert (how["status"], how.get("signal"), how.get("exception")) == (3, "", "")


def test_arguments_that_the_program_has_deleted_are_not_looked_through() -> None:
    how = told("""
def main(*args):
    del args
    leave(3)

main()
""")
    assert (how["status"], how.get("signal")) == (3, "")


def test_a_failure_of_ours_keeps_nobody_from_leaving() -> None:
    program = """
import os
from commtrace.recording import process_end
def fails(status):
    raise KeyError("ours")
process_end.how_it_exits = fails
process_end.ExitCall(lambda status, how: print(how, flush=True)).install()
os._exit(3)
"""
    status, output = in_a_process(program)
    assert status == 3
    assert "{'status': 3}" in output


def test_a_status_that_os_exit_refuses_ends_nothing() -> None:
    program = """
for status in (2**31, -(2**31) - 1, 1.5, "1"):
    try:
        os._exit(status)
    except (OverflowError, TypeError) as error:
        print(type(error).__name__, flush=True)
"""
    status, output = in_a_process(REPORTS + program)
    assert (status, output.split()) == (0, ["OverflowError"] * 2 + ["TypeError"] * 2)


def test_a_status_may_be_any_integer() -> None:
    how = told("""
class Three:
    def __index__(self):
        return 3

leave(Three())
""")
    assert how["status"] == 3


def test_python_that_has_ended_is_left_without_a_word() -> None:
    """It would start no thread any more, and Python before 3.12 would wait for it without end."""
    program = """
class Late:
    def __del__(self, is_finalizing=sys.is_finalizing, leave=os._exit):
        leave(3 if is_finalizing() else 4)

late = Late()
"""
    status, output = in_a_process(REPORTS + program)
    assert (status, output) == (3, "")
