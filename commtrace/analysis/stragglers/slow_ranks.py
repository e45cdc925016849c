"""Ranks that work beyond what is normal in some steps of a recorded run, and how long their work would be if normal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from commtrace.analysis.replay.peers import Float64
from commtrace.analysis.replay.segments import BETWEEN, Segments, ends_with_a_phase
from commtrace.analysis.statistics import ERROR_OF_MEDIAN, MAD_TO_SIGMA, QUARTILES_APART, error_of_means
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.cusum import drift
from commtrace.analysis.stragglers.limits import DEPENDENCE, RECORDED, STRUCK
from commtrace.analysis.stragglers.long_microbatches import SEQUENCES, LongMicrobatches, longer_inputs
from commtrace.analysis.stragglers.normal import PAST, Judged, Work, judge
from commtrace.trace.spans import Bool, Int32, Int64

WORK: Final = "work"
DATA: Final = "data"
GC: Final = "gc"
CHECKPOINT: Final = "checkpoint"
EVALUATION: Final = "evaluation"
RARE: Final = (DATA, GC, CHECKPOINT, EVALUATION)
"""Causes with spans of their own, which may strike in few steps only: their mean counts, that of work is a median."""
SELDOM: Final = "seldom"
"""Work that takes far longer in some steps, of a rank that is as fast as the others in most: its mean counts, too."""
MICROBATCHES: Final = "microbatches"
"""Work on a few microbatches that are longer than those of others: their mean counts, too."""
MEANT: Final = (CHECKPOINT, EVALUATION)
"""Of these, what a program does on purpose: once is enough to be told, if it costs enough."""

_NO_DP: Final = ("tp", "cp", "ep")
"""Ranks at different places of these may load different shares of the input, or none."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank and what it does beyond normal, ns per step; one that stands out in several things is several of these.

    Attributes:
        excess_ns: of WORK and SELDOM by ``compute``, or by longer input, ``late_launch`` (before a phase) and
            ``unknown`` (elsewhere outside of phases), else by the cause.
        beyond: what it stands out in: WORK, SELDOM, MICROBATCHES or one of RARE.
        normal_ns: normal work.
        told_by: what told normal.
        persistence: share of the steps in which its work is beyond normal by at least half as much as usual.
    """

    rank: int
    excess_ns: Mapping[str, float]
    beyond: str
    normal_ns: float
    told_by: str
    persistence: float

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
    """The slow ranks of some steps.

    Attributes:
        bench: of these steps, its peers those whose work is normal.
        slow: largest excess first.
        rare_excess_ns: by cause and rank, beyond what is normal of the rare; of all ranks.
        seldom_ns: of each segment, by how much it is longer in a step in which its rank works far longer than usual.
        microbatches: which of them are long.
        work, judged: the typical work of all ranks, and what it was found to be.
    """

    bench: Bench
    slow: tuple[SlowRank, ...]
    rare_excess_ns: Mapping[str, Mapping[int, float]]
    seldom_ns: Float64
    microbatches: LongMicrobatches
    work: Work
    judged: Judged

    @property
    def undecided(self) -> tuple[str, ...]:
        """Sentences on classes in which it cannot be told who is slow."""
        return self.judged.undecided if self.bench.noise_is_known else ()


def find_slow_ranks(bench: Bench, before_ns: Mapping[int, float], before_by: str = PAST) -> SlowRanks:
    """Judge the typical work of every rank; of too few steps to know the noise, only what has spans of its own.

    Args:
        bench: of the steps.
        before_ns: by rank, its work when the job was well; empty where that is not known.
        before_by: where that was: PAST or BASELINE.
    """
    work = replace(_typical_work(bench, before_ns), before_by=before_by)
    judged = judge(work, RECORDED)
    bench = replace(bench, work=bench.work.among(_normal_ranks(bench, judged)))
    rare = {cause: _judge_rare(bench, work, cause) for cause in RARE}
    rare_excess = {cause: _by_rank(one.rank, np.nan_to_num(one.excess_ns)) for cause, one in rare.items()}
    slow = [
        SlowRank(rank, {cause: rare_excess[cause][rank]}, cause, float(one.normal_ns[row]), one.told_by[row], 1.0)
        for cause, one in rare.items()
        for row, rank in enumerate(one.rank.tolist())
        if one.is_slow[row]
    ]
    seldom = _seldom_ns(bench)
    if bench.noise_is_known:
        in_work = [*_slow_in_work(bench, judged)]
        slow += in_work
        slow += _slow_seldom(bench, work, seldom, {one.rank for one in in_work})
    microbatches = LongMicrobatches.of(bench)
    slow = _with_long_microbatches(slow, microbatches)
    return SlowRanks(
        bench=bench,
        slow=tuple(sorted(slow, key=lambda one: -one.total_ns)),
        rare_excess_ns=rare_excess,
        seldom_ns=seldom,
        microbatches=microbatches,
        work=work,
        judged=judged,
    )


def _with_long_microbatches(slow: Sequence[SlowRank], microbatches: LongMicrobatches) -> list[SlowRank]:
    """Say of replicas, all of whose ranks are slow because their input is longer, that this is the cause."""
    found = {one.rank: one for one in slow if one.beyond in (WORK, SELDOM)}
    changed: dict[int, SlowRank] = {}
    for ranks, long in longer_inputs(microbatches, found):
        own = [found[rank] for rank in ranks]
        if long:
            changed |= {
                one.rank: replace(one, excess_ns={SEQUENCES: microbatches.excess_of_ns(one.rank)}, beyond=MICROBATCHES)
                for one in own
            }
        elif all(one.beyond == WORK for one in own):
            changed |= {
                one.rank: replace(
                    one,
                    excess_ns={SEQUENCES if cause == "compute" else cause: ns for cause, ns in one.excess_ns.items()},
                )
                for one in own
            }
    return [changed.get(one.rank, one) if one.beyond in (WORK, SELDOM) else one for one in slow]


def _slow_in_work(bench: Bench, judged: Judged) -> Iterator[SlowRank]:
    segments_excess = bench.work.excess_ns()
    for row in np.flatnonzero(judged.is_slow).tolist():
        rank, own = int(judged.rank[row]), bench.work.rank == judged.rank[row]
        excess = _by_cause(bench.work.kind[own], segments_excess[own])
        persistence = float(_works_longer(bench, rank)[bench.steady].mean())
        if persistence >= bench.thresholds.persistence:
            yield SlowRank(rank, excess, WORK, float(judged.normal_ns[row]), judged.told_by[row], persistence)


def _by_cause(kind: Int32, excess_ns: Float64) -> dict[str, float]:
    in_phase, launches = kind < BETWEEN, ends_with_a_phase(kind)
    return {
        "compute": float(excess_ns[in_phase].sum()),
        "late_launch": float(excess_ns[launches].sum()),
        "unknown": float(excess_ns[~in_phase & ~launches].sum()),
    }


def launches_late(bench: Bench, rank: int) -> bool:
    """Return whether most of what a rank works beyond its peers lies before its phases."""
    own = bench.work.rank == rank
    excess = _by_cause(bench.work.kind[own], bench.work.excess_ns()[own])
    return excess["late_launch"] > 0 and max(excess, key=lambda cause: excess[cause]) == "late_launch"


def _seldom_ns(bench: Bench) -> Float64:
    """Of each segment, its part of what its rank works longer in that step, where that is far longer than usual.

    Compared is the work of a step with the typical rank of the stage in the same step, and that with the rank's own
    typical step.
    """
    segments, steps = bench.program.segments, work_of_steps(bench)
    more = beyond_stage(bench, segments.work_ns)
    more -= np.median(more, axis=1, keepdims=True)
    level = np.median(steps, axis=1, keepdims=True)
    noise = MAD_TO_SIGMA * np.median(np.abs(more), axis=1, keepdims=True)
    least = np.maximum(np.maximum(RECORDED.share * level, RECORDED.least_ns), STRUCK * noise)
    share = np.zeros((len(steps), len(bench.program.steps)))
    share[:, bench.steady] = np.where(more > least, more / np.maximum(steps, 1.0), 0.0)
    return np.asarray(segments.work_ns * share[np.searchsorted(bench.program.ranks, segments.rank), segments.step])


def _slow_seldom(bench: Bench, work: Work, seldom_ns: Float64, but: Collection[int]) -> Iterator[SlowRank]:
    """Yield ranks, but not these, that are struck more often, or by more, than chance strikes the ranks of a stage."""
    stage = np.array([bench.stage_of_rank[rank] for rank in work.rank.tolist()], np.int64)
    steps = of_steps(bench, seldom_ns)
    error = DEPENDENCE * error_of_means(steps.var(axis=1), steps.shape[1], stage)
    struck = replace(work, peers=stage, total_ns=steps.mean(axis=1), error_ns=error, before_ns=None)
    judged = judge(struck, RECORDED)
    segments = bench.program.segments
    for row in np.flatnonzero(judged.is_slow).tolist():
        rank = int(judged.rank[row])
        if rank not in but:
            own = (segments.rank == rank) & bench.counted
            excess = _by_cause(segments.kind[own], seldom_ns[own] / bench.num_steps)
            persistence = float((steps[row] > 0).mean())
            yield SlowRank(rank, excess, SELDOM, float(work.total_ns[row]), judged.told_by[row], persistence)


def _works_longer(bench: Bench, rank: int) -> Bool:
    """In which steps of the program a rank works longer than is normal by at least half as much as usual."""
    segments = bench.program.segments
    own = segments.rank == rank
    work = np.bincount(segments.step[own], segments.work_ns[own], minlength=len(bench.program.steps))
    excess = float(bench.work.excess_ns()[bench.work.rank == rank].sum())
    normal = float(np.median(work[bench.steady])) - excess
    return np.asarray(work - normal >= excess / 2)


def at_normal_speed(found: SlowRanks, ranks: Mapping[int, Collection[str]]) -> Int64:
    """Segment durations where these ranks work as is normal, each in these of WORK, SELDOM, MICROBATCHES
    and RARE.

    A step in which a rank works no longer than is normal has nothing to mend.
    """
    bench, segments = found.bench, found.bench.program.segments
    durations = np.zeros(len(segments))
    for cause in (WORK, *RARE):
        chosen = np.isin(segments.rank, [rank for rank, causes in ranks.items() if cause in causes])
        values = segments.work_ns if cause == WORK else rare_ns(segments, cause)
        if cause == WORK:
            for rank in np.unique(segments.rank[chosen]).tolist():
                chosen &= (segments.rank != rank) | _works_longer(bench, rank)[segments.step]
        if chosen.any():
            ratio = bench.work.ratio if cause == WORK else _rare_ratio(bench, values, found.rare_excess_ns[cause])
            durations += np.where(chosen, values * ratio, values)
        else:
            durations += values
    for cause, longer_ns in ((SELDOM, found.seldom_ns), (MICROBATCHES, found.microbatches.segment_ns)):
        struck = np.isin(segments.rank, [rank for rank, causes in ranks.items() if cause in causes])
        durations = np.where(struck, durations - longer_ns, durations)
    return np.asarray(np.rint(durations), np.int64)


def rare_ns(segments: Segments, cause: str) -> Int64:
    """Return what each segment spent on one of RARE."""
    return {
        DATA: segments.data_ns,
        GC: segments.gc_ns,
        CHECKPOINT: segments.checkpoint_ns,
        EVALUATION: segments.evaluation_ns,
    }[cause]


def least_share_of_work(found: SlowRanks, rank: int) -> float:
    """By how much more than normal this rank must work to be suspected, as a share of what is typical."""
    row = found.work.rank == rank
    return float((found.judged.limit_ns / np.maximum(found.work.scale_ns, 1.0))[row][0])


def noise_between_steps(bench: Bench) -> float:
    """Return how much the work of a rank scatters from step to step, as a share of it: the typical rank."""
    work = work_of_steps(bench)
    low, high = np.quantile(work, [0.25, 0.75], axis=1)
    return float(np.median((high - low) / QUARTILES_APART / np.maximum(np.median(work, axis=1), 1.0)))


def error_of_typical_work(bench: Bench, typical_ns: Float64, beyond_ns: Float64, num_classes: int) -> Float64:
    """Return the standard error of medians over the steps, for ranks that scatter as the typical one does.

    Args:
        bench: of the steps.
        typical_ns: the medians.
        beyond_ns: of each step, what these work beyond the median of their class: slow drift is seen from it.
        num_classes: into how many classes they fall.
    """
    peers = len(beyond_ns) / num_classes
    follows = np.sqrt(1 - 1 / peers) if peers > 1 else 1.0  # the median of few goes up and down with each of them
    noise = max(noise_between_steps(bench), drift(beyond_ns, typical_ns) / follows)
    return np.asarray(noise * typical_ns * ERROR_OF_MEDIAN * DEPENDENCE / np.sqrt(max(bench.num_steps, 1)))


def work_of_steps(bench: Bench) -> Float64:
    """Work of every rank in every step that counts, ns; rows in the order of ``program.ranks``."""
    return of_steps(bench, bench.program.segments.work_ns)


def of_steps(bench: Bench, values_ns: Int64 | Float64) -> Float64:
    """Sums of a value of segments, by rank and step that counts."""
    segments, steps = bench.program.segments, len(bench.program.steps)
    index = np.searchsorted(bench.program.ranks, segments.rank)
    sums = np.bincount(index * steps + segments.step, values_ns, minlength=len(bench.program.ranks) * steps)
    return np.asarray(sums.reshape(-1, steps)[:, bench.steady], np.float64)


def beyond_stage(bench: Bench, values_ns: Int64) -> Float64:
    """By rank and step that counts: how much more of something it has than the typical rank of its stage, ns."""
    steps = of_steps(bench, values_ns)
    stage = np.array([bench.stage_of_rank[rank] for rank in bench.program.ranks.tolist()])
    beyond = np.zeros_like(steps)
    for one in np.unique(stage):
        beyond[stage == one] = steps[stage == one] - np.median(steps[stage == one], axis=0)
    return beyond


def typical_work_of_stages(bench: Bench) -> dict[int, float]:
    """By stage: what its typical rank works per step, ns."""
    work = _typical_work(bench, {})
    return {stage: float(np.median(work.total_ns[work.peers == stage])) for stage in np.unique(work.peers).tolist()}


def _typical_work(bench: Bench, before_ns: Mapping[int, float]) -> Work:
    """Of each rank, what its stage typically works, and by how much it differs, work by work."""
    ranks, compared = bench.program.ranks, bench.work
    several = np.isfinite(compared.peer_ns) & np.isfinite(compared.own_ns)
    own = _by_rank_sum(ranks, compared.rank[several], (compared.own_ns * compared.per_step)[several])
    stage = np.array([bench.stage_of_rank[rank] for rank in ranks.tolist()], np.int64)
    level = np.array(
        [np.median(own[(stage == one) & (own > 0)]) if (own[stage == one] > 0).any() else 0.0 for one in stage]
    )
    beyond = compared.from_typical_ns()
    alone = own <= 0
    nodes = [bench.run.ranks[rank].metadata.node for rank in ranks.tolist()]
    return Work(
        rank=ranks,
        peers=np.where(alone, -1 - ranks, stage),
        host=np.unique(nodes, return_inverse=True)[1].reshape(-1).astype(np.int64),
        total_ns=level + np.array([beyond.get(rank, 0.0) for rank in ranks.tolist()]),
        error_ns=error_of_typical_work(
            bench, level, beyond_stage(bench, bench.program.segments.work_ns), len(np.unique(stage))
        ),
        scale_ns=level,
        before_ns=np.array([before_ns.get(rank, np.nan) for rank in ranks.tolist()]),
    )


def _normal_ranks(bench: Bench, judged: Judged) -> Int64:
    """Return ranks whose work makes the norm; where that cannot be told, all of their class."""
    return judged.rank[judged.is_normal | ~np.isfinite(judged.normal_ns)]


def _judge_rare(bench: Bench, work: Work, cause: str) -> Judged:
    """Judge the mean per step of something rare among the ranks of a stage that have the same share in it."""
    values_ns = rare_ns(bench.program.segments, cause)
    stage = np.array([bench.stage_of_rank[rank] for rank in work.rank.tolist()], np.int64)
    peers = stage
    if cause == DATA:
        places = [
            (one, *(bench.run.ranks[rank].coordinates.get(name, 0) for name in _NO_DP))
            for one, rank in zip(stage.tolist(), work.rank.tolist(), strict=True)
        ]
        _, place = np.unique(np.array(places, np.int64), axis=0, return_inverse=True)
        place = place.reshape(-1).astype(np.int64)
        if (np.bincount(place) > 1).all():
            peers = place
    steps = of_steps(bench, values_ns)
    # What a program does on purpose is no chance. What strikes by chance may strike one rank more often than its peers.
    error = np.zeros(len(steps)) if cause in MEANT else error_of_means(steps.var(axis=1), steps.shape[1], peers)
    return judge(
        replace(work, peers=peers, total_ns=steps.mean(axis=1), error_ns=error, before_ns=None),
        RECORDED,
    )


def mean_per_step(bench: Bench, values_ns: Int64) -> dict[int, float]:
    """Of each rank, ns per step."""
    mean = _by_rank_sum(bench.program.ranks, bench.program.segments.rank[bench.counted], values_ns[bench.counted])
    return _by_rank(bench.program.ranks, mean / max(bench.num_steps, 1))


def _rare_ratio(bench: Bench, values_ns: Int64, excess_ns: Mapping[int, float]) -> Float64:
    """Of each segment: by how much to scale something rare so that its rank has no more of it than is normal."""
    ratio = np.ones(int(bench.program.ranks.max()) + 1)
    for rank, value in mean_per_step(bench, values_ns).items():
        if value > 0:
            ratio[rank] = 1 - max(excess_ns[rank], 0.0) / value
    return np.asarray(ratio[bench.program.segments.rank])


def _by_rank(ranks: Int64, values: Float64) -> dict[int, float]:
    return dict(zip(ranks.tolist(), values.tolist(), strict=True))


def _by_rank_sum(ranks: Int64, rank: Iterable[int], values: Iterable[float]) -> Float64:
    rows = np.searchsorted(ranks, np.asarray(rank))
    return np.asarray(np.bincount(rows, np.asarray(values, np.float64), minlength=len(ranks)))
