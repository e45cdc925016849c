"""Import the dumps that torch's flight recorder writes when a collective times out, one per rank.

A dump has no device times: operations start when enqueued and end when a poll found them completed, with the timing
``unknown``. Backends without polls, as gloo, only tell which have ended (``retired``). Others are in flight. A pickle
can run any code, so only plain containers, numbers and strings are loaded.

>>> import_flight_recorder(sorted(Path("/tmp").glob("nccl_trace_rank_*")), Path("imported"))  # doctest: +SKIP
"""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Final

import msgspec

from commtrace.errors import ImportFileError
from commtrace.interchange.rows import Imported, group_rows, guessed_hosts, imported_rank, mark_row, new_run, write_rank
from commtrace.interchange.traces.nccl_calls import DTYPES, complete_list, named_group, operation_of
from commtrace.trace import schema
from commtrace.trace.inputs import MOST_RANKS, decode_json, printable, read_file
from commtrace.trace.metadata import FLIGHT_RECORDER, Group
from commtrace.trace.schema import Row

_USUAL_RANKS_PER_HOST: Final = 8
_PEERS: Final = re.compile(r"([0-9]{1,9})\s*(->|<-)\s*([0-9]{1,9})")
_LATEST_NS: Final = 2**61
_MOST_BYTES: Final = 2**47
_LARGEST_FILE: Final = 64 << 20
"""A dump holds about the last 2,000 operations: some megabytes with frames."""
_MOST_VALUES: Final = 4_000_000
"""Operations of a pickle, values of JSON: about 100 bytes each. 2,000 entries with 60 frames have a third of them."""
_MOST_UNPACKED: Final = 256 << 20
"""Bytes if every reference were a value of its own: a pickle may hold one list in a thousand places."""
_BYTES_PER_VALUE: Final = 64
_RANK: Final = re.compile(r"([0-9]+)(?:\.\w+)?$")
_USUAL_BACKEND: Final = "nccl"
_DEFAULT_GROUP: Final = "default_pg"


def import_flight_recorder(
    files: Sequence[Path],
    output: Path,
    *,
    ranks_per_host: int = 0,
    on_file: Callable[[Path], None] = lambda path: None,
) -> Imported:
    """Make a run from the dumps of a job, one file per rank.

    Args:
        ranks_per_host: number of consecutive ranks that share a clock; 0 for 8.
        on_file: called with each file before it is read.

    Raises:
        ImportFileError: a file cannot be used; the message says which and why.
        ConfigurationError: ``output`` holds a run.
    """
    run_id, session = new_run(output)
    read: dict[int, FlightRecord] = {}
    for path in files:
        on_file(path)
        record = read_flight_record(path)
        if record.rank in read:
            raise ImportFileError(f"{read[record.rank].path} and {path} are both of rank {record.rank}.")
        read[record.rank] = record
    records = {record.rank: record for record in with_members(read.values())}
    world_size = max(record.world_size for record in records.values())
    num_spans = 0
    guess = guessed_hosts("dumps") if len(records) > 1 and not ranks_per_host else None
    for rank, record in sorted(records.items()):
        per_host = ranks_per_host or _USUAL_RANKS_PER_HOST
        metadata = imported_rank(
            rank,
            world_size,
            session=session,
            run_id=run_id,
            source=FLIGHT_RECORDER,
            node=f"host{rank // per_host}",
            local_rank=rank % per_host,
            backend=record.backend,
            versions={"flight recorder": record.version},
        )
        problems = [guess.mark] if guess and rank == min(records) else []
        if record.unreadable:
            message = f"{record.unreadable} damaged entries of {record.path.name} were left out."
            problems.append(mark_row("problem", {"message": message}))
        in_flight = [_in_flight(entry, seq) for entry, seq, _ in _numbered(record) if not entry.has_ended]
        marks = [*group_rows(record.groups.values()), *problems, mark_row("in_flight", in_flight)]
        # A rank that wrote a dump lived: nothing says how it ended.
        num_spans += write_rank(output, metadata, _rows(record), marks, closed=False)
    return Imported(len(records), num_spans, (guess.note,) if guess else ())


