"""Find ranks that work longer than normal, in each stretch of a run, and the rule by which they would work normally.

The run is cut into stretches where the work of a rank changes against its peers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from commtrace.analysis.replay.scenarios import NormalSpeed
from commtrace.analysis.replay.segments import BETWEEN, ends_with_a_phase
from commtrace.analysis.statistics import ERROR_OF_MEDIAN, MAD_TO_SIGMA, QUARTILES_APART, Float64, error_of_means
from commtrace.analysis.stragglers.change_points import (
    Series,
    cut_at,
    drift,
    error_of_steps,
    error_of_strikes,
    find_cuts,
    without_single_steps,
)
from commtrace.analysis.stragglers.late_hosts import LATE, launches_of
from commtrace.analysis.stragglers.limits import (
    ALIKE,
    DEPENDENCE,
    DRIFT_OF_FEW,
    FAST_PERCENTILE,
    FEWEST_FOR_SCATTER,
    LONG_STEP,
    MOST_DRIFT,
    RECORDED,
    STRUCK,
)
from commtrace.analysis.stragglers.microbatches import (
    SEQUENCES,
    MicrobatchComparison,
    compare_microbatches,
    longer_inputs,
)
from commtrace.analysis.stragglers.normal import BASELINE, MAJORITY, PAST, Judged, Work, judge
from commtrace.analysis.stragglers.pauses import PausesOf, judge_on_purpose, judge_pauses
from commtrace.analysis.stragglers.places import places_of, ranks_struck
from commtrace.analysis.stragglers.strikes import not_by_chance
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import DATA, GC, MEANT, PAUSES
from commtrace.findings.finding import Norm
from commtrace.trace.spans import Bool, Int32, Int64

WORK: Final = "work"
SELDOM: Final = "seldom"
"""Work that is far longer in some steps, of a rank that is as fast as others in most: its mean counts as well."""
MICROBATCHES: Final = "microbatches"
"""Work on a few microbatches that are longer than those of others: their mean counts as well."""

UNMEANT: Final = tuple(cause for cause in PAUSES if cause not in MEANT)

_NO_DP: Final = ("tp", "cp", "ep")
"""Ranks that differ in one of these coordinates may load different shares of the input, or none."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The excess of a rank over normal in one respect, ns per step. A rank may have several of these."""

    rank: int
    excess_ns: Mapping[str, float]  # by cause; WORK and SELDOM: ``compute``, LATE or SEQUENCES, …
    beyond: str  # WORK, SELDOM, MICROBATCHES or one of PAUSES
    normal_ns: float
    norm_source: Norm  # the source of ``normal_ns``
    persistence: float  # share of the steps in which its excess is at least half as large as usual

    @property
    def total_ns(self) -> float:
        return sum(self.excess_ns.values())

    @property
    def cause(self) -> str:
        return max(self.excess_ns, key=lambda cause: self.excess_ns[cause])

    @property
    def is_rare(self) -> bool:
        return self.beyond != WORK


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """The slow ranks of some steps, largest excess first."""

    work: WorkStatistics  # its peers are the ranks whose work is normal
    slow: tuple[SlowRank, ...]
    pause_excess_ns: Mapping[str, Mapping[int, float]]  # by cause and rank, of all ranks, in the steps
    between_excess_ns: Mapping[str, Mapping[int, float]]  # the same between the steps
    seldom: Float64  # see _seldom_share
    microbatches: MicrobatchComparison
    typical: Work  # of all ranks
    judged: Judged  # the verdicts on ``typical``

    @property
    def undecided(self) -> tuple[str, ...]:
        """Return sentences on classes in which the slow rank cannot be determined."""
        return self.judged.undecided if self.work.noise_is_known else ()


