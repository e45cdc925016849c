"""Import the JSON lines that NCCL Inspector and RCCL Inspector write (``commtrace import inspector``).

A line has an operation of one rank and the duration of its kernel, which includes waiting. Only verbose lines
(``NCCL_INSPECTOR_DUMP_VERBOSE=1``) have times; only then ranks can be matched, and wait separated from transfer.

>>> import_inspector([Path("nccl-inspector-4711")], Path("imported"))          # doctest: +SKIP
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from commtrace.errors import ImportFileError
from commtrace.interchange.dumps.inspector_lines import (
    UNNAMED,
    DamagedLine,
    DumpStatistics,
    InspectorHeader,
    InspectorMessage,
    InspectorProcess,
    Record,
    read_records,
)
from commtrace.interchange.rows import Imported, group_rows, imported_rank, mark_row, new_run, write_rank
from commtrace.interchange.traces.nccl_calls import role_of
from commtrace.trace import schema
from commtrace.trace.inputs import printable
from commtrace.trace.metadata import Group, group_id
from commtrace.trace.schema import Row

_FILE: Final = re.compile(r"\.(log|jsonl)(\.[0-9]+)?(\.gz)?$")
"""Also of a file that logrotate has numbered."""
_MOST_SAMPLES: Final = 1_000_000
_MOST_BYTES: Final = 2**47
_NS_PER_US: Final = 1_000
_NUMBER_AT_THE_END: Final = re.compile(r"[\s_:.-]*[0-9]+$")
_LARGEST_ORDINAL: Final = 2**31

_OPERATIONS: Final = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "Send": "send",
    "Recv": "recv",
}
"""Others keep their names, with unknown bytes: one buffer of All2All or AllGatherV does not say how much was moved."""

_SHARDS: Final = frozenset({"all_gather", "reduce_scatter"})
"""The file has the bytes of one rank's shard."""


class _FutureRank(NamedTuple):
    """A future rank: a process, or one device of a process that drives several."""

    process: InspectorProcess
    device: int  # rank in the communicators of this device; −1 of a process with one


class _InspectorOperation(NamedTuple):
    communicator: str
    name: str
    number: int
    peer: int  # rank in the communicator; −1 of collectives
    start: int
    end: int
    num_bytes: int
    timing: int


@dataclass(slots=True)
class _Communicator:
    """A communicator, as the first pass over the files finds it."""

    size: int
    name: str
    members: dict[int, InspectorProcess] = field(default_factory=dict)  # with lines, by rank in the communicator
    # of collectives: number, occurrence, operation; equal on all members
    numbers: set[tuple[int, int, str]] = field(default_factory=set)
    messages: dict[int, tuple[int, int]] = field(default_factory=dict)  # by member: count and highest number
    dropped: dict[int, int] = field(default_factory=dict)  # by member: records overwritten before they were written

    @property
    def counts_messages(self) -> bool:
        """Return whether the files hold all messages, so that the n-th send of a pair is that of the n-th receive."""
        return all(count == highest for count, highest in self.messages.values())

    @property
    def missing(self) -> int:
        """Count the numbers of collectives, between the first and the last of each operation, that no member has."""
        numbers: dict[str, set[int]] = {}
        for number, _, name in self.numbers:
            numbers.setdefault(name, set()).add(number)
        return sum(max(known) - min(known) + 1 - len(known) for known in numbers.values())


@dataclass(slots=True)
class _Survey:
    communicators: dict[str, _Communicator] = field(default_factory=dict)
    processes: dict[InspectorProcess, list[Path]] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    # by file: number of damaged lines, and the first reason
    unreadable: dict[Path, tuple[int, str]] = field(default_factory=dict)
    foreign: list[Path] = field(default_factory=list)  # files in given folders without a line of the plugin
    copies: dict[Path, Path] = field(default_factory=dict)  # files that begin as another one does, which is read
    timed: int = 0  # operations with times
    untimed: int = 0
    by_cpu: int = 0  # operations with durations measured on the host
    slack_us: list[int] = field(default_factory=list)

    @property
    def has_times(self) -> bool:
        return not self.untimed

    def damaged(self, path: Path, why: str) -> None:
        count, first = self.unreadable.get(path, (0, why))
        self.unreadable[path] = (count + 1, first)


