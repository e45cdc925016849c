"""Pipeline stages of which even the quickest rank has more to do than the ranks of other stages.

Ranks of different stages do not do the same work, so a whole stage that is slow is no straggler among its peers: it has
too many layers, or layers that cost more. The rule for ranks holds for stages, too: normal is what most stages do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.rank_words import ranges, ranges_in_words, ranks_in_words
from commtrace.analysis.replay_segments import BACKWARD, FORWARD
from commtrace.analysis.straggler_costs import Bench
from commtrace.analysis.straggler_verdict import NEXT_STEP, STAGE, Verdict
from commtrace.analysis.stragglers.limits import RECORDED, TWO_ENDS, Limits
from commtrace.analysis.stragglers.normal import FASTEST, Float64, Judged, Work, judge
from commtrace.analysis.stragglers.slow_ranks import error_of_typical_work
from commtrace.trace.spans import Int64

_CAUSE: Final = "stage_imbalance"


class UnevenStages(NamedTuple):
    """Stages with too much work.

    Attributes:
        verdict: on them.
        ranks: all of theirs.
        ratio: of each segment, what it would last if they did what is normal, as a share of what it lasts.
    """

    verdict: Verdict
    ranks: tuple[int, ...]
    ratio: Float64


def uneven_stages(bench: Bench, mended_ns: Int64, limits: Limits = RECORDED) -> UnevenStages | None:
    """The stages that hold up the others, and what the job would save if they did what is normal.

    Args:
        bench: the run.
        mended_ns: durations of its segments without the ranks that are slow among their peers.
        limits: from when on a stage stands out.
    """
    stages, quickest = _quickest_of_stages(bench)
    if len(stages) < 2:
        return None
    judged = _judge_stages(bench, stages, quickest, limits)
    slow = judged.is_slow
    if len(stages) == 2:  # one holds the embedding, the other the output layer
        slow = slow & (judged.excess_ns > TWO_ENDS * judged.normal_ns)
    if not slow.any():
        return None
    segments = bench.program.segments
    ratio = np.ones(int(max(stages.max(), segments.stage.max(initial=0))) + 1)
    ratio[stages[slow]] = (judged.normal_ns / quickest)[slow]
    in_phase = np.isin(segments.kind, (FORWARD, BACKWARD))
    evened = np.where(in_phase, ratio[np.maximum(segments.stage, 0)], 1.0)
    saved = bench.saved_ns(np.asarray(np.rint(mended_ns * evened), np.int64)) - bench.saved_ns(mended_ns)
    cost = bench.cost_of(saved)
    if not bench.passes(cost):
        return None
    slowest = int(np.argmax(np.where(slow, judged.excess_ns, -np.inf)))
    ranks = [rank for rank, stage in bench.stage_of_rank.items() if stage in set(stages[slow].tolist())]
    first = min(rank for rank in ranks if bench.stage_of_rank[rank] == stages[slowest])
    verdict = Verdict(
        rank=first,
        host=bench.run.ranks[first].metadata.node,
        place=STAGE,
        cause=_CAUSE,
        who=f"stage{'s' * (int(slow.sum()) > 1)} {_in_words(stages[slow])} ({ranks_in_words(ranks)})",
        cost_ms_per_step=cost.ms,
        gpu_hours_per_day=bench.gpu_hours_per_day(cost),
        persistence=cost.persistence,
        evidence=_evidence(stages, quickest, judged, slowest) + _or_slow_instead(bench, ranks),
        next_step=NEXT_STEP[_CAUSE],
    )
    return UnevenStages(verdict, tuple(ranks), evened)


def _quickest_of_stages(bench: Bench) -> tuple[Int64, Float64]:
    """The stages, and what the quickest rank of each typically works in forward and backward, ns per step."""
    work = bench.work
    in_phase = (work.kind == FORWARD) | (work.kind == BACKWARD)
    per_entry = np.nan_to_num(work.own_ns * work.per_step)
    quickest: dict[int, float] = {}
    for rank, stage in bench.stage_of_rank.items():
        value = float(per_entry[in_phase & (work.rank == rank)].sum())
        quickest[stage] = min(quickest.get(stage, np.inf), value)
    stages = np.array(sorted(stage for stage, value in quickest.items() if value > 0), np.int64)
    return stages, np.array([quickest[stage] for stage in stages.tolist()])


def _judge_stages(bench: Bench, stages: Int64, quickest: Float64, limits: Limits) -> Judged:
    return judge(
        Work(
            rank=stages,
            peers=np.zeros(len(stages), np.int64),
            host=stages,
            total_ns=quickest,
            error_ns=error_of_typical_work(bench, quickest),
            scale_ns=quickest,
        ),
        limits,
    )


def _evidence(stages: Int64, quickest: Float64, judged: Judged, slowest: int) -> str:
    stage, normal = int(stages[slowest]), float(judged.normal_ns[slowest])
    others = (
        "the fastest other stages" if judged.told_by[slowest] == FASTEST and len(stages) > 2 else "the other stages"
    )
    end = ""
    if stage == stages[-1]:
        end = " It is the last one: the output layer and the loss are part of that."
    elif stage == stages[0]:
        end = " It is the first one: the embedding is part of that."
    more = 100 * float(judged.excess_ns[slowest]) / normal
    return (
        f"Every rank of stage {stage} works at least {quickest[slowest] / 1e6:.1f} ms per step in forward and "
        f"backward, {more:.0f} % more than {others} ({normal / 1e6:.1f} ms; medians over steps).{end}"
    )


def _or_slow_instead(bench: Bench, ranks: Sequence[int]) -> str:
    """A sentence where the stages are one rank, or one host's and nothing else is: these may be what is slow."""
    nodes = {rank: trace.metadata.node for rank, trace in bench.run.ranks.items()}
    host = nodes[ranks[0]]
    if len(ranks) == 1:
        return f" Rank {ranks[0]} is all of it: it may be slow instead, which a run with its work elsewhere tells."
    if {rank for rank, node in nodes.items() if node == host} != set(ranks):
        return ""
    return f" Its ranks are all that run on {host}: the host may be slow instead, which a run on other hosts tells."


def _in_words(stages: Int64) -> str:
    return ranges_in_words(ranges(stages.tolist()))
