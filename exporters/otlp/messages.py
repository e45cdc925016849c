"""Messages between a rank and the process beside it that sends spans: pickled, each after its length."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from commtrace.config import Config
from commtrace.exporters.otlp.queue import Job, SignalCounts
from commtrace.trace.groups import Group
from commtrace.trace.metadata import RankMetadata

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_LENGTH: Final = struct.Struct("!Q")


class Introduction(NamedTuple):
    """The first message to the helper.

    Attributes:
        config, metadata, directory: of the rank.
    """

    config: Config
    metadata: RankMetadata
    directory: Path


class Known(NamedTuple):
    """Facts that the rank has learnt since; sent when they change.

    Attributes:
        groups, topology: its process groups, and its place among the others.
        told: resource attributes of the TracerProvider that the script has installed.
    """

    groups: Mapping[int, Group]
    topology: Mapping[str, Any]
    told: Mapping[str, Any]


class Spans(NamedTuple):
    """Send the spans of these steps. Answered by :data:`Settled`."""

    jobs: Sequence[Job]


class Metrics(NamedTuple):
    """Send these metrics. Answered by :data:`Settled` of one request."""

    families: Sequence[Metric]
    counts: SignalCounts
    start_ns: int
    now_ns: int


Message: TypeAlias = Introduction | Known | Spans | Metrics

Settled: TypeAlias = tuple[tuple[int, "bool | None"], ...]
"""What became of each batch: how many spans, or one request with metrics, and whether they were taken. Also the
helper's first word, when it is ready."""


class Pipe:
    """One direction each way between two processes.

    Args:
        incoming, outgoing: descriptors, which this owns.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, message: Any) -> None:
        """Raises OSError where nobody reads any more."""
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        waiting = memoryview(_LENGTH.pack(len(packed)) + packed)
        while waiting:
            waiting = waiting[os.write(self._outgoing, waiting) :]

    def receive(self) -> Any:
        """Return the next message; raises EOFError where there will be none."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        # From a process that this one has started, or was started by, through a pipe that no other one has.
        return pickle.loads(self._read(length))

    def close(self) -> None:
        """Give up the descriptors: the other side learns of it."""
        for name in ("_incoming", "_outgoing"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = os.read(self._incoming, min(length, 1 << 20))
            if not part:
                raise EOFError("the other process is gone")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)
