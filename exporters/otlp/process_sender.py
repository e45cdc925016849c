"""The worker process that makes, encodes and sends a rank's spans, and the rank's side of it.

Sending a span takes the SDK 20 to 40 µs of the interpreter that training shares, handing the row to a process 0.2 µs.
The worker never imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from commtrace.config import Config
from commtrace.errors import CommtraceError
from commtrace.exporters.otlp.queue import ExportedStep, MetricsSnapshot, Settle
from commtrace.live.rank import LiveRank
from commtrace.trace import side_process
from commtrace.trace.metadata import Group, RankMetadata
from commtrace.trace.topology import Topology

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from commtrace.exporters.otlp.sender import Sender

_SECONDS_BETWEEN_LOOKS: Final = 0.5
_SECONDS_OF_GRACE: Final = 2.0
_NICENESS: Final = 5


class Start(NamedTuple):
    config: Config
    metadata: RankMetadata
    directory: Path


class Update(NamedTuple):
    """Changed facts about the rank; not answered."""

    groups: Mapping[int, Group]
    topology: Topology
    provider_attributes: Mapping[str, AttributeValue]


class SendSpans(NamedTuple):
    steps: Sequence[ExportedStep]


Outcomes: TypeAlias = tuple[tuple[int, "bool | None"], ...]
"""The answer: for each batch the number of spans (or 1 request with metrics), and True if it was taken; None if no
answer came. An empty answer means that the worker is ready."""


def main(descriptor: int, parent: int) -> None:
    """Serve the rank with the pid ``parent`` over a connection until it ends."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended, or no longer waits
        serve(Connection(descriptor))
    # Not sys.exit: a thread of an exporter might delay it.
    sys.stderr.flush()
    os._exit(0)


def serve(connection: Connection) -> None:
    """Answer messages; raise :class:`EOFError` or :class:`ConnectionError` when the rank is gone."""
    from commtrace.exporters.otlp.sender import Sender  # the SDK, which the rank does not import

    start: Start = connection.recv()
    rank = LiveRank(start.metadata, start.directory)
    with Sender(start.config, rank) as sender:
        connection.send(())
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)  # the data loader's workers go first
        while True:
            message: Update | SendSpans | MetricsSnapshot = connection.recv()
            if isinstance(message, Update):
                rank.marks.groups = dict(message.groups)
                rank.marks.topology = message.topology
                sender.provider_attributes = message.provider_attributes
            else:
                connection.send(_sent(sender, message))


def _sent(sender: Sender, message: SendSpans | MetricsSnapshot) -> Outcomes:
    outcomes: list[tuple[int, bool | None]] = []

    def settle(count: int, was_sent: bool | None) -> None:
        outcomes.append((count, was_sent))

    if isinstance(message, SendSpans):
        sender.send(message.steps, settle)
    else:
        sender.send_metrics(message, settle)
    return tuple(outcomes)


def _end_with(parent: int) -> None:
    # A request to a receiver that does not answer must not outlive the rank, and forked children of the rank may hold
    # the connection open.
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    time.sleep(_SECONDS_OF_GRACE)
    os._exit(0)


_logger = logging.getLogger("commtrace")

_SECONDS_TO_END: Final = 0.2
RESTART_SECONDS: Final = 10.0
"""Least time between two starts of a worker."""


class WorkerError(CommtraceError):
    """The worker cannot be started, or is gone."""


class ProcessSender:
    """Sends through a worker process, which starts at once; call :meth:`wait_until_ready` before anything else.

    One thread uses it, and another one may :meth:`interrupt`. ``provider_attributes`` are the resource attributes of
    the script's TracerProvider. Raises :class:`WorkerError` if no process can be started.
    """

    def __init__(self, config: Config, rank: LiveRank) -> None:
        self.provider_attributes: Mapping[str, AttributeValue] = {}
        self._start_message = Start(config, rank.metadata, rank.directory)
        self._rank = rank
        self._last_update: Update | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._started_at = 0.0
        self._interrupted = self._warned = False
        self._start()

    @property
    def pid(self) -> int:
        """Return the pid of the worker; 0 without one."""
        return 0 if self._process is None else self._process.pid

    @property
    def pause_seconds(self) -> float:
        """Return the seconds before the next request: a worker that has died is not replaced at once."""
        gone = self._process is None
        return max(self._started_at + RESTART_SECONDS - time.monotonic(), 0.0) if gone else 0.0

    def __enter__(self) -> ProcessSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(_SECONDS_TO_END)

    def wait_until_ready(self) -> None:
        """Wait for the imports of the worker, nearly a second; raise :class:`WorkerError` if it ends instead."""
        connection, process = self._connection, self._process
        assert connection is not None
        assert process is not None
        try:
            connection.send(self._start_message)
            connection.recv()
        except (EOFError, OSError) as error:
            self.close(RESTART_SECONDS)
            raise WorkerError(f"it ended at once, with exit code {process.returncode}") from error

    def send(self, steps: Sequence[ExportedStep], settle: Settle) -> None:
        """Send the spans of some steps, each settled once, also if the worker dies."""
        count = sum(step.num_spans for step in steps)
        self._request(SendSpans([step.without_operations() for step in steps]), count, settle)

    def send_metrics(self, metrics: MetricsSnapshot, settle: Settle) -> None:
        """Send metrics as one request, settled once, also if the worker dies."""
        self._request(metrics, 1, settle)

    def close(self, seconds: float) -> None:
        """Give the worker ``seconds`` to end, then kill it."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            _end(process, seconds)

    def interrupt(self) -> None:
        """Kill the worker to end a request; called from another thread."""
        self._interrupted = True
        process = self._process
        if process is not None:
            process.kill()

    def abandon_after_fork(self) -> None:
        """Close a forked child's copy of the connection, which would keep the worker alive without the parent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _request(self, message: SendSpans | MetricsSnapshot, count: int, settle: Settle) -> None:
        for number, was_sent in self._outcomes(message):
            settle(number, was_sent)
            count -= number
        if count:
            settle(count, None)  # the worker may have sent them before it died

    def _outcomes(self, message: SendSpans | MetricsSnapshot) -> Outcomes:
        """Return the answer; empty if the worker is gone. The next request replaces it."""
        try:
            if self._process is None:
                self._restart()
            connection = self._connection
            assert connection is not None
            self._send_update(connection)
            connection.send(message)
            outcomes: Outcomes = connection.recv()
            return outcomes
        except (WorkerError, EOFError, OSError) as error:
            self._warn_that_it_ended(error)
            return ()

    def _restart(self) -> None:
        if self._interrupted or self.pause_seconds:
            raise WorkerError("it has just ended")
        self._start()
        self.wait_until_ready()

    def _warn_that_it_ended(self, error: Exception) -> None:
        process = self._process
        self.close(_SECONDS_TO_END)
        if not (self._interrupted or self._warned):
            self._warned = True
            _logger.warning(
                "commtrace: the process that sends OpenTelemetry spans is gone (%s). Another one is started. The spans "
                "it had not sent are counted; training and the trace go on",
                error if process is None else f"exit code {process.returncode}",
            )

    def _send_update(self, connection: Connection) -> None:
        marks = self._rank.marks
        update = Update(dict(marks.groups), marks.topology, self.provider_attributes)
        if update != self._last_update:
            connection.send(update)
            self._last_update = update

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._last_update = None
        try:
            self._process, self._connection = side_process.start(__name__)
        except side_process.NotStartedError as error:
            raise WorkerError(str(error)) from error
        if self._interrupted:  # meanwhile, when there was no process to kill
            self._process.kill()


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
