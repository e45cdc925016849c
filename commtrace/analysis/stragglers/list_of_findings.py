"""The findings of a run's steps: one list for every command.

>>> run = open_run("commtrace-runs/my-run")                                 # doctest: +SKIP
>>> findings_of_run(run, run.measure(measure_work).result)[0].line()        # doctest: +SKIP
'rank 1 on vm, slow forward: 224 ms per step (62.9% of it)'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from commtrace.analysis.matching.operations import ONLY_KERNELS
from commtrace.analysis.stragglers.awaited import AwaitedRank
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.analysis.stragglers.search import MeasuredWork, judge_stragglers
from commtrace.analysis.stragglers.verdict import Verdict
from commtrace.analysis.windows.run import LargeRun, WholeRun
from commtrace.findings.causes import JOB, OF_DIVISION, PART_OF_LOSS, advice
from commtrace.findings.finding import LOST, NOT_JUDGED, SLOW, Finding, Member, Stretch, finding_id, hosts_of, ranked

NO_STEPS: Final = "No step was recorded in full, so nothing can be compared."


def findings_of_run(run: WholeRun | LargeRun, measured: MeasuredWork) -> tuple[Finding, ...]:
    """Judge the steps of a run that count, of which the work was measured."""
    if not run.steps.used:
        return list_findings((), (NO_STEPS,))
    work = measured.joined()
    if work.why_not == ONLY_KERNELS:
        return list_findings((), (ONLY_KERNELS,))
    found = judge_stragglers(run.aligned, work, run.replay(work.steps) if work.steps else None)
    return list_findings(found.verdicts, found.abstentions)


def list_findings(
    verdicts: Sequence[Verdict], abstentions: Iterable[str], lost: LostTime | None = None
) -> tuple[Finding, ...]:
    """Return the list of what was found, of the time that is lost beside it, and of what could not be judged."""
    parts = [None] * len(verdicts) if lost is None else [ns / lost.num_steps for ns in lost.of_verdicts]
    slow = [_slow(verdict, part_ns) for verdict, part_ns in zip(verdicts, parts, strict=True)]
    reasons = [
        Finding(id=f"{NOT_JUDGED}/{number}", kind=NOT_JUDGED, evidence=why) for number, why in enumerate(abstentions)
    ]
    return ranked([*slow, *(_lost(lost, slow) if lost else ()), *reasons])


def _slow(verdict: Verdict, part_ns: float | None) -> Finding:
    members = tuple(
        Member(one.rank, one.host, one.excess_ms_per_step * 1e6, _ns(one.share_ms_per_step), _ns(one.alone_ms_per_step))
        for one in verdict.members
    )
    ranks = verdict.ranks
    return Finding(
        id=finding_id(SLOW, verdict.place, verdict.cause, ranks),
        kind=SLOW,
        place=verdict.place,
        cause=verdict.cause,
        who=verdict.who,
        ranks=ranks,
        hosts=hosts_of(members, verdict.cause),
        members=members,
        stretches=tuple(
            Stretch(one.first, one.last, one.cost_ms_per_step * 1e6, one.since_ns, one.until_ns)
            for one in verdict.stretches
        ),
        since_step=verdict.since_step,
        since_first_compared=verdict.since_step == verdict.first_compared_step,
        since_ns=verdict.since_ns,
        cost_ns=verdict.cost_ms_per_step * 1e6,
        cost_is_bound=verdict.cost_is_bound,
        share=verdict.share_of_step,
        part_ns=part_ns,
        gpu_hours_per_day=verdict.gpu_hours_per_day,
        persistence=verdict.persistence,
        evidence=verdict.evidence,
        advice=verdict.next_step,
    )


def _ns(ms: float | None) -> float | None:
    return None if ms is None else ms * 1e6


def _lost(lost: LostTime, slow: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the parts of lost time without what the findings take of them."""
    of_division = sum(one.part_ns or 0.0 for one in slow if one.cause in OF_DIVISION)
    for cause, name in PART_OF_LOSS.items():
        ns = getattr(lost, name) / lost.num_steps - (of_division if name == "imbalance_ns" else 0.0)
        yield Finding(
            id=finding_id(LOST, JOB, cause),
            kind=LOST,
            place=JOB,
            cause=cause,
            cost_ns=ns,
            share=ns * lost.num_steps / lost.steps_ns if lost.steps_ns else None,
            part_ns=ns,
            advice=advice(cause, 0, JOB),
        )


def with_reasons(awaited: Iterable[AwaitedRank], findings: Sequence[Finding]) -> tuple[AwaitedRank, ...]:
    """Return the ranks that others waited for, each with the finding that names it, and its advice."""
    return tuple(
        next(
            (replace(rank, because=one.id, advice=one.advice) for one in findings if rank.rank in one.ranks),
            rank,
        )
        for rank in awaited
    )
