"""Make frames from the files of a running job, by analysing its newest steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import structs

from commtrace.analysis.breakdown.rank_means import RankMean, rank_means
from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.hangs.no_progress import Quiet, find_quiet
from commtrace.analysis.hangs.rank_state import ENDED, SILENT, STOPPED, Ending, find_endings
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.operations import is_kernel_trace
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.observed_steps import ObservedProgram
from commtrace.analysis.steps.attempts import LaunchSteps, repeated_steps, separate_attempts
from commtrace.analysis.steps.inference import infer_steps
from commtrace.analysis.steps.progress import last_ended_step
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.analysis.stragglers.list_of_findings import with_lost_time
from commtrace.analysis.stragglers.lost_time import lost_time_of_steps
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.errors import ConfigurationError, TraceFormatError
from commtrace.findings.causes import HOST, JOB, OF_DIVISION
from commtrace.findings.finding import HANG, NOT_JUDGED, SLOW, Finding, beginning_as
from commtrace.findings.finding import SILENT as SILENT_KIND
from commtrace.findings.formatting import format_duration, format_ranks
from commtrace.findings.progress import no_progress
from commtrace.findings.status import MonitorStatus
from commtrace.live.top.frame import BOTH, MONITOR, MOST_STEPS, PARTS, STEPS_SHOWN, Exposed, Frame, RankRow
from commtrace.live.top.shown_findings import ShownFinding, ranked_once
from commtrace.trace import schema
from commtrace.trace.files.locate import find_run_directory
from commtrace.trace.files.tail import Newest, RunTail
from commtrace.trace.inputs import printable_json, read_file
from commtrace.trace.processes import GONE, SUSPENDED, AskProcess, unknown_process
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.selection import StepRange

MONITOR_FILE: Final = "monitor.json"
_NOT_SEEN: Final = "Not, or no longer, in the steps shown."

_OLD_MONITOR_NS: Final = 60_000_000_000
_MOST_REPEATED: Final = 3
_LARGEST_STATUS: Final = 64 << 20
_RANKS_WITH_ALL_STEPS: Final = 256
_FEWEST_STEPS: Final = Thresholds().fewest_steps


class FileSource:
    """Makes frames of a run directory: of its ``last`` steps, 0 for :func:`steps_of`."""

    def __init__(self, path: str | Path, last: int, ask: AskProcess = unknown_process) -> None:
        self._path = path
        self._last = last
        self._ask = ask
        self._ranks = 0
        self._tail = RunTail(path)

    def look(self) -> Frame:
        """Return the present frame.

        Raises:
            RunNotFoundError: nothing was recorded there, or nothing yet.
            TraceFormatError: the files were written by a newer, incompatible commtrace.
        """
        began = time.monotonic_ns()
        last = self._last or steps_of(self._ranks or _count_ranks(self._path))
        newest = self._tail.read(last)
        self._ranks = len(newest.run.ranks)
        lowest = min(newest.run.ranks)
        before = self._tail.sample_durations(lowest)
        monitor: MonitorStatus | None = None
        damaged: tuple[str, ...] = ()
        try:
            monitor = read_monitor(newest.run.path)
        except TraceFormatError as error:
            damaged = (str(error),)
        frame = make_frame(newest, last, time.time_ns(), before, monitor, self._ask)
        frame = replace(frame, notes=(*frame.notes, *damaged))
        return replace(frame, source=str(newest.run.path), took_ns=time.monotonic_ns() - began)


def steps_of(ranks: int) -> int:
    """Return the number of steps to show of a job of this size: a look costs in proportion to both."""
    return min(MOST_STEPS, max(_FEWEST_STEPS, MOST_STEPS * _RANKS_WITH_ALL_STEPS // max(ranks, 1)))


def _count_ranks(path: str | Path) -> int:
    return sum(1 for _ in find_run_directory(Path(path)).glob("rank-*"))


def read_monitor(directory: Path) -> MonitorStatus | None:
    """Return the newest state that the monitor wrote, None without one; raise TraceFormatError if it is damaged."""
    path = directory / MONITOR_FILE
    try:
        return printable_json(read_file(path, _LARGEST_STATUS), MonitorStatus)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"{path} is not a valid state of the monitor and was left out ({error}).") from None


def make_frame(
    newest: Newest,
    last: int,
    now_ns: int,
    before: Sequence[int] = (),
    monitor: MonitorStatus | None = None,
    ask: AskProcess = unknown_process,
) -> Frame:
    """Return the frame of the rows that were read; ``before`` are durations of steps of the run so far, ns."""
    run, steps = _run_and_steps(newest, last)
    run = separate_attempts(run)
    endings = find_endings(run, now_ns, ask)
    analysis = _analysed(run, steps)
    means = rank_means(analysis.run, analysis.partition, analysis.matches) if analysis else []
    by_steps = _findings_of_steps(analysis)
    is_judged = analysis is not None and all(finding.kind != NOT_JUDGED for finding in by_steps)
    step_ns = _median([int(ns) for ns in _durations(run, steps)])
    used = analysis.steps.used if analysis else ()
    shown = [steps.first, steps.end - 1] if steps else [None, None]
    first, final = (used[0], used[-1]) if used else shown
    by_rank = {mean.rank: mean for mean in means}
    waits = _waits(analysis.run, analysis.matches) if analysis else {}
    rows = [
        _row(trace, newest.last_steps.get(rank, -1), endings[rank], by_rank.get(rank), waits.get(rank), used)
        for rank, trace in run.ranks.items()
    ]
    has_ended = all(ending.state in (ENDED, STOPPED) for ending in endings.values())
    quiet = None if has_ended else find_quiet(run, now_ns, step_ns or _median(before))
    if quiet is not None and not quiet.pauses:
        latest = {row.rank: max(row.last_step, last_ended_step(run.ranks[row.rank])) for row in rows}
        last_steps = {rank: step for rank, step in latest.items() if step >= 0}
        stops = no_progress(quiet.since_ns, now_ns - quiet.since_ns, quiet.step_ns, last_steps, str(run.path))
        by_steps = (stops, *by_steps)
    findings = ranked_once(_each_once(_from_monitor(monitor, now_ns), by_steps, is_judged=is_judged))
    return Frame(
        source=str(run.path),
        time_ns=now_ns,
        run_id=run.any_metadata.run_id,
        world_size=run.world_size,
        hosts=len({trace.metadata.node for trace in run.ranks.values()}),
        first_step=first,
        last_step=final,
        num_steps=len(used),
        step_ns=step_ns,
        before_ns=_median(before) if len(before) > last else None,
        before=f"{len(before)} steps of rank {min(run.ranks)}, from all over the run" if len(before) > last else "",
        own_cost=monitor.own_cost.short if monitor is not None and monitor.own_cost is not None else "",
        ranks=tuple(rows),
        findings=tuple(shown.finding for shown in findings),
        sources={shown.finding.id: shown.source for shown in findings},
        notes=tuple(_notes(run, rows, endings, steps, analysis, quiet, now_ns, monitor)),
    )


def _attempts(run: Run, steps: StepRange | None) -> Iterator[str]:
    """Note a restart of the job, and repeated steps among those shown."""
    launch = run.any_metadata.attempt
    if launch:
        yield (
            f"Attempt {launch + 1} of the job is shown. Steps that it does again, compared with attempt {launch}: "
            f"commtrace summary {run.path}"
        )
    again = [
        repeated for repeated in repeated_steps([LaunchSteps.of(run)]) if steps is not None and repeated.step in steps
    ]
    for step in again[-_MOST_REPEATED:]:
        durations = ", ".join(
            f"attempt {attempt.attempt} took {format_duration(attempt.duration_ns)}" for attempt in step.attempts
        )
        yield f"Step {step.step} was done {len(step.attempts)} times: {durations}. The last one is shown."


def _run_and_steps(newest: Newest, last: int) -> tuple[Run, StepRange | None]:
    """Return the run, with inferred steps if it marks none, and the steps to show; None if there are none."""
    if newest.end > newest.first:
        return newest.run, StepRange(newest.first, newest.end)
    inferred = infer_steps(newest.run)
    if inferred is None:
        return newest.run, None
    ends = [numbers[-1] for trace in inferred.ranks.values() if len(numbers := _step_numbers(trace))]
    if not ends:
        return newest.run, None
    end = int(min(ends)) + 1
    return inferred, StepRange(max(end - last, 0), end)


def _step_numbers(trace: RankTrace) -> np.ndarray:
    return np.unique(trace.spans.step[trace.spans.kind == schema.STEP])


def _analysed(run: Run, steps: StepRange | None) -> Analysis | None:
    if steps is None:
        return None
    try:
        analysis = analyse(run, str(steps))
    except ConfigurationError:
        return None  # no step has ended on all ranks
    return analysis if analysis.steps.used else None


def _durations(run: Run, steps: StepRange | None) -> np.ndarray:
    durations = [np.empty(0, np.int64)]
    for trace in run.ranks.values() if steps else ():
        rows = (trace.spans.kind == schema.STEP) & steps.mask(trace.spans.step)  # type: ignore[union-attr]
        durations.append(trace.spans.end[rows] - trace.spans.start[rows])
    return np.concatenate(durations)


def _median(values: Sequence[int]) -> int | None:
    return int(np.median(values)) if len(values) else None


def _findings_of_steps(analysis: Analysis | None) -> tuple[Finding, ...]:
    if analysis is None or any(is_kernel_trace(trace.spans) for trace in analysis.run.ranks.values()):
        return ()
    run, matches, around = analysis.run, analysis.matches, analysis.context.run
    try:
        observed = ObservedProgram.of(run, matches, around)
    except ReplayError:
        return find_stragglers(run, matches, around=around).findings  # it says so
    judgement = find_stragglers(run, matches, observed=observed)
    is_long_enough = len(analysis.steps.used) >= _FEWEST_STEPS  # of fewer, it may be chance
    lost = lost_time_of_steps(run, observed, judgement.slow) if matches.clocks_agree and is_long_enough else None
    return tuple(map(_dated, with_lost_time(judgement, lost)))


def _dated(finding: Finding) -> Finding:
    """Return a finding without a beginning if it may have begun before the steps shown."""
    if finding.kind != SLOW or not (finding.since_first_compared or finding.occurrence):
        return finding
    return structs.replace(finding, since_step=-1, since_ns=None, since_first_compared=False)


def _waits(run: Run, matches: Matches) -> dict[int, dict[int, int]]:
    """Return the wait of each rank for each other one, ns over all steps."""
    waits: dict[int, dict[int, int]] = {}
    for rank, trace in run.ranks.items():
        rank_matches = matches.ranks[rank]
        wait = rank_matches.wait_ns(trace.spans)
        waited = (rank_matches.last_rank >= 0) & (rank_matches.last_rank != rank) & (wait > 0)
        waited_for, which = np.unique(rank_matches.last_rank[waited], return_inverse=True)
        totals = np.bincount(which.reshape(-1), wait[waited], len(waited_for))
        waits[rank] = {int(last): int(ns) for last, ns in zip(waited_for, totals, strict=True)}
    return waits


def _row(
    trace: RankTrace,
    last_step: int,
    ending: Ending,
    mean: RankMean | None,
    waits: Mapping[int, int] | None,
    used: Sequence[int],
) -> RankRow:
    waited_for = max(waits, key=lambda rank: waits[rank]) if waits else None
    numbers = _step_numbers(trace)
    row = RankRow(
        rank=trace.rank,
        host=trace.metadata.node,
        where=" ".join(f"{name}{at}" for name, at in trace.coordinates.items() if trace.parallel.get(name, 2) > 1),
        last_step=last_step if last_step >= 0 else int(numbers[-1]) if len(numbers) else -1,
        age_ns=ending.behind_ns,
        state=ending.state,
        dropped=sum(trace.dropped.values()),
    )
    if mean is None:
        rows = trace.spans.kind == schema.STEP
        known = trace.spans.end[rows] - trace.spans.start[rows]
        return replace(row, step_ns=int(known.mean()) if len(known) else None)
    return replace(
        row,
        step_ns=mean.wall_ns,
        parts={part: mean.part(part) for part in PARTS},
        exposed={
            role: Exposed(exposed.total_ns, exposed.wait_ns, exposed.transfer_ns)
            for role, exposed in mean.exposed.items()
        },
        launch_bound_ns=None if mean.launch_bound_ns is None else sum(mean.launch_bound_ns.values()),
        waits_for=waited_for,
        waits_ns=waits[waited_for] // len(used) if waits and waited_for is not None else 0,
        blame_ns=mean.blame_ns,
    )


def _from_monitor(monitor: MonitorStatus | None, now_ns: int) -> list[Finding]:
    # What is silent is told by the ranks' files, with the state of its process.
    is_old = monitor is None or _is_old(monitor, now_ns)
    return [] if monitor is None or is_old else [finding for finding in monitor.findings if finding.kind != SILENT_KIND]


def _is_old(monitor: MonitorStatus, now_ns: int) -> bool:
    return now_ns - monitor.time_ns > _OLD_MONITOR_NS


def _each_once(
    by_monitor: Sequence[Finding], by_steps: Sequence[Finding], *, is_judged: bool
) -> Iterator[ShownFinding]:
    """Yield each finding once: what the monitor and the steps shown say, as the closer comparison of the steps says."""
    rest, both = list(by_steps), list[Finding]()
    for told in by_monitor:
        if any(_is_same(closer, told) for closer in both):
            continue
        closer = next((finding for finding in rest if _is_same(finding, told)), None)
        if closer is not None:
            rest.remove(closer)
            both.append(closer)
            yield ShownFinding(structs.replace(beginning_as(closer, told), id=told.id), BOTH)
        elif is_judged and told.kind == SLOW:
            yield ShownFinding(structs.replace(told, evidence=f"{told.evidence} {_NOT_SEEN}"), MONITOR)
        else:
            yield ShownFinding(told, MONITOR)
    yield from (ShownFinding(finding, STEPS_SHOWN) for finding in rest)


def _is_same(finding: Finding, told: Finding) -> bool:
    if finding.kind != told.kind:
        return False
    if finding.kind == NOT_JUDGED:
        return finding.evidence == told.evidence
    if finding.kind != SLOW:
        return finding.id == told.id and finding.kind != HANG  # of which the monitor knows more
    if finding.cause in OF_DIVISION or told.cause in OF_DIVISION or JOB in (finding.place, told.place):
        return (finding.cause, finding.who) == (told.cause, told.who)
    if HOST in (finding.place, told.place) and finding.host == told.host:
        return True
    return not {*finding.ranks}.isdisjoint(told.ranks)


def _notes(
    run: Run,
    rows: Sequence[RankRow],
    endings: Mapping[int, Ending],
    steps: StepRange | None,
    analysis: Analysis | None,
    quiet: Quiet | None,
    now_ns: int,
    monitor: MonitorStatus | None,
) -> Iterator[str]:
    silent = [rank for rank, ending in endings.items() if ending.state == SILENT]
    if silent:
        longest = max(endings[rank].behind_ns or 0 for rank in silent)
        dead = [rank for rank in silent if endings[rank].process == GONE]
        why = f"; the process of {format_ranks(dead)} is gone" if dead else ""
        suspended = [rank for rank in silent if endings[rank].process == SUSPENDED]
        why += f"; that of {format_ranks(suspended)} is suspended (SIGSTOP or a debugger)" if suspended else ""
        yield f"SILENT: {format_ranks(silent)} wrote nothing for {format_duration(longest)}{why}."
    if all(ending.state == ENDED for ending in endings.values()):
        yield "The run has ended: these are its last steps."
    elif stopped := [rank for rank, ending in endings.items() if ending.state == STOPPED]:
        yield (
            f"STOPPED: no rank writes any more, and {format_ranks(stopped)} did not end cleanly: killed or crashed. "
            f"See commtrace doctor {run.path}"
        )
    elif quiet is not None and quiet.pauses:
        usual = f"a step takes {format_duration(quiet.step_ns)}"
        yield f"No step has ended for {format_duration(now_ns - quiet.since_ns)} ({usual}): {quiet.pauses}"
    yield from _attempts(run, steps)
    if steps is None:
        yield "No step has ended on all ranks yet, or nothing marks steps: with commtrace.step(i): …"
    elif analysis is None:
        yield f"None of the steps {steps} was recorded in detail by all ranks: only their lengths are known."
    behind = [row.rank for row in rows if steps and 0 <= row.last_step < steps.first]
    if behind:
        yield f"{format_ranks(behind).capitalize()} ended none of the steps shown."
    dropped = sum(row.dropped or 0 for row in rows)
    if dropped:
        yield f"{dropped} spans of the steps shown were dropped: the parts of these ranks are too small."
    if analysis is not None and analysis.alignment.refused is not None:
        yield "The hosts' clocks could not be aligned: waiting between hosts cannot be separated from transfer."
    if monitor is not None and _is_old(monitor, now_ns):
        yield f"The monitor last reported {format_duration(now_ns - monitor.time_ns)} ago."
    yield from run.problems
