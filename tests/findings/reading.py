"""What tests make of findings, and read of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commtrace.findings.finding import NOT_JUDGED, SLOW, Finding, Member, finding_id, hosts_of


def slow(cost_ms: float, cause: str = "compute", rank: int = 1, host: str = "beta", **changes: Any) -> Finding:
    """One slow rank."""
    members = changes.pop("members", (Member(rank, host, cost_ms * 1e6),))
    ranks = tuple(member.rank for member in members)
    fields: dict[str, Any] = {
        "place": "ranks", "cause": cause, "who": f"rank {rank} on {host}", "ranks": ranks, "members": members,
        "hosts": hosts_of(members, cause), "cost_ns": cost_ms * 1e6, "share": 0.1, "gpu_hours_per_day": 0.0,
        "persistence": 1.0, "since_step": 1,
    }  # fmt: skip
    fields |= changes
    return Finding(id=finding_id(SLOW, fields["place"], cause, ranks), kind="slow", **fields)


def ms(time_ns: float | None) -> float:
    assert time_ns is not None
    return time_ns / 1e6


def why_not(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The reasons of what was not judged."""
    return tuple(finding.evidence for finding in findings if finding.kind == NOT_JUDGED)


def in_json(answer: Any, kind: str = SLOW) -> list[dict[str, Any]]:
    """The findings of a kind in the output of ``--json``."""
    return [finding for finding in answer["findings"] if finding["kind"] == kind]


def said(findings: Iterable[Finding | dict[str, Any]]) -> list[str]:
    """The sentences of findings, or of those in the output of ``--json``."""
    return [one.evidence if isinstance(one, Finding) else one["evidence"] for one in findings]