def _numbered(record: FlightRecord) -> Iterator[tuple[FlightEntry, int, int]]:
    """Yield each entry with its number in its group, or between its pair of ranks, and its place among those of it."""
    messages = Counter[tuple[int, int, int]]()
    places = Counter[tuple[int, int]]()
    for entry in record.entries:
        group = entry.group.id if entry.group else -1
        if entry.is_p2p:  # the recorder counts all messages of a rank; commtrace counts those of each pair
            sender, receiver = record.rank, entry.peer
            if entry.operation == "recv":
                sender, receiver = receiver, sender
            yield entry, messages[group, sender, receiver], 0
            messages[group, sender, receiver] += 1
        else:
            yield entry, entry.seq, places[group, entry.seq]
            places[group, entry.seq] += 1


def _rows(record: FlightRecord) -> Iterator[Row]:
    for number, (entry, seq, op_in_seq) in enumerate(_numbered(record)):
        yield Row(
            schema.P2P if entry.is_p2p else schema.COLLECTIVE,
            entry.operation,
            schema.COMMUNICATION,
            entry.created_ns,
            max(entry.created_ns, entry.completed_ns or 0) if entry.has_ended else entry.created_ns,
            group=entry.group.id if entry.group else -1,
            seq=seq,
            op_in_seq=op_in_seq,
            bytes=entry.num_bytes,
            dtype=entry.dtype,
            peer=entry.peer,
            is_async=True,
            id=number,
            timing=schema.UNKNOWN_TIMING,
            end_exact=False,
            detail=_detail(entry),
        )


def _detail(entry: FlightEntry) -> str:
    detail: dict[str, object] = {"state": entry.state}
    if not entry.has_ended or entry.completed_ns is None:
        detail["unfinished"] = True
    if entry.frames:
        detail["frames"] = list(entry.frames)
    return json.dumps(detail)


