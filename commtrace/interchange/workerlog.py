"""Import the job times that Paddle's executor logs when its schedule profiler is on (``commtrace import workerlog``).

A line is ``… Profiler Info: Job (2), type = forward, micro_batch_id = 2, job_start_time = 1697793307213.760986,
job_end_time = …`` (epoch ms). Communication is not logged: a stage that is idle before a job gets a message with the
timing ``unknown``, sent at the end of the neighbour's job and received at the start of the own job.

>>> import_workerlog([Path("log/workerlog.0"), Path("log/workerlog.1")], Path("imported"))  # doctest: +SKIP
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.errors import ImportFileError
from commtrace.interchange.rows import Imported, group_rows, imported_rank, mark_row, new_run, write_rank
from commtrace.trace import schema
from commtrace.trace.inputs import open_file
from commtrace.trace.metadata import Group, group_id
from commtrace.trace.schema import Row

_JOB: Final = re.compile(
    r"Profiler Info: Job \(\d+\), type = (?P<type>[a-zA-Z_]{1,100}?)(?P<chunk>[0-9]{0,4}), "
    r"micro_batch_id = (?P<microbatch>-?[0-9]{1,9}), "
    r"job_start_time = (?P<start>[^\s,]{1,40}), job_end_time = (?P<end>[^\s,]{1,40})"
)
_LINE: Final = "Profiler Info: Job ("
_FIRST_STEP: Final = re.compile(r"Schedule Profiler start at step ([0-9]{1,9})\b")
_NAME: Final = re.compile(r"workerlog\.([0-9]{1,6})$")
_MACHINE: Final = re.compile(r"^machine([0-9]{1,9})$")
_KINDS: Final = {"forward": schema.FORWARD, "backward": schema.BACKWARD, "optimizer": schema.OPTIMIZER}
_NS_PER_MS: Final = 1_000_000
_DIGITS: Final = 20
_LATEST_NS: Final = 2**61
_LONGEST_LINE: Final = 1 << 16
"""A longer line is read in pieces."""


@dataclass(frozen=True, slots=True)
class _LoggedJob:
    """One line. ``step`` counts from the first step in the log."""

    type: str
    chunk: int
    microbatch: int
    start: int
    end: int
    step: int = 0

    @property
    def is_phase(self) -> bool:
        return self.type in ("forward", "backward")

    @property
    def key(self) -> tuple[int, str, int, int]:
        return self.step, self.type, self.chunk, self.microbatch


class _WorkerLog(NamedTuple):
    path: Path
    node: str
    local_rank: int
    first_step: int
    jobs: list[_LoggedJob]
    unreadable: int = 0


class _LogMessage(NamedTuple):
    """A message that a stage sends or receives for a job; ``number`` counts those from sender to receiver."""

    job: _LoggedJob
    is_send: bool
    peer: int
    number: int
    start: int
    end: int


def import_workerlog(
    files: Sequence[Path], output: Path, *, on_file: Callable[[Path], None] = lambda path: None
) -> Imported:
    """Make a run of a pipeline from the logs of its stages.

    Args:
        files: ``workerlog.D``, or folders that hold them, ``machineN`` for several machines; stages are in that order.
        on_file: called with each file before it is read.

    Raises:
        ImportFileError: a file cannot be used; the message says which and why.
        ConfigurationError: ``output`` holds a run.
    """
    run_id, session = new_run(output)
    logs = []
    for path in _sorted_logs(files):
        on_file(path)
        logs.append(_read(path))
    group = Group(group_id(range(len(logs)), 0), tuple(range(len(logs))), 0, "pp", "pipeline")
    chunks = 1 + max(job.chunk for log in logs for job in log.jobs)
    messages = _messages([log.jobs for log in logs], chunks)
    num_spans = 0
    for rank, log in enumerate(logs):
        metadata = imported_rank(
            rank,
            len(logs),
            session=session,
            run_id=run_id,
            source="workerlog",
            node=log.node,
            local_rank=log.local_rank,
        )
        topology = {
            "coordinates": {"pp": rank},
            "parallel": {"pp": len(logs), "vpp": chunks},
            "framework": {"name": "paddle"},
        }
        marks = [*group_rows([group]), mark_row("topology", topology)]
        if log.unreadable:
            message = (
                f"{log.unreadable} damaged `Profiler Info: Job` lines of {log.path.name} were left out (cut off, no "
                "number, or an end before the start). The time before the next job counts as waiting."
            )
            marks.append(mark_row("problem", {"message": message}))
        num_spans += write_rank(output, metadata, _rows(rank, log, messages[rank], group), marks)
    return Imported(len(logs), num_spans)


def _sorted_logs(files: Sequence[Path]) -> list[Path]:
    logs: list[Path] = []
    for path in files:
        logs_of_path = [log for log in path.rglob("workerlog.*") if _NAME.search(log.name)] if path.is_dir() else [path]
        if not logs_of_path:
            raise ImportFileError(f"{path} holds no workerlog.0, workerlog.1, …; give the log folder of the launcher.")
        logs += logs_of_path
    for log in logs:
        if not _NAME.search(log.name):
            raise ImportFileError(
                f"{log} is not named workerlog.N, so its stage is unknown. Give the launcher's files."
            )
    return sorted(set(logs), key=lambda log: (_machine(log), str(log.parent), int(_NAME.findall(log.name)[0])))


def _machine(log: Path) -> int:
    match = _MACHINE.match(log.parent.name)
    return int(match[1]) if match else 0


def _read(path: Path) -> _WorkerLog:
    lines, first_step = 0, 0
    jobs: list[_LoggedJob] = []
    try:
        with open_file(path) as file:
            while line := file.readline(_LONGEST_LINE).decode("utf-8", "replace"):
                if len(line) >= _LONGEST_LINE and not line.strip("\0"):
                    raise OSError(errno.EINVAL, "it is sparse or damaged: it holds nothing where a log has lines")
                lines += line.count(_LINE)
                jobs += filter(None, map(_job, _JOB.finditer(line)))
                if not first_step and (match := _FIRST_STEP.search(line)):
                    first_step = int(match[1])
    except OSError as error:
        raise ImportFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    if lines and not jobs:
        raise ImportFileError(f"{path}: none of its {lines} `Profiler Info: Job` lines can be read. Copy it again.")
    if not jobs:
        raise ImportFileError(
            f"{path} has no `Profiler Info: Job` lines. Turn the executor's job schedule profiler on for a few steps."
        )
    node = path.parent.name if _MACHINE.match(path.parent.name) else "host0"
    local_rank = int(_NAME.findall(path.name)[0])
    return _WorkerLog(path, node, local_rank, first_step, _with_steps(jobs), lines - len(jobs))


def _job(match: re.Match[str]) -> _LoggedJob | None:
    start, end = _nanoseconds(match["start"]), _nanoseconds(match["end"])
    if start is None or end is None or end < start:
        return None
    return _LoggedJob(match["type"], int(match["chunk"] or 0), int(match["microbatch"]), start, end)


def _nanoseconds(milliseconds: str) -> int | None:
    try:
        time = int(Decimal(milliseconds) * _NS_PER_MS) if Decimal(milliseconds).adjusted() < _DIGITS else -1
    except (ArithmeticError, ValueError):
        return None
    return time if 0 <= time <= _LATEST_NS else None


def _with_steps(jobs: Sequence[_LoggedJob]) -> list[_LoggedJob]:
    """Return the jobs by start, with their steps: a step ends when one of its jobs is repeated."""
    step, seen, numbered = 0, set[tuple[int, str, int, int]](), []
    for job in sorted(jobs, key=lambda job: (job.start, job.end)):
        job = replace(job, step=step)
        if job.key in seen:
            step, seen = step + 1, set()
            job = replace(job, step=step)
        seen.add(job.key)
        numbered.append(job)
    return numbered


def _messages(stages: Sequence[Sequence[_LoggedJob]], chunks: int) -> dict[int, list[_LogMessage]]:
    """Return, by stage, the messages that it receives before its jobs and sends after them."""
    of_key = [{job.key: job for job in jobs if job.is_phase} for jobs in stages]
    messages: dict[int, list[_LogMessage]] = {stage: [] for stage in range(len(stages))}
    numbers: dict[tuple[int, int], int] = {}
    for stage, jobs in enumerate(stages):
        for before, job in pairwise([None, *jobs]):
            source = _source(job, stage, len(stages), chunks) if job and job.is_phase else None
            sent = of_key[source[0]].get((job.step, job.type, source[1], job.microbatch)) if job and source else None
            if job is None or source is None or sent is None:
                continue
            sender = source[0]
            number = numbers.get((sender, stage), 0)
            numbers[sender, stage] = number + 1
            posted = min(before.end if before else job.start, job.start)
            messages[stage].append(_LogMessage(job, False, sender, number, posted, job.start))
            messages[sender].append(_LogMessage(sent, True, stage, number, sent.end, sent.end))
    return messages


def _source(job: _LoggedJob, stage: int, stages: int, chunks: int) -> tuple[int, int] | None:
    """Return stage and chunk of a job's input; None at the start of the pipeline, or if it is the stage itself."""
    position = job.chunk * stages + stage + (-1 if job.type == "forward" else 1)
    if not 0 <= position < chunks * stages or position % stages == stage:
        return None
    return position % stages, position // stages


