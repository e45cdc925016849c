"""Find pipeline stages of which even the quickest rank works longer than the ranks of other stages.

Normal is the work of most stages, or their past. A run is cut where a stage changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np

from commtrace.analysis.replay.scenarios import MEASURED, NormalStages, Replay, Scenario
from commtrace.analysis.replay.segments import BACKWARD, FORWARD
from commtrace.analysis.stragglers.change_points import Series, cut_at, error_of_steps, find_cuts, without_single_steps
from commtrace.analysis.stragglers.costs import TotalCost, finding_of, total_cost
from commtrace.analysis.stragglers.limits import ALIKE, LAST_OF_TWO, RECORDED, Limits
from commtrace.analysis.stragglers.mended import MendedFinding, costliest_first
from commtrace.analysis.stragglers.normal import (
    BASELINE,
    FASTEST,
    MAJORITY,
    PAST,
    Float64,
    Judged,
    Names,
    Usual,
    Work,
    judge,
)
from commtrace.analysis.stragglers.slow_ranks import error_of_typical_work
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import STAGE, STAGE_THAT_CHANGED, advice
from commtrace.findings.finding import Finding, Member, Norm, not_judged
from commtrace.findings.formatting import format_ranges, format_ranks, ranges
from commtrace.trace.spans import Bool, Int64

_CAUSE: Final = "stage_imbalance"


@dataclass(frozen=True, slots=True)
class UnevenStages:
    """Findings on stages, costliest first, and the scenario without them."""

    mended: tuple[MendedFinding, ...] = ()
    ranks: tuple[int, ...] = ()  # all of the stages that are named
    normal: Scenario = MEASURED
    undecided: tuple[Finding, ...] = ()
    # Of each stage that is healthy in the last stretch: the work of its quickest rank per step.
    healthy_ns: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Stages:
    """The work of each stage's quickest rank in forward and backward, per step."""

    work: WorkStatistics
    stages: Int64
    quickest_ns: Float64
    before_ns: Float64  # when the job was healthy; NaN if unknown
    judged: Judged
    is_healthy: Bool  # may be remembered: it is normal, or all stages have differed from the first step on

    @property
    def slow(self) -> tuple[int, ...]:
        return tuple(self.stages[self.judged.is_slow].tolist())

    def row(self, stage: int) -> int:
        return int(np.searchsorted(self.stages, stage))

    def has_grown(self, stage: int) -> bool:
        """Return whether most of a stage's excess has come since the job was healthy."""
        row, growth = self.row(stage), self.quickest_ns - self.before_ns
        if not np.isfinite(growth[row]):
            return False
        return bool(growth[row] - np.nanmedian(growth) >= self.judged.excess_ns[row] / 2)


def uneven_stages(
    work: WorkStatistics,
    replay: Replay,
    others: Scenario,
    limits: Limits = RECORDED,
    *,
    is_cut: bool = False,
    usual: Usual | None = None,
) -> UnevenStages:
    """Find the stages that hold up the others.

    ``others`` is the scenario without slow ranks, ``usual`` the job when it is healthy. ``is_cut`` cuts the run where a
    stage changes.
    """
    stages, quickest = quickest_of_stages(work)
    if len(stages) < 2:
        return UnevenStages()
    stretches = _judge_stretches(work, stages, quickest, limits, usual or Usual(), is_cut=is_cut)
    sentences = dict.fromkeys(sentence for stretch in stretches for sentence in stretch.judged.undecided)
    when: dict[int, list[int]] = {}
    for number, stretch in enumerate(stretches):
        for stage in stretch.slow:
            when.setdefault(stage, []).append(number)
    together: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for stage, held_in in when.items():
        together.setdefault((tuple(held_in), stretches[held_in[-1]].has_grown(stage)), []).append(stage)

    mended: list[MendedFinding] = []
    named: set[int] = set()
    left = [when.keys() - group for group in ([], *together.values())] if together else []
    times = replay.steps_ns([others + _normal_stages(stretches, stages) for stages in left])
    for ((numbers, _), group), without_others in zip(together.items(), times[1:], strict=True):
        cost = total_cost(work, [stretch.work for stretch in stretches], numbers, without_others - times[0])
        if cost is not None:
            finding = _finding(work, stretches[cost.costliest], sorted(group), cost)
            mended.append(MendedFinding(finding, _normal_stages(stretches, group)))
            named.update(group)
    return UnevenStages(
        tuple(costliest_first(mended)),
        tuple(rank for rank, stage in work.stage_of_rank.items() if stage in named),
        _normal_stages(stretches, named) if named else MEASURED,
        tuple(not_judged(STAGE, sentence) for sentence in sentences),
        _healthy(stretches[-1]),
    )