def _in_flight(entry: FlightEntry, seq: int) -> dict[str, object]:
    return {
        "operation": entry.operation,
        "group": entry.group.id if entry.group else -1,
        "seq": seq,
        "peer": entry.peer,
        "bytes": entry.num_bytes,
        "dtype": entry.dtype,
        "start": entry.created_ns,
        "state": entry.state,
    }


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """An operation that was enqueued."""

    operation: str
    group: Group | None  # None if the dump does not list its members
    seq: int  # per group for collectives, per rank for p2p
    peer: int  # global rank; −1 for collectives
    state: str  # scheduled, started, completed or retired; empty if in flight and the backend does not say more
    created_ns: int  # epoch, when enqueued
    completed_ns: int | None  # epoch, when a poll found it completed: an upper bound
    num_bytes: int  # −1 if unknown
    dtype: str | None
    is_p2p: bool
    group_name: str = ""
    group_description: str = ""
    backend: str = ""
    is_retired: bool = False  # the recorder has seen it end
    frames: tuple[str, ...] = ()  # of the callers, innermost first
    peer_in_group: int = -1  # of messages
    is_timed: bool = True  # the dump says when it was enqueued
    group_size: int = 0  # as the sizes of its tensors show it; 0 if they do not

    @property
    def has_ended(self) -> bool:
        return self.is_retired or self.state == "completed"


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The dump of one rank, entries in the order of creation; ``unreadable`` counts those left out."""

    path: Path
    rank: int
    version: str
    groups: Mapping[str, Group]
    entries: Sequence[FlightEntry]
    unreadable: int = 0

    @property
    def world_size(self) -> int:
        """Return the least number of ranks that the dump implies."""
        return 1 + max((rank for group in self.groups.values() for rank in group.ranks), default=self.rank)

    @property
    def backend(self) -> str:
        """Return the backend of most operations."""
        counts = Counter(entry.backend for entry in self.entries if entry.backend)
        return max(counts, key=counts.__getitem__, default=_USUAL_BACKEND)


def with_members(records: Iterable[FlightRecord]) -> list[FlightRecord]:
    """Return the dumps of a job with the members of groups that no dump lists, as those of gloo: by their names.

    Members are the ranks whose dumps name the group; of the default group, all ranks up to the highest that is known,
    by a dump, by a message to it, or by the size of a gathered tensor: ranks that died have no dump.
    """
    records = list(records)
    listed = {name: group for record in records for name, group in record.groups.items() if group.ranks}
    world_size = max((record.world_size for record in records), default=0)
    in_world = [entry for record in records for entry in record.entries if entry.group_description == _DEFAULT_GROUP]
    world_size = max([world_size, *(max(entry.group_size, entry.peer_in_group + 1) for entry in in_world)])
    world_size = min(world_size, MOST_RANKS)
    members: dict[str, set[int]] = defaultdict(set)
    first: dict[str, FlightEntry] = {}
    for record in records:
        for entry in record.entries:
            if entry.group is None and entry.group_name not in listed:
                members[entry.group_name].add(record.rank)
                first.setdefault(entry.group_name, entry)
    for name, entry in first.items():
        if entry.group_description == _DEFAULT_GROUP:
            members[name].update(range(world_size))
        ranks = tuple(sorted(members[name]))
        listed[name] = named_group(name, ranks, entry.group_description, entry.backend or _USUAL_BACKEND)
    return [
        replace(
            record,
            groups={
                **record.groups,
                **{name: listed[name] for name in dict.fromkeys(entry.group_name for entry in record.entries)},
            },
            entries=[_with_group(entry, listed[entry.group_name]) for entry in record.entries],
        )
        for record in records
    ]


def _with_group(entry: FlightEntry, group: Group) -> FlightEntry:
    if entry.group is not None:
        return entry
    peer = group.ranks[entry.peer_in_group] if 0 <= entry.peer_in_group < group.size else -1
    return replace(entry, group=group, peer=peer)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, but a dump holds only plain values")


def _check_pickle(content: bytes) -> None:
    """Raise ValueError for a pickle that would take far more memory than its bytes, or is no dump."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name not in _OPERATIONS:
            raise ValueError(f"it holds {operation.name}, but a dump holds only plain values")
        if count == _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        # A far position would make the unpickler's table of stored values huge.
        if operation.name in _STORES and int(argument or 0) > count:
            raise ValueError("it stores a value at an impossible position")


_STORES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_OPERATIONS: Final = frozenset({
    *_STORES, "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "PROTO", "FRAME", "STOP", "MARK",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "GLOBAL", "STACK_GLOBAL", "REDUCE",  # refused by find_class, whose message names the class
})  # fmt: skip


def _check_unpacked(loaded: object) -> None:
    """Raise ValueError for values that contain themselves, or would take too much memory without shared references."""
    room = _MOST_UNPACKED
    waiting = [loaded]
    while waiting:
        value = waiting.pop()
        inner: Sequence[object] = ()
        if isinstance(value, dict):
            inner = [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, (str, bytes)):
            room -= len(value)
        room -= _BYTES_PER_VALUE * (1 + len(inner))
        if room < 0:
            raise ValueError(f"it takes more than {_MOST_UNPACKED:,} bytes of memory")
        waiting += inner


