"""Reads a dump of torch's flight recorder: the operations that a rank had enqueued, started and completed.

A dump is a pickle, or JSON where it was asked for over HTTP. A pickle can run any code while it is loaded, so only
plain containers, numbers and words are let in.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from commtrace.errors import ImportFileError
from commtrace.importers.groups import complete_list, named_group
from commtrace.importers.nccl_names import DTYPES, operation_of
from commtrace.trace.groups import Group
from commtrace.trace.inputs import MOST_RANKS, decode_json, printable, read_file

_PEERS: Final = re.compile(r"([0-9]{1,9})\s*(->|<-)\s*([0-9]{1,9})")
_LATEST_NS: Final = 2**61
_MOST_BYTES: Final = 2**47
_LARGEST_FILE: Final = 64 << 20
"""A dump holds the last 2,000 operations or so, with frames some megabytes."""
_MOST_VALUES: Final = 4_000_000
"""Of a pickle, its operations; of JSON, its values. With 60 frames each, 2,000 entries have a third of them, and none
takes much more than 100 bytes."""
_MOST_UNPACKED: Final = 256 << 20
"""Bytes of everything in it, as often as it is referred to: a pickle may hold one list in a thousand places."""
_OF_A_VALUE: Final = 64
_RANK: Final = re.compile(r"([0-9]+)(?:\.\w+)?$")


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
        num_bytes, dtype: of the tensor; −1 and None if unknown.
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
    """The dump of one rank, entries in the order in which they were enqueued; ``unreadable`` others were left out."""

    path: Path
    rank: int
    version: str
    groups: Mapping[str, Group]
    entries: Sequence[Entry]
    unreadable: int = 0

    @property
    def world_size(self) -> int:
        """At least so many ranks there are."""
        return 1 + max((rank for group in self.groups.values() for rank in group.ranks), default=self.rank)


class _PlainUnpickler(pickle.Unpickler):
    """Loads containers, numbers and words, and no object of any class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}, and a dump holds plain values only")


def _check_pickle(content: bytes) -> None:
    """Refuse a pickle that would take far more memory than its bytes, before any of it is loaded.

    Raises:
        ValueError: it has too many operations, or some that no dump has, such as those of sets.
    """
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name not in _OPERATIONS:
            raise ValueError(f"it holds {operation.name}, and a dump holds plain values only")
        if count == _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        if (
            operation.name in _STORES and int(argument or 0) > count
        ):  # a place far away would make the table of all places huge
            raise ValueError("it keeps a value where none is expected")


_STORES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_OPERATIONS: Final = frozenset({
    *_STORES, "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "PROTO", "FRAME", "STOP", "MARK",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "GLOBAL", "STACK_GLOBAL", "REDUCE",  # which end where the class is looked up, with its name
})  # fmt: skip


def _check_unpacked(loaded: Any) -> None:
    """Refuse values that would take too much memory if every reference were a separate value.

    Raises:
        ValueError: it would, or it contains itself.
    """
    room = _MOST_UNPACKED
    waiting = [loaded]
    while waiting:
        value = waiting.pop()
        inner: Sequence[Any] = ()
        if isinstance(value, dict):
            inner = [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, (str, bytes)):
            room -= len(value)
        room -= _OF_A_VALUE * (1 + len(inner))
        if room < 0:
            raise ValueError(f"it takes more than {_MOST_UNPACKED:,} bytes of memory")
        waiting += inner


def read_flight_record(path: Path) -> FlightRecord:
    """Read one dump. The rank is the number at the end of the file's name, as torch writes it.

    Raises:
        ImportFileError: it is no dump, or would load more than plain values.
    """
    match = _RANK.search(path.name)
    if not match:
        raise ImportFileError(f"{path}: the name of a dump ends with its rank, as in nccl_trace_rank_3. Rename it.")
    rank = int(match[1][-20:])
    if rank >= MOST_RANKS:
        raise ImportFileError(f"{path}: by its name it is of rank {rank}, which no job has. Rename it.")
    loaded = _load(path)
    if isinstance(loaded, list):  # torch 2.1 and 2.2: the entries alone
        loaded = {"entries": loaded}
    try:
        dump = msgspec.convert(loaded, _Dump)
        groups = _groups(dump.pg_config)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ImportFileError(f"{path} can be read, but is no dump of the flight recorder: {error}.") from error
    entries = [_entry(entry, groups) for entry in map(_described, dump.entries) if entry is not None]
    unreadable = len(dump.entries) - len(entries)
    if unreadable and not entries:
        raise ImportFileError(f"{path}: none of its {unreadable} entries is one that the flight recorder writes.")
    entries.sort(key=lambda entry: entry.created_ns)
    return FlightRecord(path, rank, printable(str(dump.version)), groups, entries, unreadable)