class _Ranks(NamedTuple):
    """The global ranks of the members."""

    of: Mapping[_FutureRank, int]
    world_size: int
    are_known: bool  # a communicator of all members gives the ranks of the job
    several: frozenset[InspectorProcess]  # processes with several devices

    def member(self, communicator: _Communicator, rank: int) -> _FutureRank | None:
        process = communicator.members.get(rank)
        return None if process is None else _FutureRank(process, rank if process in self.several else -1)


def import_inspector(
    files: Sequence[Path], output: Path, *, on_file: Callable[[Path], None] = lambda path: None
) -> Imported:
    """Make a run from ``HOST-pidPID.log`` and the like, plain or gzip, or folders that hold them.

    Args:
        on_file: called with each file before it is read.

    Raises:
        ImportFileError: a file cannot be used; the message says which and why.
        ConfigurationError: ``output`` holds a run.
    """
    run_id, session = new_run(output)
    survey = _survey(_in_folders(files), on_file)
    ranks = _ranks(survey)
    groups = _groups(survey, ranks)
    limits, gaps = tuple(_limits(survey, ranks)), tuple(_gaps(survey, groups))
    places = {
        name: {key: at for at, key in enumerate(sorted(communicator.numbers))}
        for name, communicator in survey.communicators.items()
    }
    local_ranks = Counter[str]()
    num_spans = 0
    for member, rank in sorted(ranks.of.items(), key=lambda item: item[1]):
        host = printable(member.process.host)
        metadata = imported_rank(
            rank,
            ranks.world_size,
            session=session,
            run_id=run_id,
            source="nccl-inspector",
            node=host,
            local_rank=local_ranks[host],
            backend="nccl",
            versions={"inspector format": ", ".join(sorted(survey.versions))},
        )
        local_ranks[host] += 1
        operations = sorted(_operations(member, survey), key=lambda operation: (operation.end, operation.start))
        rows = _InspectorRows(survey, ranks, groups, places)
        spans = rows.of(operations)
        marks = [*group_rows(rows.groups.values())]
        if not survey.has_times:
            marks.append(mark_row("topology", {"without_times": True}))
        if rank == min(ranks.of.values()):
            marks += [mark_row("problem", {"message": limit, "is_limit": True}) for limit in limits]
            marks += [mark_row("problem", {"message": gap}) for gap in gaps]
        num_spans += write_rank(output, metadata, spans, marks)
    return Imported(len(ranks.of), num_spans, (*limits, *gaps))


def _in_folders(files: Sequence[Path]) -> dict[Path, bool]:
    """Return the files; False for those in folders, which may be logs of other programs."""
    files_given: dict[Path, bool] = {}
    for path in files:
        if not path.is_dir():
            files_given[path] = True
            continue
        inside = sorted(file for file in path.rglob("*") if _FILE.search(file.name) and file.is_file())
        if not inside:
            raise ImportFileError(
                f"{path} holds no .log or .jsonl; give the folder that NCCL_INSPECTOR_DUMP_DIR names. With "
                "NCCL_INSPECTOR_PROM_DUMP=1 the plugin writes metrics instead, which cannot be imported."
            )
        for file in inside:
            files_given.setdefault(file, False)
    return files_given


