"""The marks of a rank, collected: for readers of files and for the live view of a running rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from commtrace.trace.device_state import DeviceState
from commtrace.trace.groups import Group
from commtrace.trace.metadata import ClockAnchor, RankMetadata
from commtrace.trace.run import Drop


class Marks:
    """Collects marks in the order in which they were written (see trace/metadata.py).

    A thread that reads while another one collects copies first (``dict(marks.groups)`` is atomic under the GIL).
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.topology: Mapping[str, Any] = {}
        self.dropped: Mapping[str, int] = {}
        self.anchors: list[ClockAnchor] = []
        self.in_flight: tuple[Mapping[str, Any], ...] = ()
        self.activity: Mapping[str, Any] = {}
        self.activity_ns: int | None = None
        self.drops: list[Drop] = []
        self.device_states: list[DeviceState] = []
        self.progress: list[tuple[int, int]] = []
        self.discarded: Mapping[str, Any] = {}
        self.triggers: dict[str, Mapping[str, Any]] = {}
        self.problems: tuple[str, ...] = ()
        self.closed = False
        self.exception = ""
        self.exception_frames: tuple[str, ...] = ()
        self.failures: list[Mapping[str, Any]] = []

    def add_problem(self, message: str) -> None:
        """Add a problem for readers of the rank's numbers, once."""
        if message not in self.problems:
            self.problems = (*self.problems, message)

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Position in each parallel dimension; empty without an integration."""
        coordinates: Mapping[str, int] = self.topology.get("coordinates", {})
        return coordinates

    @property
    def parallel(self) -> Mapping[str, int]:
        """Size of each parallel dimension; empty without an integration."""
        sizes: Mapping[str, int] = self.topology.get("parallel", {})
        return sizes

    def completed(self, metadata: RankMetadata) -> RankMetadata:
        """Metadata of the rank, with what was not known yet when the header of its files was written."""
        device = self.topology.get("device")
        if device is None:
            return metadata
        return replace(metadata, device=device["name"], device_uuid=device["uuid"])

    def read(self, name: str, detail: Any, at_ns: int | None = None) -> None:
        """Collect one mark; unknown ones are ignored.

        Args:
            name, detail: of the mark.
            at_ns: when it was written; without it, times of drops and readings of the device are not kept.
        """
        if name == "process_group":
            self.groups[detail["id"]] = Group(**{**detail, "ranks": tuple(detail["ranks"])})
        elif name == "topology":
            self.topology = {**self.topology, **detail}
        elif name == "dropped":
            if at_ns is not None:
                self.drops.append(Drop(at_ns, detail))
            self.dropped = {
                kind: self.dropped.get(kind, 0) + detail.get(kind, 0) for kind in {**self.dropped, **detail}
            }
        elif name == "clock_anchor":
            self.anchors.append(ClockAnchor(**detail))
        elif name == "in_flight":
            self.in_flight = tuple(detail)
        elif name == "activity":
            self.activity, self.activity_ns = detail, at_ns
        elif name == "device_state" and at_ns is not None:
            self.device_states.append(DeviceState(**{**detail, "slowdowns": tuple(detail.get("slowdowns", ()))}))
        elif name == "progress" and at_ns is not None:
            self.progress.append((detail["step"], at_ns))
        elif name == "discarded":
            self.discarded = detail
        elif name == "trigger":
            self.triggers[detail["id"]] = detail
        elif name == "problem":
            self.add_problem(detail["message"])
        elif name == "end":
            self.closed, self.exception = True, detail.get("exception", "")
            self.exception_frames = tuple(detail.get("frames", ()))
        elif name == "failed":
            self.failures.append(detail)