def read_flight_record(path: Path) -> FlightRecord:
    """Read one dump, whose file name ends with its rank; raise ImportFileError if it is none."""
    match = _RANK.search(path.name)
    if not match:
        raise ImportFileError(f"{path}: the name of a dump must end with its rank, as in nccl_trace_rank_3. Rename it.")
    rank = int(match[1][-20:])
    if rank >= MOST_RANKS:
        raise ImportFileError(f"{path}: rank {rank} in its name is out of range. Rename it.")
    loaded = _load(path)
    if isinstance(loaded, list):  # torch 2.1 and 2.2: the entries alone
        loaded = {"entries": loaded}
    try:
        dump = msgspec.convert(loaded, _Dump)
        groups = _groups(dump.pg_config)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ImportFileError(f"{path} is not a dump of the flight recorder: {error}.") from error
    described = [entry for entry in map(_described, dump.entries) if entry is not None]
    # gloo leaves all in the first state, and its dumps have no times but those of the calls.
    tells_states = any(entry.state not in (None, "scheduled") for entry in described) or not any(
        entry.retired for entry in described
    )
    entries = [_entry(entry, groups, tells_states=tells_states) for entry in described]
    unreadable = len(dump.entries) - len(entries)
    if unreadable and not entries:
        raise ImportFileError(f"{path}: all of its {unreadable} entries are damaged.")
    entries.sort(key=lambda entry: entry.created_ns)
    # Where no poll saw when an operation ended, as with gloo, it did so before the dump, whose latest time is this.
    latest_ns = max((max(entry.created_ns, entry.completed_ns or 0) for entry in entries), default=0)
    entries = [
        replace(entry, completed_ns=latest_ns)
        if entry.has_ended and entry.completed_ns is None and entry.is_timed
        else entry
        for entry in entries
    ]
    return FlightRecord(path, rank, printable(str(dump.version)), groups, entries, unreadable)


class _GroupInDump(msgspec.Struct):
    name: str | None = None
    desc: str | None = None
    ranks: str | list[int] | None = None


class _Dump(msgspec.Struct):
    entries: list[object]
    version: str | int | float | None = ""
    pg_config: dict[str | int, _GroupInDump] | None = None


class _Frame(msgspec.Struct):
    name: str | None = None
    filename: str | None = None
    line: int | str | None = None


_Length = Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**61)]


class _EntryInDump(msgspec.Struct):
    process_group: tuple[str | int | None, ...] | None = None
    profiling_name: str | None = None
    state: str | None = None
    is_p2p: bool | None = None
    retired: bool | None = None
    collective_seq_id: _Number | None = None
    p2p_seq_id: _Number | None = None
    seq_id: _Number | None = None
    input_sizes: list[list[_Length]] | None = None
    output_sizes: list[list[_Length]] | None = None
    input_dtypes: list[str] | None = None
    output_dtypes: list[str] | None = None
    frames: list[_Frame] | None = None
    time_created_ns: object = None
    time_discovered_started_ns: object = None
    time_discovered_completed_ns: object = None


def _described(entry: object) -> _EntryInDump | None:
    try:
        return msgspec.convert(entry, _EntryInDump)
    except (msgspec.ValidationError, RecursionError, UnicodeError):  # half of a surrogate pair in a name
        return None


def _load(path: Path) -> object:
    try:
        content = read_file(path, _LARGEST_FILE)
    except OSError as error:
        raise ImportFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        if content[:1] in (b"{", b"["):  # a pickle begins with the number of its protocol
            if sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES:
                raise ValueError(f"it has more than {_MOST_VALUES:,} values")
            loaded: object = decode_json(content)
        else:
            _check_pickle(content)
            loaded = _PlainUnpickler(io.BytesIO(content)).load()
        _check_unpacked(loaded)
        return loaded
    # A damaged pickle raises nearly anything: https://docs.python.org/3/library/pickle.html#pickle.UnpicklingError
    except Exception as error:
        raise ImportFileError(
            f"{path} is damaged, or not a dump of the flight recorder ({error}). Give the files that "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE names."
        ) from error