def _healthy(stretch: _Stages) -> dict[int, float]:
    is_healthy = stretch.is_healthy
    return dict(zip(stretch.stages[is_healthy].tolist(), stretch.quickest_ns[is_healthy].tolist(), strict=True))


def quickest_of_stages(work: WorkStatistics) -> tuple[Int64, Float64]:
    """Return the stages, and the typical work of the quickest rank of each in forward and backward, ns per step."""
    peers = work.peers
    in_phase = (peers.kind == FORWARD) | (peers.kind == BACKWARD)
    per_entry = np.nan_to_num(peers.own_ns * peers.per_step)
    quickest: dict[int, float] = {}
    for rank, stage in work.stage_of_rank.items():
        value = float(per_entry[in_phase & (peers.rank == rank)].sum())
        quickest[stage] = min(quickest.get(stage, np.inf), value)
    stages = np.array(sorted(stage for stage, value in quickest.items() if value > 0), np.int64)
    return stages, np.array([quickest[stage] for stage in stages.tolist()])


def _judge_stretches(
    work: WorkStatistics,
    stages: Int64,
    quickest: Float64,
    limits: Limits,
    usual: Usual,
    *,
    is_cut: bool,
) -> list[_Stages]:
    before = np.array([usual.quickest_ns.get(stage, np.nan) for stage in stages.tolist()])
    whole = [_judge(work, stages, quickest, limits, before, usual.by)]
    cuts = _find_changes(work, stages, quickest, limits) if is_cut and work.noise_is_known else []
    judged = _judge_each(work, cuts, stages, limits, before, usual.by)
    if any(_are_alike(stretch, next_stretch) for stretch, next_stretch in pairwise(judged)):
        cuts = [
            at
            for at, stretch, next_stretch in zip(cuts, judged[:-1], judged[1:], strict=True)
            if not _are_alike(stretch, next_stretch)
        ]
        judged = _judge_each(work, cuts, stages, limits, before, usual.by)
    return judged if cuts and any(stretch.slow for stretch in judged) else whole


def _judge_each(
    work: WorkStatistics, cuts: Sequence[int], stages: Int64, limits: Limits, before: Float64, before_by: Norm
) -> list[_Stages]:
    """Judge each stretch; if its stages do not decide, by the nearest stretch in which all stages were normal."""
    alone = []
    for part in cut_at(work, cuts):
        _, quickest = quickest_of_stages(part)
        if len(quickest) != len(stages):  # a stage that did nothing in these steps
            return []
        alone.append(_judge(part, stages, quickest, limits, before, before_by))
    judged = []
    for number, stretch in enumerate(alone):
        nearest = sorted(range(len(alone)), key=lambda near: (abs(near - number), near))
        past = [alone[near] for near in nearest if near != number and alone[near].judged.is_normal.all()]
        if past:
            stretch = _judge(stretch.work, stages, stretch.quickest_ns, limits, past[0].quickest_ns, PAST)
        elif stretch.judged.undecided and len(nearest) > 1:
            stretch = _judge_growth(stretch, alone[nearest[1]].quickest_ns, PAST, limits)
        judged.append(stretch)
    return judged