class _GroupInDump(msgspec.Struct):
    name: str | None = None
    desc: str | None = None
    ranks: str | list[int] | None = None


class _Dump(msgspec.Struct):
    entries: list[Any]
    version: str | int | float | None = ""
    pg_config: dict[str | int, _GroupInDump] | None = None


class _Frame(msgspec.Struct):
    name: str | None = None
    filename: str | None = None
    line: int | str | None = None


_Length = Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**61)]


class _EntryInDump(msgspec.Struct):
    """One of ``entries``; times are checked one by one, as a dump may hold some that no clock showed."""

    process_group: tuple[str | int | None, ...] | None = None
    profiling_name: str | None = None
    state: str | None = None
    is_p2p: bool | None = None
    collective_seq_id: _Number | None = None
    p2p_seq_id: _Number | None = None
    seq_id: _Number | None = None
    input_sizes: list[list[_Length]] | None = None
    output_sizes: list[list[_Length]] | None = None
    input_dtypes: list[str] | None = None
    output_dtypes: list[str] | None = None
    frames: list[_Frame] | None = None
    time_created_ns: Any = None
    time_discovered_started_ns: Any = None
    time_discovered_completed_ns: Any = None


def _described(entry: Any) -> _EntryInDump | None:
    try:
        return msgspec.convert(entry, _EntryInDump)
    except (msgspec.ValidationError, RecursionError):
        return None


def _load(path: Path) -> Any:
    try:
        content = read_file(path, _LARGEST_FILE)
    except OSError as error:
        raise ImportFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        if content[:1] in (b"{", b"["):  # a pickle begins with the number of its protocol
            if sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES:
                raise ValueError(f"it has more than {_MOST_VALUES:,} values")
            loaded: Any = decode_json(content)
        else:
            _check_pickle(content)
            loaded = _PlainUnpickler(io.BytesIO(content)).load()
        _check_unpacked(loaded)
        return loaded
    # A damaged pickle raises nearly anything: https://docs.python.org/3/library/pickle.html#pickle.UnpicklingError
    except Exception as error:
        raise ImportFileError(
            f"{path} is no dump of the flight recorder, or a damaged one ({error}). Give the files that "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE names."
        ) from error


def _groups(configured: Mapping[str | int, _GroupInDump] | None) -> dict[str, Group]:
    found = {}
    for key, one in (configured or {}).items():
        name = printable(str(key) if one.name is None else one.name)
        found[name] = named_group(name, complete_list(one.ranks), printable(one.desc or ""), "nccl")
    return found


def _entry(entry: _EntryInDump, groups: Mapping[str, Group]) -> Entry:
    name = printable(str((entry.process_group or ("",))[0]))
    group = groups.get(name)
    words = printable(entry.profiling_name or "").rpartition(":")[2]  # nccl:all_reduce, nccl:send 1->2
    is_p2p = bool(entry.is_p2p)
    dtype = next(iter(entry.input_dtypes or entry.output_dtypes or ()), None)
    operation = operation_of(words) or words or "unknown"
    completed = _time(entry.time_discovered_completed_ns)
    created = _time(entry.time_created_ns)
    return Entry(
        operation=operation,
        group=group,
        seq=(entry.p2p_seq_id if is_p2p else entry.collective_seq_id) or entry.seq_id or 0,
        peer=_peer(words, group) if is_p2p else -1,
        state=printable(entry.state or ""),
        created_ns=created or _time(entry.time_discovered_started_ns) or completed or 0,
        completed_ns=completed if created else None,
        num_bytes=_num_bytes(operation, entry, dtype),
        dtype=DTYPES.get(str(dtype), (None, 0))[0],
        is_p2p=is_p2p,
        frames=tuple(printable(f"{frame.name} {frame.filename}:{frame.line}") for frame in entry.frames or ()),
    )


def _time(value: Any) -> int | None:
    """Return a time in epoch ns; None if it is missing or impossible."""
    try:
        time = int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return None
    return time if 0 < time <= _LATEST_NS else None


def _peer(words: str, group: Group | None) -> int:
    """Return the other side's global rank, from ``send 1->2`` or ``recv 2<-1``, which count inside the group."""
    match = _PEERS.search(words)
    if not match or not group:
        return -1
    other = int(match[3])
    return group.ranks[other] if other < group.size else -1


def _num_bytes(operation: str, entry: _EntryInDump, dtype: str | None) -> int:
    sizes = entry.output_sizes if operation in ("all_gather", "recv") else entry.input_sizes
    element = DTYPES.get(str(dtype), (None, 0))[1]
    if not sizes or not element:
        return -1
    num_bytes = int(element * sum(math.prod(size) for size in sizes))
    return num_bytes if num_bytes <= _MOST_BYTES else -1
