"""Find true ends of communication without a stall, in steps of detail, from durations in torch's flight recorder.

An operation starts at its launch, or at the end of the one before it on its stream. Rows are held back until the
durations are known. The recorder has them with ``TORCH_NCCL_ENABLE_TIMING=1``; a dump takes 32 µs per entry, with the
GIL held, so it is for steps in detail.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from commtrace.capture.collectives.operations import LEGACY
from commtrace.capture.device.clock import now_ns
from commtrace.capture.records import SHORTEST_STALL_NS, DeviceCall, Entry, Placed, communication_row, ended_at
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.schema import Row, mark_row

PART: Final = "true ends of hidden communication"

HOLD_NS: Final = 5_000_000_000
"""Calls are held back so long, and questions are so far apart."""
ANSWER_NS: Final = 1_500_000_000
"""Delay of the last question after the end of the recording. torch's nccl2 looks once a second what has ended."""
MOST_HELD: Final = 20_000


class CompletionTimes(Protocol):
    """A source of durations that the device has measured."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    def durations_ns(self, calls: Sequence[DeviceCall]) -> Mapping[int, int]:
        """Return the known durations of operations, ns, by the id of the call. Harvester only."""


class Held(NamedTuple):
    """A call whose marks have been passed; ``end`` (ns, like the others) is when it was seen to be over."""

    call: DeviceCall
    launch: int
    waited_from: int
    end: int

    @property
    def ends_exactly(self) -> bool:
        return ended_at(self.call, self.launch, self.waited_from, self.end)


class HiddenEnds:
    """Hold calls back until their durations are known; ``times`` knows them by the system's clock."""

    def __init__(
        self,
        tracer: Tracer,
        times: CompletionTimes,
        host_ns: Callable[[], int] = now_ns,
        system_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tracer = tracer
        self._times = times
        self._host_ns = host_ns
        self.system_ns = system_ns
        self._held: list[Held] = []
        self._ask_at: int | None = None
        self._stop_at: int | None = None
        self._is_off = False
        self._has_warned = False
        tracer.guard.on_failure(PART, self._switch_off)

    def follow(self, call: DeviceCall) -> None:
        """Have ``call``, which is about to be launched, held back later. On the training thread."""
        step = call.launch.coordinates.step
        if not self._is_off and self._tracer.is_in_window(step):
            call.holder = self
            call.launched_at = self.system_ns()

    def hold(self, call: DeviceCall, launch: int, waited_from: int, end: int) -> bool:
        """Take a call whose marks have been passed; return False if its row is to be made at once. Harvester only."""
        now = self._host_ns()
        if self._is_off or len(self._held) >= MOST_HELD or (self._stop_at is not None and now >= self._stop_at):
            return False
        self._held.append(Held(call, launch, waited_from, end))
        # An entry that found the buffer full was dropped: it is made again.
        if self._ask_at is None or now >= self._ask_at + HOLD_NS:
            self._ask_at = now + HOLD_NS
            self._tracer.append((self._rows, schema.MARK))
        return True

    def stop(self) -> None:
        """Ask soon, for the last time: the recording ends."""
        self._stop_at = self._host_ns() + ANSWER_NS

    def _switch_off(self) -> None:
        self._is_off = True

    def _rows(self, _entry: Entry) -> list[Row] | None:
        now, ask_at = self._host_ns(), self._ask_at or 0
        if not self._is_off and now < min(ask_at, self._stop_at or ask_at):
            return None
        held, self._held, self._ask_at = self._held, [], None
        durations = self._durations([one.call for one in held])
        took_ns = self._host_ns() - now
        rows, comparison = placed(held, durations)
        detail = {"source": self._times.name, **comparison._asdict(), "took_ns": took_ns}
        return [*rows, mark_row("hidden_ends", detail)]

    def _durations(self, calls: Sequence[DeviceCall]) -> Mapping[int, int]:
        if self._is_off:
            return {}
        try:
            durations = self._times.durations_ns(calls)
        except Exception as error:
            self._tracer.failed(PART, error)
            return {}
        if not durations and not self._has_warned:
            self._has_warned = True
            self._tracer.guard.noticed(
                f"the {self._times.name} has no durations of the communication in the steps of detail: the ends of "
                "hidden communication stay upper bounds (docs/gpu-validation.md)"
            )
        return durations


class Comparison(NamedTuple):
    """Counts of hidden ends, and absolute differences of durations from known ends, ns; None if none were compared."""

    hidden: int
    known: int
    refused: int  # behind their upper bound
    compared: int
    median_difference_ns: int | None
    largest_difference_ns: int | None


def placed(held: Sequence[Held], durations: Mapping[int, int]) -> tuple[list[Row], Comparison]:
    """Return the rows of calls of any queues, by the known durations (ns, by the id of the call), and a comparison."""
    rows: list[Row] = []
    hidden = known = refused = 0
    differences: list[int] = []
    bound: dict[int, int] = {}
    bounds: dict[int, int] = {}
    ordered = sorted(held, key=lambda one: one.call.position)
    for one in reversed(ordered):  # What was launched later on the same stream ended later.
        stream = id(one.call.queue)
        bounds[one.call.id] = bound[stream] = min(bound.get(stream, one.end), one.end)
    for one in ordered:
        call, queue = one.call, one.call.queue
        before, duration = queue.before(call), durations.get(call.id)
        starts_with = None if before is None else _start(one.launch, before)
        start, end = max(one.launch, queue.known_end), bounds[call.id]
        place = queue.of_batch(call)
        if place is None and one.ends_exactly:
            place = Placed(min(start, end), end, True, call.clock.timing)
            if duration is not None and starts_with is not None:
                differences.append(abs(end - starts_with - duration))
        elif place is None:
            hidden += 1
            place = Placed(min(start, end), end, False, schema.UNKNOWN_TIMING)
            if duration is not None and starts_with is not None:
                if starts_with + duration <= end + SHORTEST_STALL_NS:
                    place = Placed(starts_with, starts_with + duration, True, schema.NCCL_TIMING)
                    known += 1
                else:
                    refused += 1
        queue.passed(call, place)
        rows.append(
            communication_row(call.launch, place.start, place.end, call.id, place.timing, False, call.op_in_seq)
        )
    median = round(statistics.median(differences)) if differences else None
    return rows, Comparison(hidden, known, refused, len(differences), median, max(differences, default=None))


def _start(launch: int, before: Placed) -> int | None:
    """Return the start of an operation; None if the one before it on its stream may have run until later."""
    if before.is_exact:
        return max(launch, before.end)
    return launch if before.end <= launch else None


_ENTRIES: Final = '"entries":['
_BETWEEN_HOOKS_NS: Final = 1_000_000
"""At most so long before our hook torch's own one makes its entry."""
_ENTRIES_BETWEEN_YIELDS: Final = 64
_NANOSECONDS_PER_MILLISECOND: Final = 1_000_000


class DumpEntry(NamedTuple):
    """One operation in a dump; ``number`` counts the recorder's records. An unknown duration is None."""

    number: int
    group: str
    created_ns: int
    duration_ns: int | None


class FlightRecorder:
    """Read the flight recorders of torch's NCCL backends. ``dump`` returns that of a backend as JSON."""

    name: Final = "flight recorder"

    def __init__(self, dump: Callable[[str], bytes] | None = None) -> None:
        self._dump = dump or dump_of

    def durations_ns(self, calls: Sequence[DeviceCall]) -> dict[int, int]:
        found: dict[int, int] = {}
        for backend in {call.launch.state.nccl.name for call in calls}:
            own = [call for call in calls if call.launch.state.nccl.name == backend]
            found.update(match_durations(own, list(entries_of(self._dump(backend)))))
        return found


def dump_of(backend: str) -> bytes:
    """Return a backend's flight recorder as JSON; empty where this torch has no such function."""
    c10d = importlib.import_module("torch._C._distributed_c10d")  # has no stubs
    # The old backend keeps a recorder of its own. The others are recorded by torch's hook, by the backend's name.
    if backend != LEGACY.name:
        return bytes(c10d._dump_fr_trace_json(True, False, backend))
    return bytes(c10d._dump_nccl_trace_json(True, False)) if hasattr(c10d, "_dump_nccl_trace_json") else b""


def entries_of(dump: bytes) -> Iterator[DumpEntry]:
    """Yield the entries of a dump, oldest first. Raise ValueError for anything but a flight recorder's dump."""
    text = dump.decode()
    at = text.find(_ENTRIES)
    if at < 0:
        return
    at += len(_ENTRIES)
    decoder = json.JSONDecoder()
    count = 0
    while text[at : at + 1] != "]":
        # One by one: a JSON text of a megabyte would keep the training thread from the GIL for 10 ms and more.
        entry, at = decoder.raw_decode(text, at)
        at += text[at : at + 1] == ","
        duration = entry.get("duration_ms")
        yield DumpEntry(
            int(entry["record_id"]),
            str(entry["process_group"][0]),
            int(entry["time_created_ns"]),
            None if duration is None else round(duration * _NANOSECONDS_PER_MILLISECOND),
        )
        count += 1
        if count % _ENTRIES_BETWEEN_YIELDS == 0:
            time.sleep(0)


def match_durations(calls: Sequence[DeviceCall], entries: Sequence[DumpEntry]) -> dict[int, int]:
    """Return durations by the id of the call: of the one entry that was made while the call was handed on.

    Members of a coalescing bracket share a duration. Ambiguous entries are left out, and those that may be overwritten.
    """
    kept_since = entries[0].created_ns if entries and entries[0].number else 0
    groups: dict[str, list[DumpEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    created = {group: [entry.created_ns for entry in own] for group, own in groups.items()}
    batches: dict[int, list[DeviceCall]] = {}
    for call in calls:
        batches.setdefault(call.batch, []).append(call)
    found: dict[int, int] = {}
    returned: dict[str, int] = {}  # by group: when the call before had been handed on
    for members in sorted(batches.values(), key=_launched_at):
        first, last = _launched_at(members), max(call.returned_at for call in members)
        group = members[0].launch.state.group.name
        before = returned.get(group, 0)
        returned[group] = max(before, last)
        if group not in groups or first < kept_since or not last:
            continue
        begin, end = bisect_left(created[group], first), bisect_right(created[group], last)
        own = groups[group][begin:end]
        if not own and begin and max(before, first - _BETWEEN_HOOKS_NS) < created[group][begin - 1]:
            own = groups[group][begin - 1 : begin]
        if len(members) > 1:
            own = [entry for entry in own if entry.duration_ns is not None]
        if len(own) == 1 and own[0].duration_ns is not None:
            found.update((call.id, own[0].duration_ns) for call in members)
    return found


def _launched_at(members: Sequence[DeviceCall]) -> int:
    return min(call.launched_at for call in members)
