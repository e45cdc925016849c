"""Describe a rank that makes no progress: marks ``activity`` and ``in_flight``, and
``rank-NNNNN/hang-SESSION-NNN.json`` (docs/json/hang.schema.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct

from commtrace.trace.bounds import Count, Frames, Identity, Number, Peer, Step, Time, Word
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.metadata import Group, RankMetadata

TAG_SHIFT: Final = 32
"""Messages of a tag are numbered from ``tag · 2³²`` on (see docs/recorded-spans.md)."""


class OpenPhase(Struct, frozen=True):
    """A phase that has begun and not ended. ``since`` is ns; None while the device has not reached its beginning."""

    kind: Word
    name: Word
    since: Time | None


class Activity(Struct, frozen=True):
    """The place of the training thread, and its progress; older recorders wrote fewer fields."""

    at: tuple[Step, Number, Number, Number] = (-1, -1, -1, -1)  # step, microbatch, chunk and stage
    open: Annotated[tuple[OpenPhase, ...], Meta(max_length=4096)] = ()  # innermost first
    collectives: Mapping[Annotated[str, Meta(pattern=r"^-?[0-9]{1,19}$")], Count] = {}  # number launched, by group id
    # Group id, is_send, peer, tag, number of messages.
    p2p: tuple[tuple[Identity, bool, Peer, Time, Count], ...] = ()
    frames: Frames = ()

    def to_json(self) -> JsonObject:
        """Return the fields of the mark ``activity``, without its times."""
        return fields_to_json(self)


class InFlight(Struct, frozen=True, omit_defaults=True):
    """A communication that was launched and has not ended."""

    operation: Word = "communication"
    group: Identity = -1  # id
    seq: Number = -1
    peer: Peer = -1
    bytes: Number = -1
    dtype: Word | None = None
    is_async: bool = False
    start: Time = 0  # ns; 0 if unknown
    blocking: bool | None = None  # training stalls on it; None if unknown
    state: Word = ""  # scheduled or started on a device; else empty

    @property
    def is_p2p(self) -> bool:
        return self.operation in ("send", "recv")

    @property
    def tag(self) -> int:
        """Return the tag of a message."""
        return max(self.seq, 0) >> TAG_SHIFT

    @property
    def number(self) -> int:
        """Return the number of a message among those of its tag."""
        return self.seq & ((1 << TAG_SHIFT) - 1)

    def to_json(self) -> JsonObject:
        """Return an item of the mark ``in_flight``."""
        fields = fields_to_json(self)
        return fields if self.state else {name: value for name, value in fields.items() if name != "state"}


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of a Python thread: ``file:line function``, innermost first."""

    thread: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HangReport:
    """The state of a rank whose training makes no progress."""

    time: float  # epoch seconds
    monotonic_ns: int  # the same instant
    no_progress_ns: int  # since the last progress
    metadata: RankMetadata
    groups: tuple[Group, ...]
    coordinates: Mapping[str, int]  # by parallel dimension; empty if unknown
    parallel: Mapping[str, int]
    activity: Activity
    in_flight: tuple[InFlight, ...]  # the one that blocks training first
    threads: tuple[ThreadStack, ...]  # of Python, except the reporting one

    def to_json(self) -> JsonObject:
        """Return the contents of the file."""
        topology = {"coordinates": dict(self.coordinates), "parallel": dict(self.parallel)}
        return {
            "time": self.time,
            "monotonic_ns": self.monotonic_ns,
            "no_progress_ns": self.no_progress_ns,
            "metadata": fields_to_json(self.metadata),
            "groups": [group.to_json() for group in self.groups],
            "topology": {name: sizes for name, sizes in topology.items() if sizes},
            "activity": self.activity.to_json(),
            "in_flight": [communication.to_json() for communication in self.in_flight],
            "threads": [fields_to_json(stack) for stack in self.threads],
        }


@dataclass(frozen=True, slots=True)
class WrittenHang:
    """What a reader needs of the file of a :class:`HangReport`."""

    time: float  # epoch seconds
    no_progress_ns: int
    metadata: RankMetadata
    in_flight: tuple[InFlight, ...]
    threads: tuple[ThreadStack, ...]
