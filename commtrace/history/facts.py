"""Read the facts of a run that a list shows, from the ends of its files.

>>> facts = read_facts(Path("commtrace-runs/my-run"), now_ns=time.time_ns())   # doctest: +SKIP
>>> facts.state, facts.last_step                                               # doctest: +SKIP
('ended', 400)
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import pyarrow as pa

from commtrace.analysis.clocks.time_of_day import FIRST_DATE_NS, date_and_time, step_end_ns, wall_clock_ns
from commtrace.analysis.hangs.job_end import CUT_OFF, RUNNING, Count, EarlierAttempt, earlier_attempts, how_it_ended
from commtrace.analysis.hangs.no_progress import find_quiet
from commtrace.analysis.hangs.rank_state import Ending, find_endings
from commtrace.analysis.hangs.stops import HUNG, find_stops
from commtrace.analysis.matching.arrivals import find_arrivals
from commtrace.trace import schema
from commtrace.trace.files.locate import rank_directories
from commtrace.trace.files.rank_files import rank_directory, segment_paths
from commtrace.trace.files.segment_index import SegmentIndex
from commtrace.trace.files.side_files import with_exit
from commtrace.trace.files.tail import RunTail
from commtrace.trace.processes import AskProcess, unknown_process
from commtrace.trace.run import RankTrace, Run

MONITOR_STATUS: Final = "monitor.json"
MONITOR_EVENTS: Final = "monitor.jsonl"

Time: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

_MOST_PROBLEMS: Final = 20


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run at a glance; None means unknown, or no step."""

    run: str
    attempt: Count  # number of earlier starts of the job
    session: Time  # epoch ns of the start of the first rank's recording, or of the import
    started_ns: Time | None  # first instant of the newest attempt, epoch ns
    ended_ns: Time | None
    world_size: Count
    ranks_recorded: Count  # with files
    hosts: tuple[str, ...]  # names of the nodes
    first_step: Count | None  # of the newest attempt
    last_step: Count | None
    step_ns: Count | None  # mean of steps of the lowest recorded rank but the first, sampled from all of the run
    state: str  # of job_end.STATES
    ending: str  # describes the ranks that failed, were cut off or are silent
    problems: tuple[str, ...]
    earlier_attempts: tuple[EarlierAttempt, ...] = ()  # oldest first

    @property
    def duration_ns(self) -> int | None:
        if self.started_ns is None or self.ended_ns is None:
            return None
        return max(self.ended_ns - self.started_ns, 0)

    @property
    def steps(self) -> int | None:
        """Return the number of steps of the newest attempt."""
        return None if self.first_step is None or self.last_step is None else self.last_step - self.first_step + 1


def read_facts(directory: Path, *, now_ns: int, ask: AskProcess = unknown_process) -> RunFacts:
    """Read the facts of the newest attempt in a run directory, a running one as of ``now_ns`` (epoch).

    Raises:
        RunNotFoundError: nothing was recorded there, or nothing yet.
        TraceFormatError: the files were written by a newer, incompatible commtrace.
        OSError: the directory cannot be read.
    """
    tail = RunTail(directory)
    newest = tail.read(1)
    ranks = {rank: with_exit(trace, rank_directory(directory, rank)) for rank, trace in newest.run.ranks.items()}
    run = replace(newest.run, ranks=ranks)
    lowest = run.ranks[min(run.ranks)]
    return _facts(
        run,
        max(newest.last_steps.values(), default=-1),
        tail.sample_durations(lowest.rank),
        _first_row_ns(lowest, directory),
        find_endings(run, now_ns, ask),
        earlier_attempts(run, now_ns=now_ns, ask=ask),
        now_ns,
    )


def facts_of(run: Run, *, now_ns: int, ask: AskProcess = unknown_process) -> RunFacts:
    """Return the facts of a run that was loaded in full."""
    lowest = run.ranks[min(run.ranks)].spans
    durations, last_step = [], -1
    if not run.steps_inferred:  # as in the files, in which no step is marked
        durations = (lowest.end - lowest.start)[lowest.kind == schema.STEP].tolist()
        last_step = max(
            int(trace.spans.step[trace.spans.kind == schema.STEP].max(initial=-1)) for trace in run.ranks.values()
        )
    return _facts(
        run,
        last_step,
        durations,
        int(lowest.start.min()) if len(lowest) else None,
        find_endings(run, now_ns, ask),
        earlier_attempts(run, now_ns=now_ns, ask=ask),
        now_ns,
    )