def _groups(configured: Mapping[str | int, _GroupInDump] | None) -> dict[str, Group]:
    groups = {}
    for key, configured_group in (configured or {}).items():
        name = printable(str(key) if configured_group.name is None else configured_group.name)
        ranks = complete_list(configured_group.ranks)
        if ranks:  # gloo lists a group without a name and without members
            groups[name] = named_group(name, ranks, printable(configured_group.desc or ""), _USUAL_BACKEND)
    return groups


def _entry(entry: _EntryInDump, groups: Mapping[str, Group], *, tells_states: bool) -> FlightEntry:
    name, description = (printable(str(word)) for word in (*(entry.process_group or ()), "", "")[:2])
    group = groups.get(name)
    # nccl:all_reduce, nccl:send 1->2
    backend, _, words = printable(entry.profiling_name or "").rpartition(":")
    is_retired = bool(entry.retired)
    state = printable(entry.state or "")
    if not tells_states or (is_retired and state != "completed"):
        state = "retired" if is_retired else ""
    is_p2p = bool(entry.is_p2p)
    dtype = next(iter(entry.input_dtypes or entry.output_dtypes or ()), None)
    operation = operation_of(words) or words or "unknown"
    completed = _time(entry.time_discovered_completed_ns)
    created = _time(entry.time_created_ns)
    return FlightEntry(
        operation=operation,
        group=group,
        seq=(entry.p2p_seq_id if is_p2p else entry.collective_seq_id) or entry.seq_id or 0,
        peer=_peer(words, group) if is_p2p else -1,
        state=state,
        created_ns=created or _time(entry.time_discovered_started_ns) or completed or 0,
        completed_ns=completed if created else None,
        num_bytes=_num_bytes(operation, entry, dtype),
        dtype=DTYPES.get(str(dtype), (None, 0))[0],
        is_p2p=is_p2p,
        group_name=name,
        group_description=description,
        backend=backend,
        is_retired=is_retired,
        peer_in_group=_peer_in_group(words) if is_p2p else -1,
        is_timed=bool(created),
        group_size=_group_size(operation, entry),
        frames=tuple(printable(f"{frame.name} {frame.filename}:{frame.line}") for frame in entry.frames or ()),
    )


def _time(value: object) -> int | None:
    try:
        time = int(value or 0) if isinstance(value, (int, float, str, NoneType)) else 0
    except (TypeError, ValueError, OverflowError):
        return None
    return time if 0 < time <= _LATEST_NS else None


def _peer(words: str, group: Group | None) -> int:
    """Return the global rank of the peer of a message."""
    peer = _peer_in_group(words)
    return group.ranks[peer] if group and 0 <= peer < group.size else -1


def _peer_in_group(words: str) -> int:
    """Return the peer's rank in the group from ``send 1->2`` or ``recv 2<-1``; −1 without one."""
    match = _PEERS.search(words)
    return int(match[3]) if match else -1


def _group_size(operation: str, entry: _EntryInDump) -> int:
    """Return the number of members by the tensors of all and of one of them; 0 if these do not show it."""
    of_one, of_all = entry.input_sizes or [], entry.output_sizes or []
    if operation == "reduce_scatter":
        of_one, of_all = of_all, of_one
    elif operation != "all_gather":
        return 0
    if len(of_all) > len(of_one) > 0:  # a tensor for each member
        return len(of_all) // len(of_one)
    elements_of_one, elements_of_all = (sum(math.prod(size) for size in sizes) for sizes in (of_one, of_all))
    return elements_of_all // elements_of_one if elements_of_one and elements_of_all % elements_of_one == 0 else 0


def _num_bytes(operation: str, entry: _EntryInDump, dtype: str | None) -> int:
    sizes = entry.output_sizes if operation in ("all_gather", "recv") else entry.input_sizes
    element = DTYPES.get(str(dtype), (None, 0))[1]
    if not sizes or not element:
        return -1
    num_bytes = int(element * sum(math.prod(size) for size in sizes))
    return num_bytes if num_bytes <= _MOST_BYTES else -1
