"""Find true ends of communication without a stall, in steps of detail, from durations in torch's flight recorder.

An operation starts at its launch, or at the end of the one before it on its stream. Rows are held back until the
durations are known. The recorder has them with ``TORCH_NCCL_ENABLE_TIMING=1``; a dump takes 32 µs per entry, with the
GIL held, so it is for steps in detail.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import numpy as np

from commtrace.capture.collectives.operations import LEGACY
from commtrace.capture.device.clock import now_ns
from commtrace.capture.device.facts import Handed, OperationFacts, Part, dropped_on_failure, rows_of
from commtrace.capture.device.placement import UNMEASURED, DeviceOperations, PlacedTimes, Placement
from commtrace.capture.records import DeviceCall, Entry
from commtrace.capture.tracer import Tracer
from commtrace.recording.identity import clock_anchor
from commtrace.trace import schema
from commtrace.trace.metadata import ClockAnchor
from commtrace.trace.schema import Row, mark_row
from commtrace.trace.spans import Bool

PART: Final = "true ends of hidden communication"

HOLD_NS: Final = 5_000_000_000
"""Calls are held back so long, and questions are so far apart."""
ANSWER_NS: Final = 1_500_000_000
"""Delay of the last question after the end of the recording. torch's nccl2 looks once a second what has ended."""
MOST_HELD: Final = 20_000
_NEVER: Final = sys.maxsize


class CompletionTimes(Protocol):
    """A source of durations that the device has measured."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    def durations_ns(self, calls: Sequence[Handed]) -> Mapping[int, int]:
        """Return the known durations, ns, by the id of the call; ``calls`` have the system's time. Harvester only."""


class HiddenEnds:
    """Hold calls back until their durations are known; ``times`` knows them by the system's clock."""

    def __init__(
        self,
        tracer: Tracer,
        placement: Placement,
        times: CompletionTimes,
        host_ns: Callable[[], int] = now_ns,
        anchor: Callable[[], ClockAnchor] = clock_anchor,
    ) -> None:
        self._tracer = tracer
        self._placement = placement
        self._times = times
        self._host_ns = host_ns
        self._anchor = anchor
        self._held: list[Part] = []
        self._since = _NEVER  # the id of the first call in detail that is held
        self._ask_at: int | None = None
        self._stop_at: int | None = None
        self._is_off = False
        self._has_warned = False
        tracer.guard.on_failure(PART, self._switch_off)

    def follow(self, call: DeviceCall) -> None:
        """Have ``call``, which is about to be launched, held back later. On the training thread."""
        if not self._is_off and self._tracer.is_in_window(call.launch.coordinates.step):
            call.launched_at = self._host_ns()

    def returned(self, calls: Sequence[DeviceCall]) -> None:
        """Note that the backend has got ``calls``. On the training thread."""
        if any(call.launched_at for call in calls):
            now = self._host_ns()
            for call in calls:
                call.returned_at = now

    def hold(self, calls: DeviceOperations, facts: OperationFacts) -> Bool:
        """Hold calls back that are in detail, and what was launched behind one; return which. Harvester only."""
        now = self._host_ns()
        is_over = self._is_off or (self._stop_at is not None and now >= self._stop_at)
        in_detail = calls.id[facts.is_in_detail]
        since = min(self._since, int(in_detail.min()) if len(in_detail) else _NEVER)
        # Where those behind began is known when the ends of these are.
        held = np.asarray(calls.id >= since)
        if is_over or not held.any() or sum(len(part) for part, _ in self._held) + held.sum() > MOST_HELD:
            return np.zeros(len(calls), np.bool_)
        self._since = since
        self._held.append((calls.take(held), facts.take(held)))
        # An entry that found the buffer full was dropped: it is made again.
        if self._ask_at is None or now >= self._ask_at + HOLD_NS:
            self._ask_at = now + HOLD_NS
            self._tracer.append((self._rows, ()))
        return held

    def stop(self) -> None:
        """Ask soon, for the last time: the recording ends."""
        self._stop_at = self._host_ns() + ANSWER_NS

    def release(self) -> list[Row]:
        """Return the rows of all calls that are held back, with the durations that are known. Harvester only."""
        held, self._held, self._ask_at, self._since = self._held, [], None, _NEVER
        if not held:
            return []
        before = self._host_ns()
        durations = self._durations([handed for _, facts in held for handed in facts.handed() if handed.returned_at])
        took_ns = self._host_ns() - before
        calls = DeviceOperations.concatenate([part for part, _ in held])
        known = [durations.get(number, UNMEASURED) for number in calls.id.tolist()]
        calls = replace(calls, duration=np.array(known, np.int64))
        with dropped_on_failure(held, self._tracer.recorder):
            placed = self._placement.place(calls)
            rows = rows_of(held, placed)
        detail = {"source": self._times.name, **compare(calls, placed)._asdict(), "took_ns": took_ns}
        return [*rows, mark_row("hidden_ends", detail)]

    def _switch_off(self) -> None:
        self._is_off = True

    def _rows(self, _entry: Entry) -> list[Row] | None:
        now, ask_at = self._host_ns(), self._ask_at or 0
        if not self._is_off and now < min(ask_at, self._stop_at or ask_at):
            return None
        return self.release()

    def _durations(self, calls: Sequence[Handed]) -> Mapping[int, int]:
        if self._is_off:
            return {}
        try:
            anchor = self._anchor()
            offset_ns = anchor.realtime_ns - anchor.monotonic_ns
            durations = self._times.durations_ns([
                call._replace(launched_at=call.launched_at + offset_ns, returned_at=call.returned_at + offset_ns)
                for call in calls
            ])  # fmt: skip
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


