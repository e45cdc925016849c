"""Start a process beside a rank's, which serves it over a pipe and ends with it.

It runs ``main(descriptor, parent)`` of a module of commtrace, with the descriptor of its end of the pipe and the pid of
the rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from commtrace.errors import CommtraceError

_PROGRAM: Final = """
import importlib, sys, types
sys.path[:] = sys.argv[5:]
# Not the package's own module, which imports what a rank needs.
package = sys.modules["commtrace"] = types.ModuleType("commtrace")
package.__path__ = [sys.argv[4]]
importlib.import_module(sys.argv[1]).main(*map(int, sys.argv[2:4]))
"""
_ENVIRONMENT: Final[Mapping[str, str]] = {"COMMTRACE_ENABLED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SENT_TO_ALL: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that terminals, launchers and schedulers send, some to a whole process group."""


class NotStartedError(CommtraceError):
    """No process can be started."""


def start(module: str, *, stderr: int | None = None) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that runs ``main`` of a module, and return it with this end of its pipe.

    Args:
        stderr: as for :class:`subprocess.Popen`. Whoever reads the rank's output to the end waits for a process that
            has inherited it.

    Raises:
        NotStartedError: no process can be started.
    """
    if not sys.executable:
        raise NotStartedError("Python does not know its own executable")
    if getattr(sys, "frozen", False):  # by PyInstaller and others: it would begin the training a second time
        raise NotStartedError("the executable is the program itself, and no Python")
    ours, theirs = multiprocessing.Pipe()
    arguments = (module, theirs.fileno(), os.getpid(), Path(__file__).parents[1], *sys.path)
    try:
        with _signals_blocked():
            process = subprocess.Popen(
                # -S: what a site starts with every Python is not to start in this one. Paths come from the rank.
                [sys.executable, "-S", "-c", _PROGRAM, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ENVIRONMENT},
            )
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: Python is ending
        ours.close()
        raise NotStartedError(f"no process can be started: {error}") from error
    finally:
        theirs.close()
    return process, ours


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    # The rank decides when the process ends, by closing the connection. A process inherits the mask of the thread that
    # starts it, so no signal slips through.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
