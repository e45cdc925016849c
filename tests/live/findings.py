"""Findings of the monitor, for the tests of what shows them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from commtrace.findings.finding import HANG, NOT_JUDGED, SLOW, Finding, Member, finding_id
from commtrace.findings.status import MonitorStatus
from commtrace.live.monitoring.reporting import SILENT_WINDOWS, ReportingRanks
from commtrace.live.monitoring.window import WindowReport

SECOND = 1_000_000_000

_RANK_1 = Finding(
    id="", kind=SLOW, place="ranks", cause="compute", since_ns=5 * SECOND, since_step=30, cost_ns=12e6, share=0.12,
    gpu_hours_per_day=1.0, evidence="Evidence.", advice="Do this.",
)  # fmt: skip


def slow_finding(rank: int = 1, **changes: Any) -> Finding:
    """A rank that is slow in all that it computes."""
    finding = replace(
        _RANK_1,
        who=f"rank {rank} on node0",
        ranks=(rank,),
        hosts=("node0",),
        members=(Member(rank, "node0", 12e6),),
    )
    finding = replace(finding, **changes)
    return replace(finding, id=finding_id(finding.kind, finding.place, finding.cause, finding.ranks))


def silent_finding(rank: int = 3, since_ns: int = SECOND) -> Finding:
    """A rank that was last heard at ``since_ns``, as the monitor says it."""
    reporting, heard_at = ReportingRanks(1.0), since_ns / SECOND
    reporting.hear(WindowReport(rank, "node0", 0, 1), heard_at)
    reporting.changes(heard_at + SILENT_WINDOWS + 1.0)
    (finding,) = reporting.findings
    return finding


def hang_finding(evidence: str = "Training has stopped.") -> Finding:
    return Finding(id=HANG, kind=HANG, place="ranks", who="rank 2", ranks=(2,), evidence=evidence, advice="Look.")


def not_judged(reason: str, number: int = 0) -> Finding:
    return Finding(id=f"not_judged/{number}", kind=NOT_JUDGED, evidence=reason)


def status(*findings: Finding) -> MonitorStatus:
    """A job of eight ranks that all report."""
    return MonitorStatus(
        time_ns=5 * SECOND, world_size=8, ranks_heard=8, step_ns=100_000_000, last_step=3, findings=findings
    )
