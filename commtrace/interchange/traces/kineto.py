"""Import traces of torch.profiler, one file per rank (``commtrace import kineto``); see docs/importing.md.

>>> import_kineto(sorted(Path("traces").glob("*.json.gz")), Path("imported"))               # doctest: +SKIP
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace.errors import ConfigurationError, ImportFileError
from commtrace.interchange.rows import (
    Imported,
    group_rows,
    guessed_hosts,
    imported_rank,
    mark_row,
    new_run,
    write_rank,
)
from commtrace.interchange.traces import ascend
from commtrace.interchange.traces.device_events import DeviceTrace, DeviceWork, read_device_trace
from commtrace.interchange.traces.host_calls import integer
from commtrace.interchange.traces.nccl_calls import NcclCall, describe, plain_name, qualified_name
from commtrace.interchange.traces.trace_events import Distributed, TraceFile
from commtrace.trace import schema
from commtrace.trace.metadata import KINETO, Group
from commtrace.trace.schema import Row

_RANK_IN_NAME: Final = re.compile(r"(?:rank|worker)[-_.]?(\d+)", re.IGNORECASE)
_USUAL_DEVICES_PER_HOST: Final = 8
_LARGEST_RANK: Final = 1_000_000
_LOOKS_LIKE_COMMUNICATION: Final = re.compile(
    r"(?i)deep_?ep|\bep::|rccl|hccl|hcom_|oneccl|msccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv"
)
"""Kernels that communicate by other libraries, or by loads and stores of the GPU."""


@dataclass(frozen=True, slots=True)
class KinetoOptions:
    """Options of the import."""

    communication_pattern: str | None = None  # for names of further communication kernels, besides nccl
    profiler_steps: bool = False  # take the ProfilerStep annotations as steps; else a file is one step
    ranks_per_host: int = 0  # consecutive ranks that share a clock; 0 for the number of devices

    def __post_init__(self) -> None:
        try:
            re.compile(self.communication_pattern or "")
        except re.error as error:
            raise ConfigurationError(
                f"--communication-pattern {self.communication_pattern!r} is not a regular expression: {error}"
            ) from error


def import_kineto(
    files: Sequence[Path],
    output: Path,
    options: KinetoOptions | None = None,
    *,
    on_file: Callable[[Path], None] = lambda path: None,
) -> Imported:
    """Make a run from one trace per rank, JSON or gzip, one file at a time.

    Args:
        on_file: called with each file before it is read.

    Raises:
        ImportFileError: a file cannot be used; the message says which and why.
        ConfigurationError: an option is wrong, or ``output`` holds a run.
    """
    options = options or KinetoOptions()
    run_id, session = new_run(output)
    of_rank = _ranks_of_files(files)
    world = _world(of_rank)
    notes: tuple[str, ...] = ()
    num_spans = 0
    for rank, (path, distributed) in sorted(of_rank.items()):
        on_file(path)
        trace = read_device_trace(path, options.communication_pattern)
        try:
            calls, groups = describe(trace.communication, rank, world, distributed, trace.host_calls)
        except ValueError as error:
            raise ImportFileError(f"{path} is damaged: {error}.") from error
        steps = _ProfilerSteps.of(trace, profiler_steps=options.profiler_steps)
        metadata = imported_rank(
            rank,
            max(world) + 1,
            session=session,
            run_id=run_id,
            source=KINETO,
            node=_host(rank, trace, options),
            local_rank=max(trace.device, 0),
            backend=trace.backend or distributed.backend or "",
            device=trace.header.devices[0] if trace.header.devices else "",
            versions={} if distributed.nccl_version is None else {"nccl": str(distributed.nccl_version)},
        )
        marks = _marks(trace, groups)
        if not (notes or trace.header.host or options.ranks_per_host or len(of_rank) == 1):
            guess = guessed_hosts("traces", " from the number of devices")
            notes = (guess.note,)
            marks.append(guess.mark)
        num_spans += write_rank(output, metadata, _rows(trace, calls, steps), marks)
    return Imported(len(of_rank), num_spans, notes)


def _ranks_of_files(files: Sequence[Path]) -> dict[int, tuple[Path, Distributed]]:
    """Return file and ``distributedInfo`` by rank, which comes from the file, else its name, else its position."""
    files_by_rank: dict[int, tuple[Path, Distributed]] = {}
    for position, path in enumerate(files):
        distributed = _distributed_info(path)
        named = _RANK_IN_NAME.findall(path.name)
        recorded = integer(distributed.rank)  # torch writes −1 where the process was in no group
        rank = recorded if recorded >= 0 else int(named[-1]) if named else position
        if rank > _LARGEST_RANK:
            raise ImportFileError(
                f"{path}: rank {rank} in its distributedInfo is out of range. Remove that entry and put rank-N into "
                "the file name."
            )
        if rank in files_by_rank:
            raise ImportFileError(
                f"{files_by_rank[rank][0]} and {path} are both of rank {rank}. Give one file per rank; put rank-N "
                "into the name of a file that does not hold its rank."
            )
        files_by_rank[rank] = path, distributed
    return files_by_rank


def _distributed_info(path: Path) -> Distributed:
    if path.absolute().parent.name == ascend.OUTPUT_FOLDER:
        return ascend.distributed_beside(path)
    file = TraceFile(path)
    with closing(file.events()) as pieces:
        for _ in pieces:
            if file.is_list or file.header.distributed is not None:  # nearly always before the first event
                break
    return file.header.distributed or Distributed()


def _world(of_rank: Mapping[int, tuple[Path, Distributed]]) -> tuple[int, ...]:
    """Return all ranks of the job; only those with a file if their number is unknown."""
    size = max(integer(distributed.world_size) for _, distributed in of_rank.values())
    return tuple(range(size)) if max(of_rank) < size <= _LARGEST_RANK else tuple(sorted(of_rank))


def _host(rank: int, trace: DeviceTrace, options: KinetoOptions) -> str:
    """Return the host that the trace names, else a guess."""
    if trace.header.host and not options.ranks_per_host:
        return trace.header.host
    return f"host{rank // (options.ranks_per_host or len(trace.header.devices) or _USUAL_DEVICES_PER_HOST)}"


@dataclass(frozen=True, slots=True)
class _ProfilerSteps:
    """Steps of a rank, ascending; times are ns after the base of the trace."""

    number: list[int]
    begin: list[int]
    end: int

    @classmethod
    def of(cls, trace: DeviceTrace, *, profiler_steps: bool) -> _ProfilerSteps:
        begin, end = trace.bounds()
        if not profiler_steps:
            return cls([0], [begin], end)
        annotations = trace.profiler_steps or trace.device_steps
        if not annotations:
            raise ImportFileError(
                f"{trace.path} has no ProfilerStep annotations: the profiler's step() was not called. "
                "Import it without --step-source profiler."
            )
        first_start: dict[int, int] = {}
        for number, start, _ in sorted(annotations, key=lambda step: step[1]):
            first_start.setdefault(number, start)  # some versions write a step in two categories
        return cls(
            [*first_start],
            [*first_start.values()],
            max(end, *(step_end for _, _, step_end in annotations)),
        )

    def containing(self, time: int) -> int:
        """Return the step at this instant; −1 before the first."""
        position = bisect_right(self.begin, time) - 1
        return self.number[position] if position >= 0 else -1

    def rows(self, base: int) -> Iterator[Row]:
        for number, begin, end in zip(self.number, self.begin, [*self.begin[1:], self.end], strict=True):
            yield Row(
                schema.STEP,
                "step",
                schema.COMPUTE,
                base + begin,
                base + end,
                step=number,
                timing=schema.KERNEL_TIMING,
            )


def _rows(trace: DeviceTrace, calls: Sequence[NcclCall], steps: _ProfilerSteps) -> Iterator[Row]:
    base = trace.header.base_time_ns
    yield from steps.rows(base)
    yield from _work_rows(schema.KERNEL, trace.kernels, trace.names, base, steps)
    yield from _work_rows(schema.MEMORY, trace.memory, trace.names, base, steps)
    for number, call in enumerate(calls):
        yield Row(
            schema.P2P if call.is_p2p else schema.COLLECTIVE,
            call.operation,
            schema.COMMUNICATION,
            base + call.kernel.start,
            base + call.kernel.end,
            step=steps.containing(call.kernel.start),
            group=call.group,
            seq=call.seq,
            op_in_seq=call.op_in_seq,
            bytes=call.num_bytes,
            self_bytes=call.self_bytes,
            dtype=call.dtype,
            peer=call.peer,
            is_async=True,
            id=number,
            timing=schema.KERNEL_TIMING,
        )


def _work_rows(kind: int, work: DeviceWork, names: Sequence[str], base: int, steps: _ProfilerSteps) -> Iterator[Row]:
    for start, end, name, num_bytes in zip(work.start, work.end, work.name, work.bytes, strict=True):
        yield Row(
            kind,
            names[name],
            schema.COMPUTE,
            base + start,
            base + end,
            step=steps.containing(start),
            bytes=num_bytes,
            timing=schema.KERNEL_TIMING,
        )


def _marks(trace: DeviceTrace, groups: Sequence[Group]) -> list[Row]:
    return group_rows(groups) + [mark_row("problem", {"message": message}) for message in _problems(trace)]


def _problems(trace: DeviceTrace) -> Iterator[str]:
    alike = _look_like_communication(trace)
    if alike:
        yield (
            f"{', '.join(alike)} looks like communication but counts as compute. If it communicates, import again with "
            "--communication-pattern and a part of that name."
        )
    elif not len(trace.kernels) + len(trace.communication):
        yield "nothing but copies ran on the device: no kernel was recorded."
    elif not trace.communication and trace.backend == ascend.BACKEND:
        yield "no operation of HCCL was recorded."
    elif not trace.communication:
        yield (
            f"none of {len(trace.kernels)} kernels is one of NCCL, RCCL or oneCCL. If others communicate, import again "
            "with --communication-pattern and a part of their names. Devices that communicate without kernels, as "
            "Gaudi does, do not show it."
        )
    if trace.communication and not len(trace.kernels):
        yield "all kernels communicate, none computes."
    if len(trace.devices) > 1:
        yield (
            f"the file holds {_devices(trace)}, shown as one rank: compute is when at least one of them computes, idle "
            "when all are. Write one trace per process to see them apart."
        )
    if trace.unreadable:
        yield (
            f"{trace.unreadable} device events were left out: their start or duration is missing, NaN or negative, or "
            "their arguments are damaged. The numbers are lower bounds."
        )


def _look_like_communication(trace: DeviceTrace) -> list[str]:
    """Return short names of up to three compute kernels that are named like communication."""
    computing = set(trace.kernels.name)
    names = (name for code, name in enumerate(trace.names) if code in computing)
    alike = (plain_name(name) for name in names if _LOOKS_LIKE_COMMUNICATION.search(qualified_name(name)))
    return list(dict.fromkeys(alike))[:3]


def _devices(trace: DeviceTrace) -> str:
    numbers = sorted({number for number, _ in trace.devices})
    if len(numbers) > 1:
        return f"devices {', '.join(map(str, numbers[:8]))}{' …' if len(numbers) > 8 else ''}"
    return f"the devices of {len(trace.devices)} processes"