def _facts(
    run: Run,
    last_step: int,
    durations: Sequence[int],
    first_row_ns: int | None,
    endings: Mapping[int, Ending],
    earlier: tuple[EarlierAttempt, ...],
    now_ns: int,
) -> RunFacts:
    lowest = run.ranks[min(run.ranks)]
    state, ending = how_it_ended(endings)
    after_warm_up = durations[1:] or durations
    if state == RUNNING:
        usual_ns = int(statistics.median(durations)) if durations else None
        ending = ", ".join(filter(None, (_stalled(run, last_step, usual_ns, now_ns), ending)))
    elif state == CUT_OFF and any(stop.kind == HUNG for stop in find_stops(run, find_arrivals(run), endings)):
        ending = f"{ending}, which hung"
    writes = [
        ending.last_ns for ending in endings.values() if ending.last_ns is not None and ending.last_ns > FIRST_DATE_NS
    ]
    return RunFacts(
        run=run.any_metadata.run_id,
        attempt=run.any_metadata.attempt,
        session=min(trace.metadata.session for trace in run.ranks.values()),
        started_ns=_start_of(run, first_row_ns),
        ended_ns=max(writes, default=None),
        world_size=run.world_size,
        ranks_recorded=len(run.ranks),
        hosts=tuple(dict.fromkeys(trace.metadata.node for trace in run.ranks.values())),
        first_step=None if last_step < 0 else min(lowest.first_step, last_step),
        last_step=None if last_step < 0 else last_step,
        step_ns=int(statistics.mean(after_warm_up)) if after_warm_up else None,
        state=state,
        ending=ending,
        problems=_bounded(run.problems),
        earlier_attempts=earlier,
    )


def _stalled(run: Run, last_step: int, step_ns: int | None, now_ns: int) -> str:
    """Return ``hangs since 2026-11-23 14:03:22 UTC`` if no step has ended for unusually long; else empty."""
    if last_step >= 0 and step_end_ns(run, last_step) is None:
        return ""  # some rank is ahead of the part that was read
    quiet = find_quiet(run, now_ns, step_ns)
    return "" if quiet is None or quiet.pauses else f"hangs since {date_and_time(quiet.since_ns)}"


_FACTS: Final = b"step_ns is a mean; hangs are told"
"""What the facts are: those that were kept by other definitions are read again."""


def fingerprint(directory: Path) -> str:
    """Return a text that changes when a file of the ranks or of the monitor does, without opening any."""
    digest = hashlib.sha256(_FACTS)
    files = [path for folder in rank_directories(directory) if folder.is_dir() for path in sorted(folder.iterdir())]
    for path in [*files, directory / MONITOR_STATUS, directory / MONITOR_EVENTS]:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # there is no monitor, or a running job has just deleted it to keep to its budget
        digest.update(f"{path.relative_to(directory)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _start_of(run: Run, first_row_ns: int | None) -> int | None:
    """Return the start of the first process, else of the recording, else of the lowest rank's first row."""
    starts = [
        wall_clock_ns(trace, trace.process_start_ns)
        for trace in run.ranks.values()
        if trace.process_start_ns is not None
    ]
    starts += [trace.metadata.anchor.realtime_ns for trace in run.ranks.values() if not starts]
    known = [start for start in starts if start > FIRST_DATE_NS]
    if not known and first_row_ns is not None:  # imported traces count from the epoch and have no anchors
        known = [first for first in [wall_clock_ns(run.ranks[min(run.ranks)], first_row_ns)] if first > FIRST_DATE_NS]
    return min(known, default=None)


def _first_row_ns(trace: RankTrace, directory: Path) -> int | None:
    try:
        index = SegmentIndex(segment_paths(rank_directory(directory, trace.rank))[0])
        index.extend()
        part = index.read(0, 1) if index.batches else None
    except (OSError, IndexError, pa.ArrowException):
        return None  # deleted or damaged: what is wrong with it is among the problems of the run
    starts = [] if part is None else [start for start in part["start"].to_pylist() if start]
    return min(starts, default=None)


def _bounded(problems: Iterable[str]) -> tuple[str, ...]:
    listed = tuple(problems)
    more = len(listed) - _MOST_PROBLEMS
    return listed if more <= 0 else (*listed[:_MOST_PROBLEMS], f"{more} more problems: commtrace doctor lists them.")