def find_slow_ranks(work: WorkStatistics, before_ns: Mapping[int, float], before_by: Norm = PAST) -> SlowRanks:
    """Judge the typical work and the pauses of every rank; of few steps, whose noise is not known, only the pauses.

    ``before_ns`` is, by rank, its work while the job was healthy: in its PAST or in a BASELINE (``before_by``).
    """
    typical = replace(_typical_work(work, before_ns), before_by=before_by)
    judged = judge(typical, RECORDED)
    work = replace(work, peers=work.peers.among(_normal_ranks(judged)))
    pauses = {cause: _judge_pauses(work, typical, cause) for cause in PAUSES}
    between_excess = {cause: _between_excess(work, cause, paused) for cause, paused in pauses.items()}
    pause_excess = {
        cause: _by_rank(paused.rank, np.nan_to_num(paused.excess_ns) - between_excess[cause])
        for cause, paused in pauses.items()
    }
    slow = [
        SlowRank(
            rank,
            {cause: float(paused.excess_ns[row])},
            cause,
            float(paused.normal_ns[row]),
            paused.norm_source[row],
            1.0,
        )
        for cause, paused in pauses.items()
        for row, rank in zip(np.flatnonzero(paused.is_slow).tolist(), paused.slow_ranks, strict=True)
    ]
    seldom = _seldom_share(work)
    if work.noise_is_known:
        slow += _paused_in_some_steps(work, pauses)
        in_work = [*_slow_in_work(work, judged)]
        slow += in_work
        of_hosts = _share_of_whole_hosts(work)
        seldom = np.maximum(seldom, of_hosts)
        but = {slow_rank.rank for slow_rank in in_work}
        slow += _slow_seldom(work, typical, seldom, but, set(work.ranks[of_hosts.any(axis=1)].tolist()))
    microbatches = compare_microbatches(work)
    slow = _with_long_microbatches(slow, microbatches)
    return SlowRanks(
        work=work,
        slow=tuple(sorted(slow, key=lambda slow_rank: -slow_rank.total_ns)),
        pause_excess_ns=pause_excess,
        between_excess_ns={cause: _by_rank(work.ranks, excess) for cause, excess in between_excess.items()},
        seldom=seldom,
        microbatches=microbatches,
        typical=typical,
        judged=judged,
    )


def _with_long_microbatches(slow: Sequence[SlowRank], microbatches: MicrobatchComparison) -> list[SlowRank]:
    """Set longer input as the cause for replicas whose ranks are all slow because of it."""
    compared = {slow_rank.rank: slow_rank for slow_rank in slow if slow_rank.beyond in (WORK, SELDOM)}
    changed: dict[int, SlowRank] = {}
    for ranks, long in longer_inputs(microbatches, compared):
        replica = [compared[rank] for rank in ranks]
        if long:
            changed |= {
                slow_rank.rank: replace(
                    slow_rank, excess_ns={SEQUENCES: microbatches.excess_of_ns(slow_rank.rank)}, beyond=MICROBATCHES
                )
                for slow_rank in replica
            }
        elif all(slow_rank.beyond == WORK for slow_rank in replica):
            changed |= {
                slow_rank.rank: replace(
                    slow_rank,
                    excess_ns={
                        SEQUENCES if cause == "compute" else cause: ns for cause, ns in slow_rank.excess_ns.items()
                    },
                )
                for slow_rank in replica
            }
    return [
        changed.get(slow_rank.rank, slow_rank) if slow_rank.beyond in (WORK, SELDOM) else slow_rank
        for slow_rank in slow
    ]


def _slow_in_work(work: WorkStatistics, judged: Judged) -> Iterator[SlowRank]:
    peers = work.peers
    all_excess, slow = peers.excess_ns, set(judged.rank[judged.is_slow].tolist())
    for row in np.flatnonzero(judged.is_slow).tolist():
        rank, of_rank = int(judged.rank[row]), peers.rank == judged.rank[row]
        excess = _by_cause(peers.kind[of_rank], all_excess[of_rank])
        launches = launches_of(work, rank, slow)
        if launches is not None and launches.are_late:
            excess[LATE] = excess.pop("compute")
        persistence = share_of_longer_steps(work, rank)
        if persistence >= work.thresholds.persistence:
            yield SlowRank(rank, excess, WORK, float(judged.normal_ns[row]), judged.norm_source[row], persistence)


