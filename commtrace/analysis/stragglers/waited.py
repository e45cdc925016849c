"""For whom the others waited most, and why that one is not called a straggler: what is said where nobody is named."""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.analysis.matching.match import Matches, blame_ns
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.slow_ranks import (
    DATA,
    GC,
    WORK,
    SlowRanks,
    at_normal_speed,
    least_share_of_work,
    work_of_steps,
)

_STANDS_OUT: Final = 1.5
"""Times the share that each rank would have if all were waited for alike."""

_ALIKE: Final = 0.001
"""Work that is longer by at most this share is no longer."""


def most_waited_for(found: SlowRanks, matches: Matches) -> str:
    """Return a few sentences; empty where nobody waited for anybody, or the clocks cannot tell."""
    bench = found.bench
    if not matches.clocks_agree:
        return ""
    blame = blame_ns(bench.run, matches)
    total = sum(blame.values())
    if not total:
        return ""
    rank = max(blame, key=lambda one: (blame[one], -one))
    who = f"rank {rank} on {bench.run.ranks[rank].metadata.node}"
    share = blame[rank] / total
    waiting = "all waiting" if len(bench.run.ranks) == bench.run.world_size else "all waiting among the ranks recorded"
    if share * len(bench.run.ranks) < _STANDS_OUT:
        return f"No rank is waited for much more than others: for {who}, the most, {share:.1%} of {waiting}."
    return (
        f"Others waited longest for {who}: {share:.0%} of {waiting}, "
        f"{blame[rank] / len(bench.program.steps) / 1e6:.1f} ms per step summed over those who wait (mean). "
        f"{_why_not(found, rank)}"
    )


def _why_not(found: SlowRanks, rank: int) -> str:
    bench = found.bench
    work, limits = bench.work, bench.thresholds
    compared = (work.rank == rank) & np.isfinite(work.peer_ns) & np.isfinite(work.own_ns)
    own, peers = (float((times * work.per_step)[compared].sum()) for times in (work.own_ns, work.peer_ns))
    if not peers:
        return "Whether it is slow cannot be told: no other rank does the same work."
    longer, least = own / peers - 1, least_share_of_work(found, rank)
    mean = _longer_in_the_mean(bench, rank)
    both = f"{own / 1e6:.1f} against {peers / 1e6:.1f} ms per step, medians over {bench.num_steps} steps"
    if longer <= least < mean:
        return (
            f"In most steps its own work takes as long as that of the ranks that do the same ({both}); in some it "
            f"takes longer, by {mean:.0%} in the mean over all steps. A straggler is slow in most steps."
        )
    if longer <= _ALIKE:
        return (
            f"It is no straggler: its own work takes no longer than that of the ranks that do the same ({both}). It "
            "comes last by its place in the schedule, or by what it waits for itself."
        )
    compared_with = f"Its own work takes {longer:.2%} longer than that of the ranks that do the same ({both})"
    if not bench.noise_is_known:
        return f"{compared_with}: of so few steps a hint, no verdict."
    if longer <= least:
        return f"{compared_with}: a straggler is named from {least:.2%} on."
    cost = bench.cost(at_normal_speed(found, {rank: (WORK, DATA, GC)}))
    return (
        f"{compared_with}. At their speed a step would be {cost.ms:.2g} ms ({cost.share:.1%}) shorter (median), at "
        f"least half of that in {cost.persistence:.0%} of the steps; a straggler is named from {limits.cost_ms:g} ms "
        f"and {limits.share_of_step:.0%} on, in {limits.majority:.0%} of them."
    )


def _longer_in_the_mean(bench: Bench, rank: int) -> float:
    """By what share a rank works longer than the other ranks of its stage do typically, in the mean over steps."""
    ranks, stage = bench.program.ranks.tolist(), bench.stage_of_rank
    others = [other != rank and stage[other] == stage[rank] for other in ranks]
    if not any(others):
        return 0.0
    steps = work_of_steps(bench)
    typical = np.median(steps[others], axis=0)
    return float((steps[ranks.index(rank)] - typical).mean() / max(typical.mean(), 1.0))
