"""Reads a dump of torch's flight recorder: what a rank had enqueued, started and completed when it hung or died.

A dump is a pickle, or JSON where it was asked for over HTTP. A pickle can run any code while it is loaded, so only
plain containers, numbers and words are let in.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from commtrace.errors import ImportFileError
from commtrace.importers.groups import complete_list, named_group
from commtrace.importers.nccl_words import DTYPES, operation_of
from commtrace.trace.groups import Group

_PEERS: Final = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")
_TIMES: Final = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
_LATEST_NS: Final = 2**62
_RANK: Final = re.compile(r"(\d+)(?:\.\w+)?$")


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation that was enqueued.

    Attributes:
        operation: ``all_reduce``, ``send``, …
        group: the process group; None where the dump does not tell its members.
        seq: of the group, for collectives; for point-to-point operations the recorder's own count.
        peer: global rank of the other side; −1 for collectives.
        state: ``scheduled``, ``started`` or ``completed``.
        created_ns: epoch ns at which it was enqueued.
        completed_ns: epoch ns at which a poll found it completed: later than it was. None if none did, or if it is not
            known when it was enqueued.
        num_bytes, dtype: of the tensor; −1 and None where it is not told.
        frames: where in the program, innermost first: name, file and line.
    """

    operation: str
    group: Group | None
    seq: int
    peer: int
    state: str
    created_ns: int
    completed_ns: int | None
    num_bytes: int
    dtype: str | None
    is_p2p: bool
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The dump of one rank, entries in the order in which they were enqueued."""

    path: Path
    rank: int
    version: str
    groups: Mapping[str, Group]
    entries: Sequence[Entry]

    @property
    def world_size(self) -> int:
        """At least so many ranks there are."""
        return 1 + max((rank for group in self.groups.values() for rank in group.ranks), default=self.rank)


class _PlainUnpickler(pickle.Unpickler):
    """Loads containers, numbers and words, and no object of any class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}, and a dump holds plain values only")


def read_flight_record(path: Path) -> FlightRecord:
    """Read one dump. The rank is the number at the end of the file's name, as torch writes it.

    Raises:
        ImportFileError: it is no dump, or would load more than plain values.
    """
    match = _RANK.search(path.name)
    if not match:
        raise ImportFileError(f"{path}: the name of a dump ends with its rank, as in nccl_trace_rank_3. Rename it.")
    loaded = _load(path)
    if isinstance(loaded, list) and all(
        isinstance(entry, dict) for entry in loaded
    ):  # torch 2.1 and 2.2: the entries alone
        loaded = {"entries": loaded}
    if not isinstance(loaded, dict) or not isinstance(loaded.get("entries"), list):
        raise ImportFileError(f"{path} can be read, but is no dump of the flight recorder: it has no list of entries.")
    rank = int(match[1])
    groups = _groups(loaded)
    entries = [_entry(entry, groups) for entry in loaded["entries"] if isinstance(entry, dict)]
    entries.sort(key=lambda entry: entry.created_ns)
    return FlightRecord(path, rank, str(loaded.get("version", "")), groups, entries)


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            is_json = file.read(1) in (b"{", b"[")  # a pickle begins with the number of its protocol
            file.seek(0)
            return json.load(file) if is_json else _PlainUnpickler(file).load()
    except OSError as error:
        raise ImportFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    # A damaged pickle raises nearly anything: https://docs.python.org/3/library/pickle.html#pickle.UnpicklingError
    except Exception as error:
        raise ImportFileError(
            f"{path} is no dump of the flight recorder, or a damaged one ({error}). Give the files that "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE names."
        ) from error


def _groups(loaded: Mapping[str, Any]) -> dict[str, Group]:
    configured = loaded.get("pg_config")
    found = {}
    for key, one in configured.items() if isinstance(configured, dict) else ():
        name = str(one.get("name", key))
        found[name] = named_group(name, complete_list(one.get("ranks")), str(one.get("desc", "")), "nccl")
    return found


def _entry(entry: Mapping[str, Any], groups: Mapping[str, Group]) -> Entry:
    name = str((entry.get("process_group") or ("",))[0])
    group = groups.get(name)
    words = str(entry.get("profiling_name") or "").rpartition(":")[2]  # nccl:all_reduce, nccl:send 1->2
    is_p2p = bool(entry.get("is_p2p"))
    dtype = next(iter(_list(entry.get("input_dtypes")) or _list(entry.get("output_dtypes"))), None)
    operation = operation_of(words) or words or "unknown"
    return Entry(
        operation=operation,
        group=group,
        seq=int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id") or entry.get("seq_id") or 0),
        peer=_peer(words, group) if is_p2p else -1,
        state=str(entry.get("state", "")),
        created_ns=next(filter(None, (_time(entry, name) for name in _TIMES)), 0),
        completed_ns=_time(entry, "time_discovered_completed_ns") if _time(entry, "time_created_ns") else None,
        num_bytes=_num_bytes(operation, entry, dtype),
        dtype=DTYPES.get(str(dtype), (None, 0))[0],
        is_p2p=is_p2p,
        frames=tuple(
            f"{frame.get('name')} {frame.get('filename')}:{frame.get('line')}" for frame in _list(entry.get("frames"))
        ),
    )


def _time(entry: Mapping[str, Any], name: str) -> int | None:
    """Epoch ns; None where there is none, or nothing that a clock could show."""
    try:
        time = int(entry.get(name) or 0)
    except (TypeError, ValueError, OverflowError):
        return None
    return time if 0 < time <= _LATEST_NS else None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _peer(words: str, group: Group | None) -> int:
    """The other side's global rank, from ``send 1->2`` or ``recv 2<-1``, which count inside the group."""
    match = _PEERS.search(words)
    if not match or not group:
        return -1
    other = int(match[3])
    return group.ranks[other] if other < group.size else -1


def _num_bytes(operation: str, entry: Mapping[str, Any], dtype: Any) -> int:
    sizes = _list(entry.get("output_sizes" if operation in ("all_gather", "recv") else "input_sizes"))
    element = DTYPES.get(str(dtype), (None, 0))[1]
    if not sizes or not element:
        return -1
    return int(element * sum(math.prod(_list(size)) for size in sizes))