def _survey(files: Mapping[Path, bool], on_file: Callable[[Path], None]) -> _Survey:
    survey = _Survey()
    seen = Counter[tuple[str, int, str, int]]()
    beginnings: dict[Record, Path] = {}
    for path, is_given in files.items():
        on_file(path)
        before = survey.timed + survey.untimed
        for record in read_records(path):
            if isinstance(record, DamagedLine):
                survey.damaged(path, record.reason)
            elif isinstance(record, DumpStatistics):
                _add_drops(survey, record.header, record.dropped)
            else:
                is_first = survey.timed + survey.untimed == before
                if is_first and beginnings.setdefault(record, path) != path:
                    survey.copies[path] = beginnings[record]
                    break
                _add(survey, record, path, seen)
        if path in survey.copies or survey.timed + survey.untimed > before:
            continue
        lines, why = survey.unreadable.pop(path, (0, ""))
        if is_given:
            reason = f"none of its {lines} lines can be read ({why})" if lines else "it holds no operation"
            raise ImportFileError(f"{path} is no output of NCCL Inspector or RCCL Inspector: {reason}.")
        if lines:
            survey.foreign.append(path)
    if not survey.processes:
        raise ImportFileError(
            "The files hold no operations. The plugin writes those of 8 KiB and more that have GPU timing, see "
            "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES and NCCL_INSPECTOR_REQUIRE_KERNEL_TIMING."
        )
    return survey


def _add(survey: _Survey, record: Record, path: Path, seen: Counter[tuple[str, int, str, int]]) -> None:
    process, header, perf = record.process, record.header, record.perf
    communicator = survey.communicators.setdefault(header.id, _Communicator(header.n_ranks, header.comm_name))
    if communicator.size != header.n_ranks:
        raise ImportFileError(
            f"{path}: communicator {printable(header.id)} has {header.n_ranks} ranks, but {communicator.size} in other "
            "lines. Give the files of one job."
        )
    known = communicator.members.setdefault(header.rank, process)
    if known != process:
        raise ImportFileError(
            f"{path}: rank {header.rank} of communicator {printable(header.id)} is process {process.pid} on "
            f"{printable(process.host)}, and in other lines {known.pid} on {printable(known.host)}. Give the files of "
            "one job."
        )
    files = survey.processes.setdefault(process, [])
    if path not in files:
        files.append(path)
    survey.versions.add(printable(record.metadata.inspector_output_format_version) or "unknown")
    survey.by_cpu += perf.timing_source.endswith("_cpu")
    if record.end_us:
        survey.timed += 1
        if len(survey.slack_us) < _MOST_SAMPLES:
            survey.slack_us.append(record.slack_us)
    else:
        survey.untimed += 1
    if isinstance(perf, InspectorMessage):
        count, highest = communicator.messages.get(header.rank, (0, 0))
        communicator.messages[header.rank] = (count + 1, max(highest, perf.sn))
    else:
        key = (header.id, header.rank, perf.operation, perf.sn)
        communicator.numbers.add((perf.sn, seen[key], perf.operation))
        seen[key] += 1


def _add_drops(survey: _Survey, header: InspectorHeader, dropped: int) -> None:
    communicator = survey.communicators.setdefault(header.id, _Communicator(header.n_ranks, header.comm_name))
    communicator.dropped[header.rank] = max(communicator.dropped.get(header.rank, 0), dropped)


def _ranks(survey: _Survey) -> _Ranks:
    """Number the members: by the largest communicator that all belong to, else by host and process."""
    devices: dict[InspectorProcess, set[tuple[int, ...]]] = {}
    for communicator in survey.communicators.values():
        ranks_of_process: dict[InspectorProcess, list[int]] = {}
        for rank, process in sorted(communicator.members.items()):
            ranks_of_process.setdefault(process, []).append(rank)
        for process, ranks in ranks_of_process.items():
            devices.setdefault(process, set()).add(tuple(ranks))
    several = frozenset(
        process for process, ranks_of_devices in devices.items() if any(len(ranks) > 1 for ranks in ranks_of_devices)
    )
    for process in several:
        if len(devices[process]) > 1:
            raise ImportFileError(
                f"Process {process.pid} on {printable(process.host)} drives several devices, whose ranks differ "
                "between communicators: the lines do not say which device is which."
            )
    unnumbered = _Ranks({}, 0, False, several)
    members = {
        member
        for communicator in survey.communicators.values()
        for rank in communicator.members
        if (member := unnumbered.member(communicator, rank)) is not None
    }
    world = max(
        (communicator for communicator in survey.communicators.values() if len(communicator.members) == len(members)),
        key=lambda communicator: communicator.size,
        default=None,
    )
    if world is None:
        numbered = {member: rank for rank, member in enumerate(sorted(members))}
        return unnumbered._replace(of=numbered, world_size=len(numbered))
    known = {member: rank for rank in world.members if (member := unnumbered.member(world, rank)) is not None}
    return _Ranks(known, world.size, True, several)