def _judge_growth(stretch: _Stages, before: Float64, before_by: Norm, limits: Limits) -> _Stages:
    """Judge stages that differ by design, by the growth of their work."""
    level, growth = float(stretch.quickest_ns.max()), stretch.quickest_ns - before
    grown = _compare(stretch.work, stretch.stages, level + growth, limits, np.full(len(growth), level), before_by)
    stretch = replace(stretch, before_ns=before, is_healthy=grown.is_normal)
    if not grown.is_slow.any():
        # A baseline in which stages differ alike shows that this is no fault; the job's own past does not.
        is_by_design = before_by == BASELINE and not grown.undecided
        return replace(stretch, judged=replace(stretch.judged, undecided=())) if is_by_design else stretch
    normal, norm_source = stretch.quickest_ns - grown.excess_ns, (before_by,) * len(growth)
    return replace(stretch, judged=replace(grown, normal_ns=normal, norm_source=norm_source, undecided=()))


def _judge(
    work: WorkStatistics, stages: Int64, quickest: Float64, limits: Limits, before: Float64, before_by: Norm
) -> _Stages:
    """Judge stages by each other; if that does not decide, by their past."""
    judged = _compare(work, stages, quickest, limits, before, before_by)
    if judged.undecided and not judged.is_slow.any():
        stretch = _Stages(work, stages, quickest, before, judged, np.ones(len(stages), np.bool_))
        return _judge_growth(stretch, before, before_by, limits) if np.isfinite(before).all() else stretch
    is_healthy = judged.is_normal & np.isin(judged.norm_source, (MAJORITY, PAST, BASELINE))
    return _Stages(work, stages, quickest, before, judged, is_healthy)


def _compare(
    work: WorkStatistics, stages: Int64, quickest: Float64, limits: Limits, before: Float64, before_by: Norm
) -> Judged:
    of_stages = Work(
        rank=stages,
        peers=np.zeros(len(stages), np.int64),
        host=stages,
        total_ns=quickest,
        error_ns=error_of_typical_work(work, quickest, _beyond_others(work, stages), 1),
        scale_ns=quickest,
        before_ns=before,
        before_by=before_by,
    )
    judged = judge(of_stages, limits, Names(_format_stages, "stages"))
    if len(stages) == 2 and judged.is_slow[1] and judged.norm_source[1] == FASTEST:
        return _only_if_far_longer(judged, quickest)
    return judged


def _only_if_far_longer(judged: Judged, quickest: Float64) -> Judged:
    excess, normal = float(judged.excess_ns[1]), float(judged.normal_ns[1])
    if excess > LAST_OF_TWO * normal:
        return judged
    said = (
        f"The last of two stages works {100 * excess / normal:.0f}% longer than the first ({quickest[1] / 1e6:.1f} "
        f"against {quickest[0] / 1e6:.1f} ms per step): either its output layer and loss take that, or it has too "
        "many layers. A healthy run (--baseline RUN) decides."
    )
    limit = judged.limit_ns.copy()
    limit[1] = LAST_OF_TWO * normal
    return replace(judged, limit_ns=limit, undecided=(said,))


def _find_changes(work: WorkStatistics, stages: Int64, quickest: Float64, limits: Limits) -> list[int]:
    beyond, shortest = _beyond_others(work, stages), work.thresholds.fewest_steps
    smooth = without_single_steps(beyond)
    error = error_of_steps(beyond, smooth, quickest, shortest)
    least = np.maximum(limits.share * quickest, limits.least_ns) / 2  # where it comes and goes, means hold half of it
    return find_cuts(Series(smooth, error, least), shortest)


def _beyond_others(work: WorkStatistics, stages: Int64) -> Float64:
    """Return, by stage and step, the work of the quickest rank beyond that of the typical stage, ns."""
    steps = work.by_step(np.where(work.table.is_in_phase, work.table.work_ns, 0))
    quickest = np.array([steps[work.stages == stage].min(axis=0) for stage in stages.tolist()])
    return np.asarray(quickest - np.median(quickest, axis=0))


def _are_alike(stretch: _Stages, next_stretch: _Stages) -> bool:
    excess, next_excess = (
        stretch.judged.excess_ns[stretch.judged.is_slow],
        next_stretch.judged.excess_ns[stretch.judged.is_slow],
    )
    return stretch.slow == next_stretch.slow and bool(
        (np.abs(excess - next_excess) <= ALIKE * np.maximum(excess, next_excess)).all()
    )


