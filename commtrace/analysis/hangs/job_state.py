"""Whether a job goes on, hangs, or has ended, for commands that read how fast it was.

>>> state_of_job(run, now_ns=time.time_ns()).words                        # doctest: +SKIP
'hangs since 2026-11-23 14:03:22 UTC'
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from commtrace.analysis.clocks.time_of_day import date_and_time, step_end_ns
from commtrace.analysis.hangs.diagnosis import Diagnosis
from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.job_end import RUNNING, end_words, how_it_ended
from commtrace.analysis.hangs.no_progress import latest_advance_ns
from commtrace.analysis.hangs.rank_state import find_endings
from commtrace.analysis.steps.progress import last_ended_step
from commtrace.errors import CommtraceError
from commtrace.findings.finding import FAILED, HANG, SILENT, STOPS, Finding
from commtrace.trace import schema
from commtrace.trace.files.reader import load_newest
from commtrace.trace.processes import AskProcess, unknown_process
from commtrace.trace.run import Run

HANGING: Final = "hangs"

_TOLD: Final = (FAILED, HANG, SILENT)


@dataclass(frozen=True, slots=True)
class JobState:
    """What a job does now, or how it ended."""

    state: str  # HANGING, or one of job_end.STATES
    words: str  # ``running``, ``hangs since …``, ``hung, cut off: ranks 0–3``, ``failed: RuntimeError on rank 1``
    findings: tuple[Finding, ...]  # what failed, hangs or is silent, the cause first

    @property
    def stop(self) -> Finding | None:
        """Return why the job makes no progress; None if it does, or has ended well."""
        return next((finding for finding in self.findings if finding.kind in STOPS), None)


def state_of_job(recorded: Run, *, now_ns: int, ask: AskProcess = unknown_process) -> JobState:
    """Return what the job of a run does now, from the newest files of its ranks.

    Args:
        recorded: the run, or an outline of it; its own rows are examined where its files are not the newest.
        now_ns: epoch ns.
        ask: for the process that recorded a rank.
    """
    run = _newest(recorded)
    return state_of_examined(run, examine(run, now_ns=now_ns, ask=ask), now_ns=now_ns, ask=ask, path=recorded.path)


def state_of_examined(
    run: Run, diagnosis: Diagnosis, *, now_ns: int, ask: AskProcess = unknown_process, path: Path | None = None
) -> JobState:
    """Return what the job of an examined run does now; ``path`` is where to read it, if that is not the run's own."""
    state, ending = how_it_ended(find_endings(run, now_ns, ask))
    last_step, since_ns = _last_step(run)
    findings = [
        replace(finding, since_step=last_step, since_ns=since_ns) if finding.kind == HANG else finding
        for finding in diagnosis.findings
        if finding.kind in _TOLD
    ]
    hang = next((finding for finding in findings if finding.kind == HANG), None)
    way = f"See where each rank is: commtrace doctor {path or run.path}"
    told = tuple(replace(finding, advice=finding.advice or way) for finding in findings)
    if hang is not None and state == RUNNING:
        since = "" if hang.since_ns is None else f" since {date_and_time(hang.since_ns)}"
        return JobState(HANGING, f"{HANGING}{since}", told)
    return JobState(state, f"hung, {end_words(state, ending)}" if hang else end_words(state, ending), told)


def _newest(recorded: Run) -> Run:
    try:
        newest = load_newest(recorded.path)
    except (CommtraceError, OSError):
        return recorded  # made in memory, or from other files
    is_same = newest.any_metadata.run_id == recorded.any_metadata.run_id
    return newest if is_same and newest.any_metadata.attempt == recorded.any_metadata.attempt else recorded


def _last_step(run: Run) -> tuple[int, int | None]:
    """Return the last step that ended on all ranks, and its end, epoch; −1 and None without one.

    Of one that was not recorded, the time is that at which a rank was last known to go on.
    """
    last = min((last_ended_step(trace) for trace in run.ranks.values()), default=-1)
    if last < 0:
        return last, None
    if any((trace.spans.step[trace.spans.kind == schema.STEP] == last).any() for trace in run.ranks.values()):
        return last, step_end_ns(run, last)
    return last, latest_advance_ns(run)
