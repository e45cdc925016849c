"""The rank's side of the process that sends for it (``helper.py``).

Training shares its interpreter with every thread of its process. To send a span takes the SDK 20 to 40 µs of it; to
leave the row to another process takes 0.2 µs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from commtrace.config import Config
from commtrace.errors import CommtraceError
from commtrace.exporters.otlp import messages
from commtrace.exporters.otlp.queue import Job, Settle
from commtrace.live.rank import LiveRank

_logger = logging.getLogger("commtrace")

_SECONDS_TO_END: Final = 0.2
RESTART_SECONDS: Final = 10.0
"""So long after its start a helper that has died is replaced, at the earliest."""

_START: Final = (
    "import sys; sys.path[:] = sys.argv[4:]; from commtrace.exporters.otlp.helper import main; "
    "main(*map(int, sys.argv[1:4]))"
)
_QUIET: Final[Mapping[str, str]] = {"COMMTRACE_ENABLED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_NOT_FOR_HELPERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HelperError(CommtraceError):
    """The helper cannot be started, or is gone."""


class HelperSender:
    """Sends through a process of its own; one thread uses it, and another one may :meth:`interrupt`.

    The process begins at once; :meth:`wait_until_it_is_ready` before it is asked for anything.

    Args:
        config: options.
        rank: this rank.

    Attributes:
        told: resource attributes of the TracerProvider that the script has installed.

    Raises:
        HelperError: no process can be started here.
    """

    def __init__(self, config: Config, rank: LiveRank) -> None:
        self.told: Mapping[str, Any] = {}
        self._introduction = messages.Introduction(config, rank.metadata, rank.directory)
        self._rank = rank
        self._known: messages.Known | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: messages.Pipe | None = None
        self._started_at = 0.0
        self._gave_up = self._end_told = False
        self._begin()

    @property
    def pid(self) -> int:
        """Of the process; 0 where there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def pause_seconds(self) -> float:
        """Return how long it is of no use to ask: until a helper that has died may be replaced."""
        gone = self._process is None
        return max(self._started_at + RESTART_SECONDS - time.monotonic(), 0.0) if gone else 0.0

    def __enter__(self) -> HelperSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(_SECONDS_TO_END)

    def wait_until_it_is_ready(self) -> None:
        """It takes the better part of a second, most of it imports.

        Raises:
            HelperError: it has ended instead, or was interrupted.
        """
        pipe, process = self._pipe, self._process
        assert pipe is not None
        assert process is not None
        try:
            pipe.send(self._introduction)
            pipe.receive()
        except (EOFError, OSError) as error:
            self.close(RESTART_SECONDS)
            raise HelperError(f"it ended at once, with exit code {process.returncode}") from error

    def send(self, jobs: Sequence[Job], settled: Settle) -> None:
        """Have the spans of some steps sent. Every span is told to ``settled`` once, also where the helper dies."""
        count = sum(job.num_spans for job in jobs)
        self._settle(messages.Spans([job.lean() for job in jobs]), count, settled)

    def send_metrics(self, metrics: messages.Metrics, settled: Settle) -> None:
        """Have metrics sent, as one request that is told to ``settled``, also where the helper dies."""
        self._settle(metrics, 1, settled)

    def close(self, seconds: float) -> None:
        """Let the helper end, for so long."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            _end(process, seconds)

    def interrupt(self) -> None:
        """From another thread: whoever waits for the helper waits no longer."""
        self._gave_up = True
        process = self._process
        if process is not None:
            process.kill()

    def abandon_after_fork(self) -> None:
        """In a forked child: a copy of the pipe would keep the helper alive when the parent is gone."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _settle(self, message: messages.Spans | messages.Metrics, count: int, settled: Settle) -> None:
        for number, was_sent in self._asked(message):
            settled(number, was_sent)
            count -= number
        if count:
            settled(count, None)  # the helper may have sent them before it died

    def _asked(self, message: messages.Spans | messages.Metrics) -> messages.Settled:
        """Return the answer; nothing where the helper is gone, which is replaced with the next request."""
        try:
            if self._process is None:
                self._restart()
            pipe = self._pipe
            assert pipe is not None
            self._tell_what_is_known(pipe)
            pipe.send(message)
            answer: messages.Settled = pipe.receive()
            return answer
        except (HelperError, EOFError, OSError) as error:
            self._has_ended(error)
            return ()

    def _restart(self) -> None:
        if self._gave_up or self.pause_seconds:
            raise HelperError("it has ended a moment ago")
        self._begin()
        self.wait_until_it_is_ready()

    def _has_ended(self, error: Exception) -> None:
        process = self._process
        self.close(_SECONDS_TO_END)
        if not (self._gave_up or self._end_told):
            self._end_told = True
            _logger.warning(
                "commtrace: the process that sends OpenTelemetry spans is gone (%s); another one is started. What it "
                "had not sent is counted; training and the trace go on",
                error if process is None else f"exit code {process.returncode}",
            )

    def _tell_what_is_known(self, pipe: messages.Pipe) -> None:
        marks = self._rank.marks
        known = messages.Known(dict(marks.groups), marks.topology, self.told)
        if known != self._known:
            pipe.send(known)
            self._known = known

    def _begin(self) -> None:
        self._started_at = time.monotonic()
        self._known = None
        if not sys.executable:
            raise HelperError("Python does not know its own executable")
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._pipe = messages.Pipe(ours_in, ours_out)
        package = Path(str(sys.modules["commtrace"].__file__)).parents[1]
        try:
            with _signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, *map(str, (theirs_in, theirs_out, os.getpid(), *sys.path, package))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs_in, theirs_out),
                    env={**os.environ, **_QUIET},
                )
        except OSError as error:
            self.close(0.0)
            raise HelperError(f"no process can be started: {error}") from error
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        if self._gave_up:  # whoever interrupted meanwhile has seen no process
            self._process.kill()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Ctrl-C and the launcher's signals go to the whole group; the rank decides when the helper ends, by closing the
    pipe. A process inherits what is blocked on the thread that starts it: there is no moment at which they reach it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_HELPERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for it, then make it: nothing is left behind, not even a zombie."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