def _by_cause(kind: Int32 | Int64, excess_ns: Float64) -> dict[str, float]:
    in_phase, launches = kind < BETWEEN, ends_with_a_phase(kind)
    return {
        "compute": float(excess_ns[in_phase].sum()),
        "late_launch": float(excess_ns[launches].sum()),
        "unknown": float(excess_ns[~in_phase & ~launches].sum()),
    }


def launches_late(work: WorkStatistics, rank: int) -> bool:
    """Return whether most of a rank's excess over its peers lies before its phases."""
    of_rank = work.peers.rank == rank
    excess = _by_cause(work.peers.kind[of_rank], work.peers.excess_ns[of_rank])
    return excess["late_launch"] > 0 and max(excess, key=lambda cause: excess[cause]) == "late_launch"


def _seldom_share(work: WorkStatistics) -> Float64:
    """Return the share of its work by which a rank is far longer than usual, shape (ranks, steps)."""
    steps = work.work_ns
    # Compared with the typical rank of the stage in the same step, then with the rank's own typical step.
    more = work.beyond_stage(steps)
    more -= np.median(more, axis=1, keepdims=True)
    level = np.median(steps, axis=1, keepdims=True)
    noise = MAD_TO_SIGMA * np.median(np.abs(more), axis=1, keepdims=True)
    least = np.maximum(np.maximum(RECORDED.share * level, RECORDED.least_ns), STRUCK * noise)
    share = np.zeros((len(steps), len(work.steady)))
    share[:, work.steady] = np.where(more > least, more / np.maximum(steps, 1.0), 0.0)
    return share


def _share_of_whole_hosts(work: WorkStatistics) -> Float64:
    """Return the share of its work by which a rank is longer than in its other steps, as all ranks of its host are.

    A host may hold all ranks of a stage, which then have nobody to be compared with. Steps that are longer on most
    ranks of the job, as with a larger batch, do not count.
    """
    node = np.array([work.run.ranks[rank].metadata.node for rank in work.ranks.tolist()])
    hosts = np.unique(node)
    share = np.zeros((len(node), len(work.steady)))
    if len(hosts) < 2:
        return share
    steps = work.work_ns
    level = np.maximum(np.median(steps, axis=1, keepdims=True), 1.0)
    relative = steps / level
    relative = relative - np.percentile(relative, FAST_PERCENTILE, axis=0)
    relative -= np.median(relative, axis=1, keepdims=True)
    noise = MAD_TO_SIGMA * np.median(np.abs(relative), axis=1, keepdims=True)
    least = np.maximum(np.maximum(RECORDED.share, RECORDED.least_ns / level), STRUCK * noise)
    is_struck = relative > least
    struck = {host: np.flatnonzero(is_struck[node == host].all(axis=0)).tolist() for host in hosts.tolist()}
    columns = np.flatnonzero(work.steady)
    for host, indices in not_by_chance(struck, len(hosts), work.num_steps).items():
        rows, at = np.flatnonzero(node == host), np.array(indices, np.int64)
        longer = np.maximum(relative[np.ix_(rows, at)] * level[rows], 0.0)
        share[np.ix_(rows, columns[at])] = longer / np.maximum(steps[np.ix_(rows, at)], 1.0)
    return share


def _slow_seldom(
    work: WorkStatistics, typical: Work, seldom: Float64, but: Collection[int], of_hosts: Collection[int]
) -> Iterator[SlowRank]:
    """Yield ranks whose steps are long more often, or by more, than chance explains within a stage.

    Or that are long in a few steps, by themselves or with all of their place, where chance does not explain that.
    ``of_hosts`` are the ranks that all of their host is long with, compared with their other steps.
    """
    table, stage = work.table, work.stages
    longer_ns = table.work_ns * seldom[np.searchsorted(work.ranks, table.rank), table.step]
    steps = work.by_step(longer_ns)
    error = DEPENDENCE * error_of_means(steps.var(axis=1), steps.shape[1], stage)
    struck = replace(typical, peers=stage, total_ns=steps.mean(axis=1), error_ns=error, before_ns=None)
    judged = judge(struck, RECORDED)
    in_few_steps = ranks_struck(places_of(work.run), work.ranks.tolist(), steps > 0)
    for row, rank in enumerate(work.ranks.tolist()):
        if rank not in but and (judged.is_slow[row] or rank in in_few_steps):
            of_rank = (table.rank == rank) & work.counted
            excess = _by_cause(table.kind[of_rank], longer_ns[of_rank] / work.num_steps)
            persistence = float((steps[row] > 0).mean())
            norm_source = PAST if rank in of_hosts else judged.norm_source[row] or MAJORITY
            yield SlowRank(rank, excess, SELDOM, float(typical.total_ns[row]), norm_source, persistence)


