"""Find the durations of NCCL operations in torch's flight recorder (``TORCH_NCCL_ENABLE_TIMING=1``).

A dump takes 32 µs per entry, with the GIL held, so it is for steps in detail.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from commtrace.capture.collectives.nccl import LEGACY
from commtrace.capture.records import DeviceCall

_ENTRIES: Final = '"entries":['
_BETWEEN_HOOKS_NS: Final = 1_000_000
"""At most so long before our hook torch's own one makes its entry."""
_ENTRIES_BETWEEN_YIELDS: Final = 64
_NANOSECONDS_PER_MILLISECOND: Final = 1_000_000


class Entry(NamedTuple):
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
            found.update(match(own, list(entries_of(self._dump(backend)))))
        return found


def dump_of(backend: str) -> bytes:
    """Return a backend's flight recorder as JSON; empty where this torch has no such function."""
    import torch

    c10d: Any = torch._C._distributed_c10d
    # The old backend keeps a recorder of its own. The others are recorded by torch's hook, by the backend's name.
    if backend != LEGACY.name:
        return bytes(c10d._dump_fr_trace_json(True, False, backend))
    return bytes(c10d._dump_nccl_trace_json(True, False)) if hasattr(c10d, "_dump_nccl_trace_json") else b""


def entries_of(dump: bytes) -> Iterator[Entry]:
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
        yield Entry(
            int(entry["record_id"]),
            str(entry["process_group"][0]),
            int(entry["time_created_ns"]),
            None if duration is None else round(duration * _NANOSECONDS_PER_MILLISECOND),
        )
        count += 1
        if count % _ENTRIES_BETWEEN_YIELDS == 0:
            time.sleep(0)


def match(calls: Sequence[DeviceCall], entries: Sequence[Entry]) -> dict[int, int]:
    """Return durations by the id of the call: of the one entry that was made while the call was handed on.

    Members of a coalescing bracket share a duration. Ambiguous entries are left out, and those that may be overwritten.
    """
    kept_since = entries[0].created_ns if entries and entries[0].number else 0
    groups: dict[str, list[Entry]] = {}
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
