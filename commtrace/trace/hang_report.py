"""Describe a rank that makes no progress: marks ``activity`` and ``in_flight``, and
``rank-NNNNN/hang-SESSION-NNN.json`` (docs/json/hang.schema.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.metadata import Group, RankMetadata


@dataclass(frozen=True, slots=True)
class OpenPhase:
    """A phase that has begun and not ended. ``since`` is ns; None while the device has not reached its beginning."""

    kind: str
    name: str
    since: int | None


@dataclass(frozen=True, slots=True)
class Activity:
    """The place of the training thread, and its progress."""

    at: tuple[int, int, int, int]  # step, microbatch, chunk and stage
    open: tuple[OpenPhase, ...]  # innermost first
    collectives: Mapping[str, int]  # number launched, by group id
    p2p: tuple[tuple[int, bool, int, int, int], ...]  # group id, is_send, peer, tag, number of messages
    frames: tuple[str, ...]  # "file:line function", innermost first

    @classmethod
    def of_mark(cls, detail: Mapping[str, Any]) -> Activity:
        """Return the activity of a mark; older recorders wrote fewer fields."""
        step, microbatch, chunk, stage = detail.get("at", (-1, -1, -1, -1))
        return cls(
            at=(step, microbatch, chunk, stage),
            open=tuple(OpenPhase(**phase) for phase in detail.get("open", ())),
            collectives=detail.get("collectives", {}),
            p2p=tuple((group, bool(is_send), peer, tag, n) for group, is_send, peer, tag, n in detail.get("p2p", ())),
            frames=tuple(detail.get("frames", ())),
        )

    def to_json(self) -> JsonObject:
        """Return the fields of the mark ``activity``, without its times."""
        return {
            "at": list(self.at),
            "open": [fields_to_json(phase) for phase in self.open],
            "collectives": dict(self.collectives),
            "p2p": [list(messages) for messages in self.p2p],
            "frames": list(self.frames),
        }


@dataclass(frozen=True, slots=True)
class InFlight:
    """A communication that was launched and has not ended."""

    operation: str = "communication"
    group: int = -1  # id
    seq: int = -1
    peer: int = -1
    bytes: int = -1
    dtype: str | None = None
    is_async: bool = False
    start: int = 0  # ns; 0 if unknown
    blocking: bool | None = None  # training stalls on it; None if unknown
    state: str = ""  # scheduled or started on a device; else empty

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