def _groups(survey: _Survey, ranks: _Ranks) -> dict[str, Group]:
    groups = {}
    for name, communicator in survey.communicators.items():
        members = [ranks.of[member] for rank in communicator.members if (member := ranks.member(communicator, rank))]
        if ranks.are_known and communicator.size == ranks.world_size:
            members = [*range(ranks.world_size)]
        if len(members) != communicator.size:
            continue
        ordinal = zlib.crc32(name.encode()) % _LARGEST_ORDINAL
        named = _NUMBER_AT_THE_END.sub("", communicator.name) if communicator.name != UNNAMED else ""
        is_world = not named and ranks.are_known and communicator.size == ranks.world_size
        groups[name] = Group(
            group_id(members, ordinal),
            tuple(sorted(members)),
            ordinal,
            "world" if is_world else role_of(printable(named)),
            printable(name),
            "" if communicator.name == UNNAMED else printable(communicator.name),
            "nccl",
        )
    return groups


def _operations(member: _FutureRank, survey: _Survey) -> Iterator[_InspectorOperation]:
    for path in survey.processes[member.process]:
        for record in read_records(path):
            if (
                isinstance(record, Record)
                and record.process == member.process
                and member.device in (-1, record.header.rank)
            ):
                yield _operation(record)


def _operation(record: Record) -> _InspectorOperation:
    header, perf = record.header, record.perf
    name = _OPERATIONS.get(perf.operation, "")
    num_bytes = perf.msg_size_bytes * (header.n_ranks if name in _SHARDS else 1)
    end = (record.end_us or record.metadata.dump_timestamp_us) * _NS_PER_US
    return _InspectorOperation(
        header.id,
        perf.operation,
        perf.sn,
        perf.peer if isinstance(perf, InspectorMessage) else -1,
        max(end - round(perf.exec_time_us * _NS_PER_US), 0),
        end,
        num_bytes if name and num_bytes <= _MOST_BYTES else -1,
        schema.HOST_TIMING if perf.timing_source.endswith("_cpu") else schema.NCCL_TIMING,
    )


class _InspectorRows:
    """The rows of one rank; ``groups`` are those they use, by id."""

    def __init__(
        self,
        survey: _Survey,
        ranks: _Ranks,
        groups: Mapping[str, Group],
        places: Mapping[str, Mapping[tuple[int, int, str], int]],
    ) -> None:
        self.groups: dict[int, Group] = {}
        self._survey = survey
        self._ranks = ranks
        self._of_communicator = groups
        self._places = places

    def of(self, operations: Sequence[_InspectorOperation]) -> list[Row]:
        numbers = self._numbers_of_messages(operations)
        seen = Counter[tuple[str, str, int]]()
        rows = []
        for at, operation in enumerate(operations):
            is_p2p = operation.peer >= 0
            communicator = self._survey.communicators[operation.communicator]
            # The n-th send of a pair is not that of the n-th receive where some are missing.
            is_joined = not is_p2p or communicator.counts_messages or not self._survey.has_times
            group = self._group(operation.communicator) if is_joined else None
            if is_p2p:
                seq = numbers[at]
            else:
                key = (operation.communicator, operation.name, operation.number)
                seq = self._places[operation.communicator][operation.number, seen[key], operation.name]
                seen[key] += 1
            rows.append(
                Row(
                    schema.P2P if is_p2p else schema.COLLECTIVE,
                    _OPERATIONS.get(operation.name) or printable(operation.name),
                    schema.COMMUNICATION,
                    operation.start,
                    operation.end,
                    group=group.id if group else -1,
                    # A number would make their times, which mean nothing, observations of the hosts' clocks.
                    seq=seq if group and self._survey.has_times else -1,
                    bytes=operation.num_bytes,
                    peer=self._global(communicator, operation.peer) if is_p2p else -1,
                    is_async=True,
                    id=at,
                    timing=operation.timing,
                )
            )
        return sorted(rows, key=lambda row: row.start)

    def _numbers_of_messages(self, operations: Sequence[_InspectorOperation]) -> dict[int, int]:
        """Return by position the number of earlier messages to or from the same peer."""
        messages = sorted((operation.number, at) for at, operation in enumerate(operations) if operation.peer >= 0)
        counts = Counter[tuple[str, str, int]]()
        numbers = {}
        for _, at in messages:
            key = (operations[at].communicator, operations[at].name, operations[at].peer)
            numbers[at] = counts[key]
            counts[key] += 1
        return numbers

    def _group(self, name: str) -> Group | None:
        group = self._of_communicator.get(name)
        return None if group is None else self.groups.setdefault(group.id, group)

    def _global(self, communicator: _Communicator, peer: int) -> int:
        member = self._ranks.member(communicator, peer)
        if member is not None:
            return self._ranks.of[member]
        is_world = self._ranks.are_known and communicator.size == self._ranks.world_size
        return peer if is_world else -1


