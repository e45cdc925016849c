"""Write the marks of a rank beside its spans, once per pass, on the harvester thread. A part that fails is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from msgspec import structs

from commtrace.capture import triggers
from commtrace.capture.collectives.group_members import PART as MEMBERS
from commtrace.capture.collectives.group_members import GroupMeetings
from commtrace.capture.collectives.untraced_paths import ACTIVE, REPLAYED_GRAPHS, find_invisible
from commtrace.capture.collectives.untraced_paths import PART as INVISIBLE
from commtrace.capture.device.clock import DeviceTiming
from commtrace.capture.device.device_watch import DeviceWatch
from commtrace.capture.graphs.replays import PART as GRAPHS
from commtrace.capture.hangs.activity import PART as ACTIVITY
from commtrace.capture.hangs.activity import ActivityWatch
from commtrace.capture.records import Launch
from commtrace.capture.tracer import Tracer
from commtrace.capture.triggers import Triggers
from commtrace.recording import identity
from commtrace.trace.hang_report import InFlight
from commtrace.trace.metadata import Group
from commtrace.trace.schema import MarkDetail

ANCHOR_SECONDS: Final = 10.0
"""Interval of comparisons of the monotonic clock with the wall clock."""

MOST_IN_FLIGHT: Final = 32
"""The oldest so many unfinished communications are written: a hung rank hangs in the first one."""


class RunMarks:
    """Find changes since the last pass, as pairs of a mark's name and detail."""

    def __init__(
        self,
        tracer: Tracer,
        device_clock: DeviceTiming | None,
        requests: Triggers,
        unfinished: Callable[[], list[Launch]],
        device_watch: DeviceWatch,
    ) -> None:
        self.world = ""  # key of the world of this recording
        self.members: GroupMeetings | None = None  # once the rank is known
        self.has_ended = False
        self.has_left = False  # the default process group was destroyed in order, and none was made since
        self.exit: MarkDetail | None = None  # the first call of os._exit, unless it was with 0
        self._recorded_exit = False
        self._recorded_left = False
        self._tracer = tracer
        self._device_clock = device_clock
        self._triggers: Triggers | None = requests
        self._unfinished = unfinished
        self._device_watch = device_watch
        self._recorded_groups: dict[int, Group] = {}
        self._groups_version = -1
        self._topology_version = 0
        self._recorded_device: int | None = None
        self._next_anchor_ns = 0
        self._recorded_in_flight: list[InFlight] = []
        self._activity: ActivityWatch | None = ActivityWatch(tracer)
        self._untraced_paths: dict[str, str] | None = {}

    def since_last_pass(self) -> Iterator[tuple[str, MarkDetail]]:
        # First: there may be no other pass, and no failure below may keep it from being written.
        if self.exit is not None and not self._recorded_exit:
            self._recorded_exit = True
            yield "exit", self.exit
        self._refresh_device_clock()
        self._record_device()
        self._meet_members()
        yield from self._group_marks()
        self._look_for_untraced_paths()
        topology_version, topology = self._tracer.topology()
        if topology_version != self._topology_version:
            self._topology_version = topology_version
            yield "topology", topology
        for state in self._device_watch.take():
            yield "device_state", state.to_json()
        if self.has_left and identity.current_place() is not None:
            self.has_left = False
        if self.has_left != self._recorded_left:
            self._recorded_left = self.has_left
            yield "left", {"has_left": self.has_left}
        for message in self._tracer.guard.take_messages():
            yield "problem", {"message": message}
        anchor = identity.clock_anchor()
        if anchor.monotonic_ns >= self._next_anchor_ns:
            self._next_anchor_ns = anchor.monotonic_ns + int(ANCHOR_SECONDS * 1e9)
            yield "clock_anchor", structs.asdict(anchor)
            if not self._tracer.recording:
                yield from self._progress()
        elif self.has_ended and self._tracer.window is not None:
            yield from self._progress()
        yield from self._requests()
        yield from self._activity_marks()

    def _progress(self) -> Iterator[tuple[str, MarkDetail]]:
        if self._tracer.latest_step >= 0:
            yield "progress", {"step": self._tracer.latest_step}

    def _requests(self) -> list[tuple[str, MarkDetail]]:
        if self._triggers is None:
            return []
        try:
            return list(self._triggers.marks())
        except Exception as error:
            self._triggers = None
            self._tracer.failed(triggers.PART, error)
            return []

    def _activity_marks(self) -> list[tuple[str, MarkDetail]]:
        if self._activity is None:
            return []
        marks: list[tuple[str, MarkDetail]] = []
        try:
            in_flight = self._in_flight(self._activity)
            if in_flight != self._recorded_in_flight:
                self._recorded_in_flight = in_flight
                marks.append(("in_flight", [communication.to_json() for communication in in_flight]))
            marks += self._activity.marks()
        except Exception as error:
            self._activity = None
            self._tracer.failed(ACTIVITY, error)
        return marks

    def _look_for_untraced_paths(self) -> None:
        known = self._untraced_paths
        if known is None:
            return
        try:
            paths = find_invisible()
            if self._tracer.captures.are_followed and self._tracer.guard.works(GRAPHS):
                paths.pop(REPLAYED_GRAPHS, None)
            paths.update(dict.fromkeys(sorted(self._tracer.untraced_paths), ACTIVE))
            # What was active once stays: what it communicated is missing from the recording.
            paths = {**known, **{name: ACTIVE if known.get(name) == ACTIVE else state for name, state in paths.items()}}
            if paths != known:
                self._untraced_paths = paths
                self._tracer.set_topology({"invisible_paths": paths})
        except Exception as error:
            self._untraced_paths = None
            self._tracer.failed(INVISIBLE, error)

    def _refresh_device_clock(self) -> None:
        clock = self._device_clock
        if clock is None or clock.is_off:
            return
        try:
            clock.refresh()
        except Exception as error:
            clock.switch_off()
            self._tracer.failed("timing of the device", error)

    def _record_device(self) -> None:
        # In each pass: when the rank became known it may not have used its device yet.
        used = None if self._device_clock is None else self._device_clock.used_device
        if used is None or used == self._recorded_device:
            return
        self._recorded_device = used
        try:
            name, uuid = identity.device(used)
            self._tracer.set_topology({"device": {"name": name, "uuid": uuid}})
            self._device_watch.start(uuid)
        except Exception as error:
            self._tracer.failed("the name of the device", error)

    def _meet_members(self) -> None:
        if self.members is None:
            return
        try:
            self.members.step()
        except Exception as error:
            self.members = None
            self._tracer.failed(MEMBERS, error)

    def _group_marks(self) -> Iterator[tuple[str, MarkDetail]]:
        groups = self._tracer.groups
        version = groups.version
        if version == self._groups_version:
            return
        self._groups_version = version
        for group in groups.known_groups():
            if self._recorded_groups.get(group.id) != group:
                self._recorded_groups[group.id] = group
                yield "process_group", structs.replace(group, world=group.world or self.world).to_json()

    def _in_flight(self, activity: ActivityWatch) -> list[InFlight]:
        return activity.in_flight(self._unfinished())[:MOST_IN_FLIGHT]
