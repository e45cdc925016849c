"""The sentence of a summary on the largest loss, and where to look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.breakdown.states import (
    BUBBLE,
    CHECKPOINT,
    DATA,
    GC,
    IDLE,
    MEMORY,
    OTHER,
    REPLAY,
    TRANSFER,
    WAIT,
)
from commtrace.analysis.clocks.time_of_day import date_and_time
from commtrace.analysis.step_totals import SummedSteps
from commtrace.analysis.stragglers.awaited import AwaitedRank
from commtrace.analysis.stragglers.costs import occurrence
from commtrace.analysis.stragglers.late_hosts import is_launch_bound_job
from commtrace.findings.causes import CAUSES, JOB, LOSSES, PAUSES, advice, format_cause
from commtrace.findings.causes import CHECKPOINT as SAVING
from commtrace.findings.causes import DATA as INPUT
from commtrace.findings.causes import GC as COLLECTING
from commtrace.findings.finding import Finding, Occurrence, Stretch
from commtrace.trace import schema

_WORTH_A_LOOK: Final = 0.05
"""Smallest share of the step that is singled out."""

ONLY_DUMPS: Final = (
    "Dumps show what was in flight, not where the time went: commtrace doctor says where the job hangs, and who has "
    "not arrived."
)

_SAY_NOTHING_OF_WORK: Final = frozenset(
    schema.KINDS[kind] for kind in (schema.STEP, schema.MARK, schema.COLLECTIVE, schema.P2P, schema.STALL)
)


_OF_STATES: Final = (
    (BUBBLE, "schedule", LOSSES["schedule"].words),
    (DATA, INPUT, CAUSES[INPUT].activity),
    (CHECKPOINT, SAVING, CAUSES[SAVING].activity),
    (GC, COLLECTING, CAUSES[COLLECTING].words),
    (IDLE, "idle", LOSSES["idle"].words),
    (MEMORY, "memory", LOSSES["memory"].words),
)
"""States of ranks, the cause of each, and what the sentence calls it."""


class _Loss(NamedTuple):
    time_ns: float
    what: str
    look_at: str
    kinds: tuple[str, ...]
    role: str | None = None


def verdict(
    ranks: Sequence[RankMean],
    slow: Sequence[Finding],
    unmatched: Mapping[str, str] | None = None,
    *,
    awaited: Sequence[AwaitedRank] = (),
    steps: SummedSteps | None = None,
    captured: Mapping[str, int] | None = None,
    stop: Finding | None = None,
    lost: Sequence[Finding] = (),
) -> str:
    """Return what holds up the job and its largest loss, and where to look.

    A job that has stopped loses nothing else that matters now. A rank that holds up the others comes next: their wait
    is only its echo. ``lost`` is the time that nobody is to blame for, the largest part first. ``unmatched`` has
    reasons by role, see :class:`commtrace.analysis.communication.table.UnmatchedSums`; ``steps`` separate a loss that
    happened once; ``captured`` has the number of rows by kind.
    """
    if stop is not None:
        return f"{stop.line()} {stop.advice}"
    wall = sum(rank.wall_ns for rank in ranks)
    if not wall:
        none = "The steps have no length" if ranks else "No step was recorded by all ranks"
        return f"{none}: there is nothing to judge."
    if slow:
        return _slow_sentence(max(slow, key=lambda finding: finding.cost_ns or 0.0)) + _lost_besides(lost)
    replayed = sum(rank.total(REPLAY) for rank in ranks) / wall
    return _replayed_sentence(replayed) + _loss_sentence(ranks, unmatched or {}, awaited, steps, captured or {}, wall)


def _replayed_sentence(share: float) -> str:
    if share < _WORTH_A_LOOK:
        return ""
    return (
        f"{share:.0%} of the step is replayed from CUDA graphs that communicate: how much of it is compute, and how "
        "much exposed communication, is not known. In the rest: "
    )


def _lost_besides(lost: Sequence[Finding]) -> str:
    largest = lost[0] if lost else None
    if largest is None or (largest.share or 0.0) < _WORTH_A_LOOK:
        return ""
    return " " + " ".join(filter(None, (f"Largest loss besides: {largest.line()}.", largest.evidence, largest.advice)))


def _loss_sentence(
    ranks: Sequence[RankMean],
    unmatched: Mapping[str, str],
    awaited: Sequence[AwaitedRank],
    steps: SummedSteps | None,
    captured: Mapping[str, int],
    wall: int,
) -> str:
    worst = max(_losses(ranks, unmatched, awaited, captured), key=lambda loss: loss.time_ns)
    share = worst.time_ns / wall
    if not worst.time_ns:
        return "The ranks compute all the time: there is no loss to name."
    if share < _WORTH_A_LOOK:
        return f"The ranks compute; the largest loss is {worst.what} with {share:.1%} of the step. Nothing stands out."
    when = None if steps is None else _occurrence(steps, worst)
    if when is not None and when.is_rare:
        return f"Largest loss: {worst.what}, {when.describe()}, {share:.1%} of the time of all steps. {worst.look_at}"
    return f"Largest loss: {worst.what}, {share:.1%} of the step ({_ms(worst.time_ns / len(ranks))}). {worst.look_at}"


def _occurrence(steps: SummedSteps, loss: _Loss) -> Occurrence:
    ns = np.sum([steps.total(kind, loss.role) for kind in loss.kinds], axis=0)
    return occurrence(steps.step.tolist(), ns / max(steps.num_ranks, 1))


def _slow_sentence(straggler: Finding) -> str:
    cost_ns, cause, share = straggler.cost_ns or 0.0, format_cause(straggler.cause), straggler.share or 0.0
    named = straggler.who[:1].upper() + straggler.who[1:]
    if straggler.occurrence is not None:
        were = "were" if straggler.who.startswith("ranks") else "was"
        why = f", which {were} {CAUSES[straggler.cause].activity}," if straggler.cause in PAUSES else f" ({cause})"
        return f"{named}{why} held up the others {straggler.occurrence.describe()}. {straggler.advice}"
    if is_launch_bound_job(straggler):
        return (
            f"The devices wait for their hosts (launch-bound): it costs {'at most ' if straggler.cost_is_bound else ''}"
            f"{_ms(cost_ns)} of every step, {share:.1%} of it. {straggler.advice}"
        )
    who = "Now one rank, now another" if straggler.rank < 0 else named
    if straggler.stretches:
        when = " and ".join(f"{one.first}–{one.last}{_at(one)}" for one in straggler.stretches)
        costliest = max(one.cost_ns for one in straggler.stretches)
        most = "" if len(straggler.stretches) == 1 else "up to "
        return (
            f"{who} held up the others ({cause}) in steps {when}: it cost {most}{_ms(costliest)} of each, "
            f"{share:.1%} of all steps. {straggler.advice}"
        )
    hold = "hold" if who.startswith(("Ranks", "Stages")) else "holds"
    return (
        f"{who} {hold} up the others ({cause}): it costs {_ms(cost_ns)} of every step, "
        f"{share:.1%} of it. {straggler.advice}"
    )


def _at(stretch: Stretch) -> str:
    if stretch.since_ns is None or stretch.until_ns is None:
        return ""
    return f" ({date_and_time(stretch.since_ns, stretch.until_ns)})"


def _losses(
    ranks: Sequence[RankMean], unmatched: Mapping[str, str], awaited: Sequence[AwaitedRank], captured: Iterable[str]
) -> list[_Loss]:
    def over_ranks(kind: str) -> int:
        return sum(rank.total(kind) for rank in ranks)

    return [
        *(_Loss(over_ranks(kind), what, advice(cause, len(ranks), JOB), (kind,)) for kind, cause, what in _OF_STATES),
        _Loss(over_ranks(OTHER), "time outside all spans", _what_is_in_no_span(ranks, captured), (OTHER,)),
        *_exposed(ranks, unmatched, awaited),
    ]


def _what_is_in_no_span(ranks: Sequence[RankMean], captured: Iterable[str]) -> str:
    if any(rank.total(OTHER) != rank.wall_ns for rank in ranks):
        return "It is no communication that was seen; name it with commtrace.span to see what it is."
    beside = [kind for kind in captured if kind not in _SAY_NOTHING_OF_WORK]
    if beside:
        return (
            f"Spans of kind {' and '.join(beside)} were recorded, but none that says when a rank computes or waits: "
            "how the time divides is not known."
        )
    if any(rank.hidden_ns for rank in ranks):
        return "Only communication was recorded: what else the ranks did is not known."
    return "Nothing but steps was recorded: neither what computes nor what communicates, so it may be either."


def _exposed(ranks: Sequence[RankMean], unmatched: Mapping[str, str], awaited: Sequence[AwaitedRank]) -> list[_Loss]:
    losses = []
    for role in sorted({role for rank in ranks for role in rank.exposed}):
        parts = [rank.exposed_in(role) for rank in ranks]
        wait, transfer = sum(part.wait_ns for part in parts), sum(part.transfer_ns for part in parts)
        if role in unmatched:
            look_at = unmatched[role]
        elif wait > transfer:
            waiting = f"{wait / (wait + transfer):.0%} of it is {LOSSES['waiting'].words}"
            look_at = waiting + _most_awaited(awaited, len(ranks))
        else:
            look_at = f"Most of it is transfer. {advice('transfer', len(ranks), JOB)}"
        what = f"exposed {role} communication"
        losses.append(_Loss(wait + transfer, what, look_at, (WAIT, TRANSFER), role))
    return losses


def _most_awaited(awaited: Sequence[AwaitedRank], num_ranks: int) -> str:
    """Return the rank that stands out among those waited for, and its activity meanwhile."""
    if not awaited or not awaited[0].stands_out:
        return f". {advice('waiting', num_ranks, JOB)}"
    return f", most of all {awaited[0].describe()}. {awaited[0].next_step}"


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.3g} ms" if time_ns < 1e8 else f"{time_ns / 1e6:.0f} ms"