def _limits(survey: _Survey, ranks: _Ranks) -> Iterator[str]:
    """Yield what files of this kind, written without a fault, do not say."""
    yield (
        "NCCL Inspector records NCCL's kernels alone, neither compute nor steps: exposed communication, bubbles and "
        "stragglers cannot be found."
    )
    if survey.has_times:
        middle, high = (int(np.percentile(survey.slack_us, share, method="nearest")) for share in (50, 99))
        yield (
            "Operations are placed by callbacks on the host. Kernels seemed to run longer there than on the device, by "
            f"{middle} µs (median) to {high} µs (99th percentile): waits are no more exact than that."
        )
    else:
        yield (
            "The lines do not say when an operation ran, as they are not verbose. Durations and bandwidths include "
            "waiting for other ranks; the order of operations is unknown. For more: NCCL_INSPECTOR_DUMP_VERBOSE=1."
        )
    if survey.by_cpu:
        yield f"{survey.by_cpu} durations were measured on the host, not by the GPU: they are too long."
    if not ranks.are_known:
        yield (
            "No communicator holds all processes, so their ranks in the job are unknown: they are numbered by host and "
            "process."
        )


def _gaps(survey: _Survey, groups: Mapping[str, Group]) -> Iterator[str]:
    """Yield what is missing or damaged in these files."""
    unknown = [
        communicator
        for name, communicator in survey.communicators.items()
        if name not in groups and communicator.members
    ]
    if unknown:
        yield (
            f"Of {len(unknown)} communicator{'s' * (len(unknown) != 1)} not all members have files: their operations "
            "are in no group and have no busbw. Give the files of all processes."
        )
    missing = sum(communicator.missing for communicator in survey.communicators.values())
    if missing:
        yield (
            f"{missing} collectives, by the numbers of the others, are in no file: smaller than "
            "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, without GPU timing, overwritten, or of a plugin before NCCL 2.30, "
            "which wrote only the last one of every dump."
        )
    dropped = sum(sum(communicator.dropped.values()) for communicator in survey.communicators.values())
    if dropped:
        yield f"{dropped} records were overwritten before they were written (dump_stats)."
    uncounted = [communicator for communicator in survey.communicators.values() if not communicator.counts_messages]
    if uncounted and survey.has_times:
        yield (
            f"In {len(uncounted)} communicator{'s' * (len(uncounted) != 1)} messages are missing: sends and receives "
            "there are in no group and have no bandwidth."
        )
    for path, (count, why) in survey.unreadable.items():
        yield f"{path.name}: {count} damaged line{'s' * (count != 1)} left out; {printable(why)}."
    for path, original in survey.copies.items():
        yield f"{path.name}: left out, it begins as {original.name} does."
    if survey.foreign:
        yield f"{len(survey.foreign)} files hold no line of the plugin, such as {survey.foreign[0].name}."
