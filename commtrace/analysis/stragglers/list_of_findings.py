"""Put together what was judged of a run's steps: what is slow, the time lost beside it, roles, reasons of waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Final

from msgspec.structs import replace

from commtrace.analysis.stragglers.awaited import AwaitedRank
from commtrace.analysis.stragglers.lost_time import LostTime, lost_findings
from commtrace.analysis.stragglers.search import Judgement
from commtrace.findings.causes import TRANSFER
from commtrace.findings.finding import LOST, Finding, ranked

NO_STEPS: Final = "No step was recorded in full, so nothing can be compared."

_SMALLEST_SHARE: Final = 0.01
"""Of the stalls, from which a role is told."""


def with_lost_time(judgement: Judgement, lost: LostTime | None) -> tuple[Finding, ...]:
    """Return the list of what was found, of the time that is lost beside it, and of what could not be judged."""
    if lost is None:
        return judgement.findings
    slow = [
        replace(finding, part_ns=ns / lost.num_steps)
        for finding, ns in zip(judgement.slow, lost.of_findings, strict=True)
    ]
    return ranked([*slow, *lost_findings(lost, judgement.slow), *judgement.not_judged])


def with_roles(
    findings: Iterable[Finding], transfer_ns: Mapping[str, float], unmatched: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Return the list with the roles of exposed communication, and what is not known of the largest one.

    Shares, as the loss is what a replay saves without transfers, and so not the sum of these stalls.

    Args:
        transfer_ns: by role, stalled on it per step.
        unmatched: by role, a sentence on why waiting in it is not told from transfer.
    """
    total = sum(transfer_ns.values())
    longest = sorted(((ns / total, role) for role, ns in transfer_ns.items() if total and ns > 0), reverse=True)
    if not longest:
        return tuple(findings)
    roles = ", ".join(f"{role} {share:.0%}" for share, role in longest if share >= _SMALLEST_SHARE)
    why_unknown = unmatched.get(longest[0][1])
    return tuple(
        replace(
            finding,
            evidence=f"By role: {roles}" + (" (of the stalls on transfers)." if why_unknown is None else "."),
            advice=finding.advice if why_unknown is None else why_unknown,
        )
        if finding.kind == LOST and finding.cause == TRANSFER
        else finding
        for finding in findings
    )


def with_reasons(awaited: Iterable[AwaitedRank], findings: Sequence[Finding]) -> tuple[AwaitedRank, ...]:
    """Return the ranks that others waited for, each with the finding that names it, and its advice."""
    return tuple(
        next(
            (
                replaced(rank, because=finding.id, advice=finding.advice)
                for finding in findings
                if rank.rank in finding.ranks
            ),
            rank,
        )
        for rank in awaited
    )
