"""The process beside a rank that makes, encodes and sends its spans, so that training keeps its interpreter.

:mod:`commtrace.exporters.otlp.process_sender` starts it. It answers one message after the other, ends when the rank
does, however that ends, and never imports torch. The messages are below.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from commtrace.config import Config
from commtrace.exporters.otlp.queue import Job, MetricsSnapshot
from commtrace.live.rank import LiveRank
from commtrace.trace.metadata import Group, RankMetadata

if TYPE_CHECKING:
    from commtrace.exporters.otlp.sender import Sender

_SECONDS_BETWEEN_LOOKS: Final = 0.5
_SECONDS_OF_GRACE: Final = 2.0
_NICENESS: Final = 5


class Start(NamedTuple):
    """The first message: whose spans these are."""

    config: Config
    metadata: RankMetadata
    directory: Path


class Update(NamedTuple):
    """What the rank has learnt since; sent when it changes and not answered.

    Attributes:
        groups, topology: of the rank.
        provider_attributes: resource attributes of the TracerProvider that the script has installed.
    """

    groups: Mapping[int, Group]
    topology: Mapping[str, Any]
    provider_attributes: Mapping[str, Any]


class SendSpans(NamedTuple):
    """Send the spans of these steps."""

    jobs: Sequence[Job]


Outcomes: TypeAlias = tuple[tuple[int, "bool | None"], ...]
"""The answer: for each batch the number of spans (or 1 request with metrics), and whether it was taken; None if no
answer came. An empty one says that the worker is ready."""


def main(descriptor: int, parent: int) -> None:
    """Serve a rank until it ends.

    Args:
        descriptor: of the connection.
        parent: pid of the rank.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended, or no longer waits
        serve(Connection(descriptor))
    # Not sys.exit: a thread of an exporter might delay it.
    sys.stderr.flush()
    os._exit(0)


def serve(connection: Connection) -> None:
    """Answer messages.

    Raises:
        EOFError, ConnectionError: the rank is gone.
    """
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
        sender.send(message.jobs, settle)
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
