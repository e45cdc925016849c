"""Tell ranks whose host launches too late from ranks whose device is slow (docs/stragglers.md).

Both need longer for the same work. Where the host is late, the device has nothing queued at the ends of that work, and
the time too long lies between such ends.

>>> launches_of(work, 3, {3}).share                              # doctest: +SKIP
0.41
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.replay.scenarios import PromptLaunches, Replay, Scenario
from commtrace.analysis.replay.segments import BETWEEN
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.costs import cost_of, finding_of, stands_out, whole_cost
from commtrace.analysis.stragglers.limits import (
    LATE_IN_STEPS,
    LATER_THAN_OTHERS,
    LAUNCH_BOUND,
    LAUNCH_BOUND_GAPS,
    MOST_OF_EXCESS,
    MOST_OF_PHASE,
)
from commtrace.analysis.stragglers.work_statistics import PHASES, WorkStatistics
from commtrace.findings.causes import CAUSES, JOB, advice
from commtrace.findings.finding import Finding
from commtrace.trace.spans import Bool

LATE: Final = "host"
"""The cause."""


class LaunchLateness(NamedTuple):
    """How some ranks that are slow launch their work, compared with their peers; medians over the steps."""

    phase: str  # a cause that is one; empty: all of them together
    share: float  # of the work, launch-bound: the least of the ranks
    peers_share: float
    excess_ns: float  # launch-bound time per step beyond that of the peers: the least of the ranks
    longer_ns: float  # the work of that rank beyond the work of its peers, per step
    often: float  # share of the steps in which the limits are passed: the least of the ranks

    @property
    def are_late(self) -> bool:
        """Return whether the hosts of all of these ranks are late, and that is why they are slow."""
        return self.often >= LATE_IN_STEPS and self.excess_ns >= MOST_OF_EXCESS * self.longer_ns > 0

    def sentence(self, ranks: Collection[int]) -> str:
        """Return the evidence; empty if neither a late host nor a slow device is evident."""
        work = f"{CAUSES[self.phase].phase}s" if self.phase else "work"
        their, devices, hosts_launch = "its", "its device", "host launches"
        if len(ranks) > 1:
            their, devices, hosts_launch = "their", "their devices", "hosts launch"
        if self.are_late:
            return (
                f"Launch-bound: {devices} had nothing queued at both ends of {self.share:.0%} of {their} {work} (peers "
                f"{self.peers_share:.0%}), {self.excess_ns / 1e6:.1f} ms per step more: the {hosts_launch} too late."
            )
        if self.share < LAUNCH_BOUND / 4:
            return f"Work was queued for {devices} all the time: no host is late."
        return ""


def launches_of(work: WorkStatistics, rank: int, slow: Collection[int]) -> LaunchLateness | None:
    """Compare how a slow rank launches its work with the ranks of its stage that are not ``slow``.

    None if it is not known, or no other rank does the same work.
    """
    table, peers, row = work.table, work.peers, int(np.searchsorted(work.ranks, rank))
    phase = _slow_phase(work, rank)
    is_other = (work.stages == work.stages[row]) & ~np.isin(work.ranks, list(slow))
    chosen, compared = (kind == PHASES[phase] if phase else kind < BETWEEN for kind in (table.kind, peers.kind))
    unknown = work.by_step((chosen & (table.launch_bound_ns < 0)).astype(np.int64)) > 0
    waited = work.by_step(np.where(chosen, np.maximum(table.launch_bound_ns, 0), 0))
    if not is_other.any() or _is_mostly(unknown[row]) or _is_mostly(unknown[is_other]):
        return None
    share = waited / np.maximum(work.by_step(np.where(chosen, table.work_ns, 0)), 1.0)
    peers_share = np.median(share[is_other], axis=0)
    passes = (share[row] >= LAUNCH_BOUND) & (share[row] >= LATER_THAN_OTHERS * peers_share)
    return LaunchLateness(
        phase=phase,
        share=float(np.median(share[row])),
        peers_share=float(np.median(peers_share)),
        excess_ns=float(np.median(waited[row]) - np.median(waited[is_other])),
        longer_ns=float(peers.excess_ns[(peers.rank == rank) & compared].sum()),
        often=float(passes.mean()),
    )


def least(launches: Iterable[LaunchLateness | None]) -> LaunchLateness | None:
    """Return those of several ranks that show least; None if any is not known."""
    listed = list(launches)
    known = [lateness for lateness in listed if lateness is not None]
    if not known or len(known) < len(listed):
        return None
    return min(known, key=lambda lateness: (lateness.are_late, lateness.share))


def _slow_phase(work: WorkStatistics, rank: int) -> str:
    """Return the phase that has nearly all of what a rank works too long in phases; empty if none has."""
    peers = work.peers
    excess = {
        phase: peers.excess_ns[(peers.rank == rank) & (peers.kind == kind)].sum() for phase, kind in PHASES.items()
    }
    return next((phase for phase, ns in excess.items() if 0 < MOST_OF_PHASE * sum(excess.values()) <= ns), "")


def launch_bound_job(work: WorkStatistics, replay: Replay, normal: Scenario) -> Finding | None:
    """Return the finding on a job whose typical device waits for its host, whether or not ranks are slow beside others.

    What lies between phases costs what a replay without it saves, on top of the scenario ``normal``. How long devices
    do nothing inside of phases is not known: where only that is much, the cost is an upper bound.
    """
    table = work.table
    if not (table.launch_bound_ns > 0).any():
        return None
    waited, all_work = (work.by_step(np.maximum(ns, 0)) for ns in (table.launch_bound_ns, table.work_ns))
    share = np.median(waited / np.maximum(all_work, 1.0), axis=0)
    often = share >= LAUNCH_BOUND
    gaps = cost_of(work, replay.saved_ns(Scenario(work=(PromptLaunches(only_between=True),)), normal))
    has_gaps = stands_out(work, gaps) and gaps.share >= LAUNCH_BOUND_GAPS
    if not has_gaps and often.mean() < LATE_IN_STEPS:
        return None
    most = cost_of(work, replay.saved_ns(Scenario(work=(PromptLaunches(only_between=False),)), normal))
    cost = gaps if has_gaps else most
    if not stands_out(work, cost):
        return None
    more_ns = most.ns - gaps.ns if has_gaps else None
    return finding_of(
        JOB,
        LATE,
        "launch-bound work",
        whole_cost(work, cost),
        evidence=_evidence_of_job(work, float(np.median(share)), more_ns),
        advice=advice(LATE, 0, JOB),
        is_bound=not has_gaps,
    )


def is_launch_bound_job(finding: Finding) -> bool:
    """Return whether a finding is that of :func:`launch_bound_job`: no rank is slow beside others."""
    return finding.cause == LATE and finding.place == JOB


def _evidence_of_job(work: WorkStatistics, share: float, more_ns: float | None) -> str:
    """Return the evidence; ``more_ns`` is the most that is lost inside of phases, if the cost is that of gaps."""
    shares = [(name, part) for name, part in _shares_of_phases(work) if part >= LAUNCH_BOUND_GAPS]
    phases = ", ".join(f"{part:.0%} of the {name}" for name, part in shares)
    evidence = f"Launch-bound: the typical device waited for its host in {share:.0%} of its work"
    evidence += f" ({phases}). " if phases else ". "
    if more_ns is None:
        return evidence + "How much of that time it did nothing is not known: the cost is an upper bound."
    evidence += "The cost is that of gaps before phases, in no span, after which nothing was queued"
    most = f"; inside of phases it is at most {more_ns / 1e6:.1f} ms per step more" if more_ns >= 50_000 else ""
    return f"{evidence}{most}."


def _shares_of_phases(work: WorkStatistics) -> Iterator[tuple[str, float]]:
    """Yield the share of each phase, and of the time between phases, that is launch-bound on the typical rank."""
    table = work.table
    masks = {name: table.kind == kind for name, kind in PHASES.items()} | {"time between phases": table.kind >= BETWEEN}
    for name, chosen in masks.items():
        waited, whole = (
            work.by_step(np.where(chosen, np.maximum(ns, 0), 0)).sum(axis=1)
            for ns in (table.launch_bound_ns, table.work_ns)
        )
        yield name, float(np.median(waited / np.maximum(whole, 1.0)))


def _is_mostly(mask: Bool | Float64) -> bool:
    return bool(np.mean(mask) > 0.5)