def _paused_in_some_steps(work: WorkStatistics, judged: Mapping[str, Judged]) -> Iterator[SlowRank]:
    """Yield ranks that pause in a few steps in a row, where chance does not explain that."""
    places = places_of(work.run)
    for cause in UNMEANT:
        pauses_ns = work.pauses_ns(cause)
        beyond = work.beyond_stage(pauses_ns - np.median(pauses_ns, axis=1, keepdims=True))
        is_struck = beyond > max(LONG_STEP * work.step_ns, RECORDED.least_ns)
        slow = set(judged[cause].slow_ranks)
        for rank in ranks_struck(places, work.ranks.tolist(), is_struck) - slow:
            row = int(np.searchsorted(work.ranks, rank))
            excess_ns = float(np.where(is_struck[row], beyond[row], 0.0).mean())
            normal_ns = float(pauses_ns[row].mean()) - excess_ns
            yield SlowRank(rank, {cause: excess_ns}, cause, normal_ns, MAJORITY, float(is_struck[row].mean()))


def share_of_longer_steps(work: WorkStatistics, rank: int) -> float:
    """Return the share of steps in which a rank's excess is at least half as large as usual."""
    return float(_works_longer(work, rank)[work.steady].mean())


def _works_longer(work: WorkStatistics, rank: int) -> Bool:
    """Return the steps in which a rank's excess is at least half as large as usual."""
    steps = work.of_steps.by_rank_and_step(work.table.work_ns)
    typical = np.maximum(np.median(steps[:, work.steady], axis=1, keepdims=True), 1.0)
    # Steps that are shorter on all ranks need less.
    shorter = np.minimum(np.median(steps / typical, axis=0), 1.0)
    row, of_rank = int(np.searchsorted(work.ranks, rank)), work.peers.rank == rank
    excess, usual = (float(ns[of_rank].sum()) for ns in (work.peers.excess_ns, work.peers.usual_ns))
    if typical[row, 0] < usual + excess / 2:  # what it does longer, it does in few steps
        return np.asarray(steps[row] >= shorter * usual + excess / 2)
    return np.asarray(steps[row] >= shorter * (typical[row] - excess / 2))


def normal_speed(slow: SlowRanks, ranks: Mapping[int, Collection[str]]) -> NormalSpeed:
    """Return the rule by which ranks work normally, each in some of WORK, SELDOM, MICROBATCHES and PAUSES."""
    work = slow.work
    is_mended = np.zeros(slow.seldom.shape, np.bool_)
    seldom = np.zeros(slow.seldom.shape)
    pause_ratio = {cause: np.ones(len(work.ranks)) for cause in PAUSES}
    for rank, causes in ranks.items():
        row = int(np.searchsorted(work.ranks, rank))
        if WORK in causes:
            is_mended[row] = _works_longer(work, rank)
        if SELDOM in causes:
            seldom[row] = slow.seldom[row]
        for cause in set(PAUSES).intersection(causes):
            mean_ns = float(work.pauses_ns(cause)[row].sum()) / max(work.num_steps, 1)
            if mean_ns > 0:
                pause_ratio[cause][row] = 1 - max(slow.pause_excess_ns[cause][rank], 0.0) / mean_ns
    shortened = [rank for rank, causes in ranks.items() if MICROBATCHES in causes]
    return NormalSpeed(
        steps=work.steady,
        is_mended=is_mended,
        ratio=work.peers.ratio,
        pause_ratio=pause_ratio,
        seldom=seldom,
        microbatches=slow.microbatches.long_ones(shortened) if shortened else None,
    )


