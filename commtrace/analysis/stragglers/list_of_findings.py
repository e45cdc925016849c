"""The findings of a run's steps: one list for every command.

>>> run = open_run("commtrace-runs/my-run")                                 # doctest: +SKIP
>>> findings_of_run(run, run.measure(measure_work).result)[0].line()        # doctest: +SKIP
'rank 1 on vm, slow forward: 224 ms per step (62.9% of it)'
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Final

from msgspec.structs import replace

from commtrace.analysis.hangs.job_state import state_of_job
from commtrace.analysis.matching.operations import ONLY_KERNELS
from commtrace.analysis.replay.scenarios import Replay
from commtrace.analysis.stragglers.awaited import AwaitedRank
from commtrace.analysis.stragglers.baseline import HealthyRun
from commtrace.analysis.stragglers.lost_time import LostTime, lost_findings, lost_time, scenarios_of_lost_time
from commtrace.analysis.stragglers.search import Judgement, MeasuredWork, judge_stragglers
from commtrace.analysis.windows.run import OpenedRun
from commtrace.findings.causes import JOB, TRANSFER
from commtrace.findings.finding import LOST, Finding, not_judged, ranked
from commtrace.trace.processes import process_state

NO_STEPS: Final = "No step was recorded in full, so nothing can be compared."


def findings_of_run(run: OpenedRun, measured: MeasuredWork, baseline: HealthyRun | None = None) -> tuple[Finding, ...]:
    """Return what stops the job, what slows the steps that count, lost time, and what could not be judged."""
    stops = state_of_job(run.recorded, now_ns=time.time_ns(), ask=process_state).findings
    return ranked([*stops, *_of_steps(run, measured, baseline)])


def _of_steps(run: OpenedRun, measured: MeasuredWork, baseline: HealthyRun | None) -> tuple[Finding, ...]:
    if not run.steps.used:
        return (not_judged(JOB, NO_STEPS),)
    work = measured.joined()
    if work.why_not == ONLY_KERNELS:
        return (not_judged(JOB, ONLY_KERNELS),)
    replay = run.replay(work.steps) if work.steps else None
    judgement = judge_stragglers(run.aligned, work, replay, baseline=baseline)
    return with_lost_time(judgement, lost_beside(judgement, work, replay))


def lost_beside(judgement: Judgement, work: MeasuredWork, replay: Replay | None) -> LostTime | None:
    """Return the time lost beside what was found; None if steps cannot be replayed, or their clocks do not agree."""
    steps = work.steps
    if steps is None or replay is None or not work.clocks_agree:
        return None
    return lost_time(steps, replay.replay(scenarios_of_lost_time(steps)), judgement.slow)


def with_lost_time(judgement: Judgement, lost: LostTime | None) -> tuple[Finding, ...]:
    """Return the list of what was found, of the time that is lost beside it, and of what could not be judged."""
    if lost is None:
        return judgement.findings
    slow = [
        replace(finding, part_ns=ns / lost.num_steps)
        for finding, ns in zip(judgement.slow, lost.of_findings, strict=True)
    ]
    return ranked([*slow, *lost_findings(lost, judgement.slow), *judgement.not_judged])


_SMALLEST_SHARE: Final = 0.01
"""Of the stalls, from which a role is told."""


def with_roles(findings: Iterable[Finding], transfer_ns: Mapping[str, float]) -> tuple[Finding, ...]:
    """Return the list with the roles of exposed communication; ``transfer_ns`` is, by role, stalled on it per step.

    Shares, as the loss is what a replay saves without transfers, and so not the sum of these stalls.
    """
    total = sum(transfer_ns.values())
    longest = sorted(((ns / total, role) for role, ns in transfer_ns.items() if total and ns > 0), reverse=True)
    roles = ", ".join(f"{role} {share:.0%}" for share, role in longest if share >= _SMALLEST_SHARE)
    return tuple(
        replace(finding, evidence=f"Of the time that ranks stall on transfers: {roles}.")
        if finding.kind == LOST and finding.cause == TRANSFER and roles
        else finding
        for finding in findings
    )


def with_reasons(awaited: Iterable[AwaitedRank], findings: Sequence[Finding]) -> tuple[AwaitedRank, ...]:
    """Return the ranks that others waited for, each with the finding that names it, and its advice."""
    return tuple(
        next(
            (replaced(rank, because=one.id, advice=one.advice) for one in findings if rank.rank in one.ranks),
            rank,
        )
        for rank in awaited
    )