def _normal_stages(stretches: Sequence[_Stages], stages: Collection[int]) -> Scenario:
    first = stretches[0]
    ratio = np.ones((int(first.stages.max()) + 1, len(first.work.steady)))
    for stretch in stretches:
        normal = stretch.judged.normal_ns / stretch.quickest_ns
        for stage in set(stretch.slow).intersection(stages):
            ratio[stage, stretch.work.steady] = normal[stretch.row(stage)]
    return Scenario(work=(NormalStages(ratio),))


def _finding(work: WorkStatistics, stretch: _Stages, group: Sequence[int], cost: TotalCost) -> Finding:
    ranks = [rank for rank, stage in work.stage_of_rank.items() if stage in group]
    slowest = max(group, key=lambda stage: stretch.judged.excess_ns[stretch.row(stage)])
    norm = stretch.judged.norm_source[stretch.row(slowest)]
    has_changed = norm in (PAST, BASELINE)
    changed = has_changed or stretch.has_grown(slowest) or _lasts_for_a_part(work, cost)
    return finding_of(
        STAGE,
        _CAUSE,
        f"{_format_stages(group)} ({format_ranks(ranks)})",
        cost,
        members=_members(work, stretch, ranks),
        norm=norm,
        evidence=_evidence(stretch, slowest) + _or_slow_instead(work, ranks),
        advice=STAGE_THAT_CHANGED if changed else advice(_CAUSE, len(ranks)),
    )


def _members(work: WorkStatistics, stretch: _Stages, ranks: Sequence[int]) -> tuple[Member, ...]:
    excess_ns = {rank: float(stretch.judged.excess_ns[stretch.row(work.stage_of_rank[rank])]) for rank in ranks}
    ordered = sorted(ranks, key=lambda rank: (-excess_ns[rank], rank))
    return tuple(Member(rank, work.run.ranks[rank].metadata.node, excess_ns[rank]) for rank in ordered)


def _lasts_for_a_part(work: WorkStatistics, cost: TotalCost) -> bool:
    steps = work.steps
    within = [(steps >= stretch.first) & (steps <= stretch.last) for stretch in cost.stretches]
    return bool(within) and not np.logical_or.reduce(within).all()


def _evidence(stretch: _Stages, stage: int) -> str:
    row, stages = stretch.row(stage), stretch.stages
    normal_ns, works_ns = float(stretch.judged.normal_ns[row]), float(stretch.quickest_ns[row])
    compared_with = {
        PAST: "before, compared with the other stages",
        BASELINE: "in the baseline, compared with the other stages",
        FASTEST: "the fastest other stages" if len(stages) > 2 else "the other stage",
    }.get(stretch.judged.norm_source[row], "the other stages")
    end = ""
    if stage == stages[-1]:
        end = " It is the last one: the output layer and the loss are part of that."
    elif stage == stages[0]:
        end = " It is the first one: the embedding is part of that."
    ranks = [rank for rank, of_rank in stretch.work.stage_of_rank.items() if of_rank == stage]
    who = f"Rank {ranks[0]} works" if len(ranks) == 1 else f"Every rank of stage {stage} works at least"
    more = f"{100 * (works_ns / normal_ns - 1):.0f}% more than {compared_with}"
    return (
        f"{who} {works_ns / 1e6:.1f} ms per step in forward and backward, {more} ({normal_ns / 1e6:.1f} ms; medians "
        f"over steps).{end}"
    )


def _or_slow_instead(work: WorkStatistics, ranks: Sequence[int]) -> str:
    """Say that a rank or a host may be slow instead if it is all of the stages."""
    nodes = {rank: trace.metadata.node for rank, trace in work.run.ranks.items()}
    host = nodes[ranks[0]]
    if len(ranks) == 1:
        return f" Rank {ranks[0]} is all of it and may be slow instead: run its work on another device to check."
    if {rank for rank, node in nodes.items() if node == host} != set(ranks):
        return ""
    return f" Its ranks are all that run on {host}, which may be slow instead: run them on other hosts to check."


def _format_stages(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {format_ranges(ranges(stages))}"
