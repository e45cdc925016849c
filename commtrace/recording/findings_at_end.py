"""Let rank 0 say at its end, unasked, what its job lost time to.

A process beside the rank reads the files and judges them, and imports what it needs while the rank still closes these.
The rank waits for it for a moment, and never longer: a file system that does not answer, or a host that is busy, costs
the lines and nothing else.

>>> with findings_told(run_directory, 3.0, lambda: recorder.is_end_written):   # doctest: +SKIP
...     recorder.stop()
"""

from __future__ import annotations

import contextlib
import logging
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from commtrace.recording.installation import own_command
from commtrace.trace import side_process

_MODULE: Final = "commtrace.cli.ending"
"""By its name: a training process does not import what reads runs."""

_KILLED_SECONDS: Final = 0.1
"""The kernel keeps a process that was killed while its file system does not answer: then nobody waits for it."""

_logger = logging.getLogger("commtrace")


@contextlib.contextmanager
def findings_told(directory: Path, seconds: float, are_files_whole: Callable[[], bool]) -> Iterator[None]:
    """Close the files of rank 0 inside; then say on stderr what the job lost time to, after at most ``seconds``.

    Nothing is said if that takes longer, if too few steps were recorded, if a rank failed, or if the files could not be
    closed: what a file system does not take says nothing of the job. Never raises of itself.
    """
    try:
        process, connection = side_process.start(_MODULE, stderr=subprocess.DEVNULL)
    except Exception as error:  # no descriptor is free, for example: files are closed all the same
        _logger.debug("commtrace: findings are not told at the end: %r", error)
        yield
        return
    try:
        yield
        if are_files_whole():
            _say(_answer(connection, directory, seconds))
    finally:
        process.kill()
        connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_SECONDS)


def _answer(connection: Connection, directory: Path, seconds: float) -> Sequence[str]:
    try:
        connection.send((directory, seconds, own_command()))
        if connection.poll(seconds):
            lines: Sequence[str] = connection.recv()
            return lines
    except (EOFError, OSError) as error:  # it was killed, as a process that takes too much memory is
        _logger.debug("commtrace: findings are not told at the end: %r", error)
    return ()


def _say(lines: Sequence[str]) -> None:
    stream = sys.stderr
    if not lines or stream is None:
        return
    try:
        # A pipe that is full may have nobody who reads it any more.
        if select.select([], [stream.fileno()], [], 0)[1]:
            print("\n".join(lines), file=stream, flush=True)
    except Exception as error:  # the program may have closed it, or put an object of its own there
        _logger.debug("commtrace could not say what it found: %r", error)