def least_share_of_work(slow: SlowRanks, rank: int) -> float:
    """Return the least excess for which a rank is suspected, as a share of its typical work."""
    row = slow.typical.rank == rank
    return float((slow.judged.limit_ns / np.maximum(slow.typical.scale_ns, 1.0))[row][0])


def noise_between_steps(work: WorkStatistics) -> float:
    """Return the scatter of the typical rank's work between steps, as a share of that work."""
    steps = work.work_ns
    relative = steps / np.maximum(np.median(steps, axis=1, keepdims=True), 1.0)
    # Steps that are longer on all ranks, as with a larger batch, are no scatter.
    relative /= np.maximum(np.median(relative, axis=0), 1e-9)
    low, high = np.quantile(relative, [0.25, 0.75], axis=1)
    return float(np.median((high - low) / QUARTILES_APART)) / _follows(len(steps))


def _follows(rows: float) -> float:
    """Return the share of scatter that is left beyond the median of so many: a median of few follows each of them."""
    return float(np.sqrt(1 - 1 / rows)) if rows > 1 else 1.0


def error_of_typical_work(work: WorkStatistics, typical_ns: Float64, beyond_ns: Float64, num_classes: int) -> Float64:
    """Return the standard error of medians over the steps, for ranks that scatter like the typical one.

    ``beyond_ns``, by rank and step, is the work beyond the median of one of ``num_classes`` classes: it shows drift.
    """
    peers = len(beyond_ns) / num_classes
    wandering = drift(beyond_ns, typical_ns) / _follows(peers)
    if peers < FEWEST_FOR_SCATTER:
        wandering *= DRIFT_OF_FEW
    noise = max(noise_between_steps(work), min(wandering, MOST_DRIFT * np.sqrt(work.num_steps / 3)))
    return np.asarray(noise * typical_ns * ERROR_OF_MEDIAN * DEPENDENCE / np.sqrt(max(work.num_steps, 1)))


def typical_work_of_stages(work: WorkStatistics) -> dict[int, float]:
    typical = _typical_work(work, {})
    stages = np.unique(typical.peers).tolist()
    return {stage: float(np.median(typical.total_ns[typical.peers == stage])) for stage in stages}


def _typical_work(work: WorkStatistics, before_ns: Mapping[int, float]) -> Work:
    ranks, compared, stage = work.ranks, work.peers, work.stages
    several = np.isfinite(compared.peer_ns) & np.isfinite(compared.own_ns)
    row = np.searchsorted(ranks, compared.rank[several])
    own_ns = np.bincount(row, (compared.own_ns * compared.per_step)[several], minlength=len(ranks))
    level = np.zeros(len(ranks))
    for number in np.unique(stage[own_ns > 0]):
        level[stage == number] = np.median(own_ns[(stage == number) & (own_ns > 0)])
    beyond = compared.from_typical_ns()
    alone = own_ns <= 0
    nodes = [work.run.ranks[rank].metadata.node for rank in ranks.tolist()]
    return Work(
        rank=ranks,
        peers=np.where(alone, -1 - ranks, stage),
        host=np.unique(nodes, return_inverse=True)[1].reshape(-1).astype(np.int64),
        total_ns=level + np.array([beyond.get(rank, 0.0) for rank in ranks.tolist()]),
        error_ns=error_of_typical_work(work, level, work.beyond_stage(work.work_ns), len(np.unique(stage))),
        scale_ns=level,
        before_ns=np.array([before_ns.get(rank, np.nan) for rank in ranks.tolist()]),
    )


def _normal_ranks(judged: Judged) -> Int64:
    return judged.rank[judged.is_normal | ~np.isfinite(judged.normal_ns)]


