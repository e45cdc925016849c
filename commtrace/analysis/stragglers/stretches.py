"""Cut a run where the work of a rank changes against its peers, and judge each stretch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from commtrace.analysis.replay.step_statistics import DATA, GC
from commtrace.analysis.stragglers.cusum import (
    Series,
    error_of_steps,
    error_of_strikes,
    find_cuts,
    without_single_steps,
)
from commtrace.analysis.stragglers.limits import ALIKE, RECORDED
from commtrace.analysis.stragglers.normal import BASELINE, PAST
from commtrace.analysis.stragglers.slow_ranks import SlowRanks, find_slow_ranks
from commtrace.analysis.stragglers.work_statistics import WorkStatistics


def judge_stretches(work: WorkStatistics, baseline_ns: Mapping[int, float]) -> list[SlowRanks]:
    """Return the slow ranks of each stretch of the run; of a single one if they do not change."""
    whole = find_slow_ranks(work, baseline_ns, BASELINE)
    if not work.noise_is_known:
        return [whole]
    cuts = find_changes(work)
    found = _judge_each(cut_at(work, cuts), baseline_ns)
    if any(_are_alike(one, other) for one, other in pairwise(found)):
        cuts = [at for at, one, other in zip(cuts, found[:-1], found[1:], strict=True) if not _are_alike(one, other)]
        found = _judge_each(cut_at(work, cuts), baseline_ns)
    return found if cuts and any(one.slow for one in found) else [whole]


def cut_at(work: WorkStatistics, cuts: Sequence[int]) -> list[WorkStatistics]:
    """Return the stretches between these places among the steps that count."""
    return [_within(work, first, end) for first, end in pairwise([0, *cuts, work.num_steps])] if cuts else [work]


def _within(work: WorkStatistics, first: int, end: int) -> WorkStatistics:
    chosen = np.zeros(len(work.steady), np.bool_)
    chosen[np.flatnonzero(work.steady)[first:end]] = True
    return work.within(chosen)


def find_changes(work: WorkStatistics) -> list[int]:
    """Return the places at which work, input or garbage collection of a rank changes against its stage."""
    shortest = work.thresholds.fewest_steps
    level = np.median(work.work_ns, axis=1)
    series = [work.beyond_stage(values) for values in (work.work_ns, work.pauses_ns(DATA), work.pauses_ns(GC))]
    typical = [without_single_steps(beyond) for beyond in series]
    of_work, *strikes = (
        error_of_steps(beyond, one, level, shortest) for beyond, one in zip(series, typical, strict=True)
    )
    error = [of_work, *(np.maximum(own, error_of_strikes(one)) for own, one in zip(strikes, typical[1:], strict=True))]
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
    found = [find_slow_ranks(one, baseline_ns, BASELINE) for one in stretches]
    judged = []
    for number, one in enumerate(found):
        past = _when_all_were_alike(found, number)
        judged.append(find_slow_ranks(stretches[number], {**baseline_ns, **past}, PAST) if past else one)
    return judged


def _when_all_were_alike(found: Sequence[SlowRanks], number: int) -> dict[int, float]:
    """Return the work of each rank in the nearest stretch in which all ranks of its stage were normal."""
    nearest = sorted(range(len(found)), key=lambda other: (abs(other - number), other))
    before: dict[int, float] = {}
    for one in (found[other] for other in nearest if other != number):
        for stage in np.unique(one.typical.peers):
            own = one.typical.peers == stage
            if one.judged.is_normal[own].all():
                for rank, total in zip(one.typical.rank[own].tolist(), one.typical.total_ns[own].tolist(), strict=True):
                    before.setdefault(rank, total)
    return before


def _are_alike(one: SlowRanks, other: SlowRanks) -> bool:
    first, second = ({(slow.rank, slow.cause): slow for slow in found.slow} for found in (one, other))
    return first.keys() == second.keys() and all(
        abs(slow.total_ns - second[key].total_ns)
        <= max(RECORDED.share * slow.normal_ns, ALIKE * max(slow.total_ns, second[key].total_ns))
        for key, slow in first.items()
    )