class HiddenEndCounts(NamedTuple):
    """Counts of hidden ends, and absolute differences of durations from known ends, ns; None if none were compared."""

    hidden: int
    known: int
    refused: int  # behind their upper bound
    compared: int
    median_difference_ns: int | None
    largest_difference_ns: int | None


def compare(calls: DeviceOperations, placed: PlacedTimes) -> HiddenEndCounts:
    """Count what durations say of operations; a bracket is one."""
    _, launches = np.unique(calls.batch, return_index=True)
    timing, measured_end, end = placed.timing[launches], placed.measured_end[launches], placed.end[launches]
    is_told = measured_end != UNMEASURED
    known, bound = timing == schema.NCCL_TIMING, timing == schema.UNKNOWN_TIMING
    compared = is_told & ~known & ~bound
    differences = np.abs(end - measured_end)[compared].tolist()
    return HiddenEndCounts(
        hidden=int((known | bound).sum()),
        known=int(known.sum()),
        refused=int((bound & is_told).sum()),
        compared=len(differences),
        median_difference_ns=round(statistics.median(differences)) if differences else None,
        largest_difference_ns=max(differences, default=None),
    )


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

    def durations_ns(self, calls: Sequence[Handed]) -> dict[int, int]:
        durations: dict[int, int] = {}
        for backend in {call.backend for call in calls}:
            of_backend = [call for call in calls if call.backend == backend]
            durations.update(match_durations(of_backend, list(entries_of(self._dump(backend)))))
        return durations


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


def match_durations(calls: Sequence[Handed], entries: Sequence[DumpEntry]) -> dict[int, int]:
    """Return durations by the id of the call: of the one entry that was made while the call was handed on.

    Members of a coalescing bracket share a duration. Ambiguous entries are left out, and those that may be overwritten.
    """
    kept_since = entries[0].created_ns if entries and entries[0].number else 0
    groups: dict[str, list[DumpEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    created = {group: [entry.created_ns for entry in entries_of_group] for group, entries_of_group in groups.items()}
    batches: dict[int, list[Handed]] = {}
    for call in calls:
        batches.setdefault(call.batch, []).append(call)
    durations: dict[int, int] = {}
    returned: dict[str, int] = {}  # by group: when the call before had been handed on
    for members in sorted(batches.values(), key=_launched_at):
        first, last = _launched_at(members), max(call.returned_at for call in members)
        group = members[0].group
        before = returned.get(group, 0)
        returned[group] = max(before, last)
        if group not in groups or first < kept_since or not last:
            continue
        begin, end = bisect_left(created[group], first), bisect_right(created[group], last)
        candidates = groups[group][begin:end]
        if not candidates and begin and max(before, first - _BETWEEN_HOOKS_NS) < created[group][begin - 1]:
            candidates = groups[group][begin - 1 : begin]
        if len(members) > 1:
            candidates = [entry for entry in candidates if entry.duration_ns is not None]
        if len(candidates) == 1 and candidates[0].duration_ns is not None:
            durations.update((call.id, candidates[0].duration_ns) for call in members)
    return durations


def _launched_at(members: Sequence[Handed]) -> int:
    return min(call.launched_at for call in members)