def _rows(rank: int, log: _WorkerLog, messages: Sequence[_LogMessage], group: Group) -> Iterator[Row]:
    yield from _step_rows(log)
    for job in log.jobs:
        kind = _KINDS.get(job.type, schema.PHASE)
        yield Row(
            kind,
            job.type,
            schema.COMPUTE,
            job.start,
            job.end,
            step=log.first_step + job.step,
            microbatch=job.microbatch if job.is_phase else -1,
            chunk=job.chunk if job.is_phase else -1,
            stage=rank,
            timing=schema.HOST_TIMING,
        )
    for number, message in enumerate(messages):
        yield from _message_rows(rank, log, message, number, group)


def _step_rows(log: _WorkerLog) -> Iterator[Row]:
    begins: dict[int, int] = {}
    for job in log.jobs:
        begins.setdefault(job.step, job.start)
    ends = [*list(begins.values())[1:], max(job.end for job in log.jobs)]
    for (step, begin), end in zip(begins.items(), ends, strict=True):
        yield Row(
            schema.STEP, "step", schema.COMPUTE, begin, end, step=log.first_step + step, timing=schema.HOST_TIMING
        )


def _message_rows(rank: int, log: _WorkerLog, message: _LogMessage, number: int, group: Group) -> Iterator[Row]:
    name = "send" if message.is_send else "recv"
    job = message.job
    step = log.first_step + job.step
    yield Row(
        schema.P2P, name, schema.COMMUNICATION, message.start, message.end, step=step, microbatch=job.microbatch,
        chunk=job.chunk, stage=rank, group=group.id, seq=message.number, peer=message.peer, is_async=message.is_send,
        id=number, timing=schema.UNKNOWN_TIMING, end_exact=False,
    )  # fmt: skip
    if message.end > message.start:
        yield Row(
            schema.STALL, name, schema.COMPUTE, message.start, message.end, step=step, microbatch=job.microbatch,
            chunk=job.chunk, stage=rank, group=group.id, seq=message.number, peer=message.peer, stalled_on=number,
            timing=schema.UNKNOWN_TIMING, end_exact=False,
        )  # fmt: skip