def _judge_pauses(work: WorkStatistics, typical: Work, cause: str) -> Judged:
    peers = stage = work.stages
    if cause == DATA:
        places = [
            (number, *(work.run.ranks[rank].coordinates.get(name, 0) for name in _NO_DP))
            for number, rank in zip(stage.tolist(), work.ranks.tolist(), strict=True)
        ]
        _, place_of_rank = np.unique(np.array(places, np.int64), axis=0, return_inverse=True)
        place_of_rank = place_of_rank.reshape(-1).astype(np.int64)
        if (np.bincount(place_of_rank) > 1).all():
            peers = place_of_rank
    scale_ns = np.full(len(typical.rank), work.step_ns)
    pauses_ns = work.pauses_ns(cause) + work.between_ns(cause)
    compared = replace(typical, peers=peers, total_ns=pauses_ns.mean(axis=1), scale_ns=scale_ns, before_ns=None)
    if cause in MEANT:
        return judge_on_purpose(compared, pauses_ns)
    return judge_pauses(compared, _pauses_of_run(work, cause, peers))


def _between_excess(work: WorkStatistics, cause: str, judged: Judged) -> Float64:
    """Return how much more than the normal ranks of its class each rank pauses between the steps, ns per step."""
    mean_ns = work.between_ns(cause).mean(axis=1)
    excess = np.zeros(len(mean_ns))
    for stage in np.unique(work.stages[mean_ns > 0]):
        of_stage = work.stages == stage
        normal = mean_ns[of_stage & judged.is_normal]
        excess[of_stage] = mean_ns[of_stage] - (np.median(normal) if len(normal) else mean_ns[of_stage])
    return excess


def between_saved_ns(slow: SlowRanks, ranks: Mapping[int, Collection[str]]) -> Float64:
    """Return by how much sooner each step of the run would begin if ranks paused normally between steps, ns.

    ``ranks`` are those of :func:`normal_speed`. At most what others waited there for.
    """
    work, between = slow.work, slow.work.of_steps.between
    saved = np.zeros(len(work.steady))
    for cause in MEANT:
        rows = {int(np.searchsorted(work.ranks, rank)): rank for rank, causes in ranks.items() if cause in causes}
        if not rows:
            continue
        pauses = between.pauses_ns[cause].astype(np.float64)
        mended = pauses.copy()
        for row, rank in rows.items():
            mean_ns = float(work.between_ns(cause)[row].mean())
            excess = max(slow.between_excess_ns[cause][rank], 0.0)
            mended[row] *= 1 - excess / mean_ns if mean_ns else 1.0
        waited_ns = np.delete(between.waited_ns, [*rows], axis=0)
        saved += np.minimum(pauses.max(axis=0) - mended.max(axis=0), waited_ns.max(axis=0, initial=0))
    return np.where(work.steady, np.maximum(saved, 0.0), 0.0)


def _pauses_of_run(work: WorkStatistics, cause: str, peers: Int64) -> list[PausesOf]:
    """Return the pauses of each rank beyond the median of its class, over the whole run."""
    # A stretch may hold too few to exclude chance.
    steps = work.pauses_ns_of_run(cause)
    for number in np.unique(peers):
        steps[peers == number] -= np.median(steps[peers == number])
    return [PausesOf(tuple(pauses_ns[pauses_ns > 0].tolist()), len(pauses_ns)) for pauses_ns in steps]


def _by_rank(ranks: Int64, values: Float64) -> dict[int, float]:
    return dict(zip(ranks.tolist(), values.tolist(), strict=True))


def judge_stretches(work: WorkStatistics, baseline_ns: Mapping[int, float]) -> list[SlowRanks]:
    """Return the slow ranks of each stretch of the run; of a single one if they do not change."""
    whole = find_slow_ranks(work, baseline_ns, BASELINE)
    if not work.noise_is_known:
        return [whole]
    cuts = find_changes(work)
    stretches = _judge_each(cut_at(work, cuts), baseline_ns)
    if any(_are_alike(stretch, next_stretch) for stretch, next_stretch in pairwise(stretches)):
        cuts = [
            at
            for at, stretch, next_stretch in zip(cuts, stretches[:-1], stretches[1:], strict=True)
            if not _are_alike(stretch, next_stretch)
        ]
        stretches = _judge_each(cut_at(work, cuts), baseline_ns)
    return stretches if cuts and any(stretch.slow for stretch in stretches) else [whole]


