"""The losses of steps that cannot be replayed, from the states of their ranks: findings as a replay gives them.

>>> [loss.line() for loss in losses_of_states(ranks)]                # doctest: +SKIP
['exposed dp communication: 40 ms per step (40.0% of it)']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.breakdown.states import (
    BETWEEN_STEPS,
    BUBBLE,
    CHECKPOINT,
    DATA,
    GC,
    IDLE,
    MEMORY,
    OTHER,
    TRANSFER,
    WAIT,
)
from commtrace.analysis.step_totals import SummedSteps
from commtrace.analysis.stragglers.awaited import AwaitedRank
from commtrace.analysis.stragglers.costs import occurrence
from commtrace.findings import causes
from commtrace.findings.causes import JOB, LOSSES, advice
from commtrace.findings.finding import LOST, WORTH_NAMING, Finding, finding_id, not_judged
from commtrace.trace import schema

ONLY_DUMPS: Final = (
    "Dumps show what was in flight, not where the time went: commtrace doctor says where the job hangs, and who has "
    "not arrived."
)

_SAY_NOTHING_OF_WORK: Final = frozenset(
    schema.KINDS[kind] for kind in (schema.STEP, schema.MARK, schema.COLLECTIVE, schema.P2P, schema.STALL)
)
_MUCH_UNKNOWN: Final = 0.05
"""Smallest share of the step outside all spans that is told beside the parts of a replay."""

_MOST: Final = 0.5
"""Share of the rest that is called by its largest part."""

_OF_THE_REST: Final = (causes.CHECKPOINT, causes.GC, "idle", "memory", "between")

_OF_STATES: Final = (
    (BUBBLE, "schedule"),
    (DATA, causes.DATA),
    (CHECKPOINT, causes.CHECKPOINT),
    (GC, causes.GC),
    (IDLE, "idle"),
    (MEMORY, "memory"),
    (BETWEEN_STEPS, "between"),
)
"""States of ranks, and the cause of each."""


def losses_of_states(
    ranks: Sequence[RankMean],
    unmatched: Mapping[str, str] | None = None,
    *,
    awaited: Sequence[AwaitedRank] = (),
    steps: SummedSteps | None = None,
    captured: Mapping[str, int] | None = None,
) -> tuple[Finding, ...]:
    """Return each loss of the mean step, in no order, and why some of it is not known.

    What one rank waits for another counts as exposed communication: without a replay nobody is named for it.

    Args:
        unmatched: reasons by role, see :class:`commtrace.analysis.communication.table.UnmatchedSums`.
        awaited: who was waited for, longest first.
        steps: separate a loss that happened once from one of every step.
        captured: the number of recorded rows by kind.
    """
    wall = sum(rank.wall_ns for rank in ranks)
    if not wall:
        return (not_judged(JOB, "The steps have no length: there is nothing to judge."),) if ranks else ()
    found = [*_of_states(ranks, captured or {}), *_exposed(ranks, unmatched or {}, awaited)]
    losses = [_measured(loss, kinds, role, ranks, steps) for loss, kinds, role in found]
    return tuple(loss for loss in losses if (loss.share or 0.0) >= WORTH_NAMING)


def time_outside_spans(
    ranks: Sequence[RankMean], steps: SummedSteps, captured: Mapping[str, int]
) -> tuple[Finding, ...]:
    """Return the time outside all spans, if it is much: a replay counts it as work that is ideal."""
    loss = replace(_loss("no_span", len(ranks)), evidence=_what_is_in_no_span(ranks, captured), part_ns=0.0)
    if not any(rank.wall_ns for rank in ranks):
        return ()
    measured = _measured(loss, (OTHER,), None, ranks, steps)
    return (measured,) if (measured.share or 0.0) >= _MUCH_UNKNOWN else ()


def with_largest_of_the_rest(
    findings: Sequence[Finding], ranks: Sequence[RankMean], steps: SummedSteps
) -> tuple[Finding, ...]:
    """Return the list with what most of the rest of the lost time is, in which steps, and what to do about it."""
    if not any(rank.wall_ns for rank in ranks):
        return tuple(findings)
    states = [_measured(loss, kinds, role, ranks, steps) for loss, kinds, role in _of_states(ranks, ())]
    largest = max(
        (loss for loss in states if loss.cause in _OF_THE_REST), key=lambda loss: loss.cost_ns or 0.0, default=None
    )
    if largest is None:
        return tuple(findings)
    return tuple(
        replace(
            finding,
            who=largest.words,
            advice=largest.advice,
            occurrence=largest.occurrence,
            evidence="With evaluation, launches, and the rest.",
        )
        if finding.cause == "rest" and (largest.cost_ns or 0.0) >= _MOST * max(finding.cost_ns or 0.0, 1.0)
        else finding
        for finding in findings
    )


def _loss(cause: str, num_ranks: int) -> Finding:
    return Finding(
        id=finding_id(LOST, JOB, cause), kind=LOST, place=JOB, cause=cause, advice=advice(cause, num_ranks, JOB)
    )


def _measured(
    loss: Finding, kinds: Sequence[str], role: str | None, ranks: Sequence[RankMean], steps: SummedSteps | None
) -> Finding:
    total_ns = sum(rank.exposed_in(role).total_ns if role else sum(map(rank.total, kinds)) for rank in ranks)
    when = None
    if steps is not None and total_ns:
        ns = np.sum([steps.total(kind, role) for kind in kinds], axis=0)
        when = occurrence(steps.step.tolist(), ns / max(steps.num_ranks, 1))
    return replace(
        loss,
        cost_ns=total_ns / len(ranks),
        share=total_ns / sum(rank.wall_ns for rank in ranks),
        occurrence=when if when is not None and when.is_rare else None,
    )


def _of_states(
    ranks: Sequence[RankMean], captured: Iterable[str]
) -> Iterator[tuple[Finding, Sequence[str], str | None]]:
    for kind, cause in _OF_STATES:
        yield _loss(cause, len(ranks)), (kind,), None
    yield replace(_loss("no_span", len(ranks)), evidence=_what_is_in_no_span(ranks, captured)), (OTHER,), None


def _what_is_in_no_span(ranks: Sequence[RankMean], captured: Iterable[str]) -> str:
    if any(rank.total(OTHER) != rank.wall_ns for rank in ranks):
        return "It is no communication that was seen."
    beside = [kind for kind in captured if kind not in _SAY_NOTHING_OF_WORK]
    if beside:
        return (
            f"Spans of kind {' and '.join(beside)} were recorded, but none that says when a rank computes or waits: "
            "how the time divides is not known."
        )
    if any(rank.hidden_ns for rank in ranks):
        return "Only communication was recorded: what else the ranks did is not known."
    return "Nothing but steps was recorded: neither what computes nor what communicates, so it may be either."


def _exposed(
    ranks: Sequence[RankMean], unmatched: Mapping[str, str], awaited: Sequence[AwaitedRank]
) -> Iterator[tuple[Finding, Sequence[str], str | None]]:
    for role in sorted({role for rank in ranks for role in rank.exposed}):
        parts = [rank.exposed_in(role) for rank in ranks]
        wait, transfer = sum(part.wait_ns for part in parts), sum(part.transfer_ns for part in parts)
        loss = _loss(causes.TRANSFER, len(ranks))
        loss = replace(loss, id=f"{loss.id}/{role}", who=f"exposed {role} communication")
        if role in unmatched:
            loss = replace(loss, evidence=unmatched[role])
        elif wait > transfer:
            waiting = f"{wait / (wait + transfer):.0%} of it is {LOSSES['waiting'].words}"
            who, what_to_do = _most_awaited(awaited, len(ranks))
            loss = replace(loss, evidence=f"{waiting}{who}.", advice=what_to_do)
        else:
            loss = replace(loss, evidence="Most of it is transfer.")
        yield loss, (WAIT, TRANSFER), role


def _most_awaited(awaited: Sequence[AwaitedRank], num_ranks: int) -> tuple[str, str]:
    """Return the rank that stands out among those waited for, with its activity meanwhile, and what to do."""
    if not awaited or not awaited[0].stands_out:
        return "", advice("waiting", num_ranks, JOB)
    return f", most of all {awaited[0].describe()}", awaited[0].next_step