def find_changes(work: WorkStatistics) -> list[int]:
    """Return the places at which work, input or garbage collection of a rank changes against its stage."""
    shortest = work.thresholds.fewest_steps
    level = np.median(work.work_ns, axis=1)
    series = [work.beyond_stage(values) for values in (work.work_ns, work.pauses_ns(DATA), work.pauses_ns(GC))]
    typical = [without_single_steps(beyond) for beyond in series]
    of_work, *strikes = (
        error_of_steps(beyond, smooth, level, shortest) for beyond, smooth in zip(series, typical, strict=True)
    )
    error = [
        of_work,
        *(np.maximum(error, error_of_strikes(smooth)) for error, smooth in zip(strikes, typical[1:], strict=True)),
    ]
    least = np.maximum(RECORDED.share * level, RECORDED.least_ns) / 2  # where it comes and goes, means hold half of it
    together = Series(np.concatenate(typical), np.concatenate(error), np.tile(least, len(series)))
    return find_cuts(together, shortest)


def common_change(work: WorkStatistics) -> str:
    """Say since when all ranks work longer, if they still do."""
    if not work.noise_is_known:
        return ""
    steps = work.work_ns
    of_rank = np.median(steps, axis=1, keepdims=True)
    level = np.median(of_rank, axis=0)
    typical = level * np.median(steps / np.maximum(of_rank, 1.0), axis=0)[np.newaxis]
    smooth, shortest = without_single_steps(typical), work.thresholds.fewest_steps
    error = error_of_steps(typical, smooth, level, shortest)
    cuts = find_cuts(Series(smooth, error, RECORDED.clearly * level), shortest)
    if not cuts:
        return ""
    before, after = (float(np.median(part)) for part in (smooth[0, : cuts[0]], smooth[0, cuts[-1] :]))
    if after <= (1 + RECORDED.clearly) * before:
        return ""
    since = int(work.steps[cuts[-1]])
    return (
        f"All ranks work longer from step {since} on, by {after / before - 1:.0%}: none is slower than the others. "
        "They have more to do since then (longer sequences, a larger batch), or what they share is slower (power, "
        "clocks)."
    )


def _judge_each(stretches: Sequence[WorkStatistics], baseline_ns: Mapping[int, float]) -> list[SlowRanks]:
    first_judged = [find_slow_ranks(stretch, baseline_ns, BASELINE) for stretch in stretches]
    judged = []
    for number, slow in enumerate(first_judged):
        past = _when_all_were_alike(first_judged, number)
        judged.append(find_slow_ranks(stretches[number], {**baseline_ns, **past}, PAST) if past else slow)
    return judged


def _when_all_were_alike(stretches: Sequence[SlowRanks], number: int) -> dict[int, float]:
    """Return the work of each rank in the nearest stretch in which all ranks of its stage were normal."""
    nearest = sorted(range(len(stretches)), key=lambda near: (abs(near - number), near))
    before: dict[int, float] = {}
    for stretch in (stretches[near] for near in nearest if near != number):
        for stage in np.unique(stretch.typical.peers):
            of_stage = stretch.typical.peers == stage
            if stretch.judged.is_normal[of_stage].all():
                for rank, total in zip(
                    stretch.typical.rank[of_stage].tolist(), stretch.typical.total_ns[of_stage].tolist(), strict=True
                ):
                    before.setdefault(rank, total)
    return before


def _are_alike(stretch: SlowRanks, next_stretch: SlowRanks) -> bool:
    first, second = ({(slow.rank, slow.cause): slow for slow in each.slow} for each in (stretch, next_stretch))
    return first.keys() == second.keys() and all(
        abs(slow.total_ns - second[key].total_ns)
        <= max(RECORDED.share * slow.normal_ns, ALIKE * max(slow.total_ns, second[key].total_ns))
        for key, slow in first.items()
    )
