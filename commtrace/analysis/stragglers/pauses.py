"""Decide which ranks pause more than their peers: for input, garbage collection, checkpoints, evaluation.

Ranks are compared by their mean loss per step. Pauses that are not on purpose must also be more than chance explains
(Fisher's exact test: Fisher, The Design of Experiments, 1935). Those on purpose come to all ranks that take part at
once, and chance only makes some of them longer: their excess must stand out of its scatter over the events. What one
rank does alone is not chance, even if it happens once.

>>> six, none = PausesOf((5.0,) * 6, steps=60), PausesOf((), steps=60)
>>> round(chance_of_so_many(six, [none] * 3), 6)
0.000201
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.statistics import Float64, error_of_means
from commtrace.analysis.stragglers.costs import occurrence
from commtrace.analysis.stragglers.limits import CHANCE, OF_PAUSES, Thresholds
from commtrace.analysis.stragglers.normal import Judged, Work, judge
from commtrace.analysis.stragglers.strikes import at_least


class PausesOf(NamedTuple):
    """The pauses of a rank."""

    ns: tuple[float, ...]  # beyond what is usual in every step
    steps: int  # all, with those without a pause

    @property
    def variance(self) -> float:
        """Return the variance of the loss in single steps."""
        steps = max(self.steps, 1)
        return max(sum(ns * ns for ns in self.ns) / steps - (sum(self.ns) / steps) ** 2, 0.0)


def judge_on_purpose(work: Work, pauses_ns: Float64) -> Judged:
    """Find the ranks that lose more to what the program does on purpose than is normal for their class.

    ``work`` is the mean loss per step, with the step as its scale, and ``pauses_ns`` is the loss in each step, shape
    (ranks, steps).
    """
    error = np.zeros(len(work.rank))
    beyond = np.zeros_like(pauses_ns)
    is_event = np.zeros(pauses_ns.shape, np.bool_)
    for number in np.unique(work.peers):
        of_peers = work.peers == number
        beyond[of_peers] = pauses_ns[of_peers] - np.median(pauses_ns[of_peers], axis=0)
        is_event[of_peers] = (pauses_ns[of_peers] > 0).any(axis=0)
        events = beyond[of_peers][:, is_event[of_peers][0]]
        scatter = float(np.sqrt(events.var(axis=1, ddof=1).mean())) if events.shape[1] > 1 else 0.0
        error[of_peers] = scatter * np.sqrt(events.shape[1]) * _few(events.shape[1]) / max(pauses_ns.shape[1], 1)
    judged = judge(replace(work, error_ns=np.zeros(len(error))), OF_PAUSES)
    limit = judged.limit_ns.copy()
    for row in np.flatnonzero(judged.is_slow).tolist():
        peers = np.flatnonzero((work.peers == work.peers[row]) & ~judged.is_slow)
        normal = np.median(pauses_ns[peers], axis=0) if len(peers) else np.zeros(pauses_ns.shape[1])
        if _is_alone(pauses_ns[row], normal):
            continue
        longer = times_longer(pauses_ns[row] - normal)
        limit[row] = (
            np.inf
            if len(longer) < Thresholds().fewest_strikes
            else max(limit[row], OF_PAUSES.sigmas * np.sqrt(2) * error[row])
        )
    return replace(judged, limit_ns=limit)


_ALONE: Final = 0.01
"""Ranks that do less of something than this share of what one rank does have no part in it."""


def _is_alone(own_ns: Float64, normal_ns: Float64) -> bool:
    """Return whether nearly all that a rank does is in steps in which the others have no part in it."""
    alone = own_ns[normal_ns <= _ALONE * own_ns].sum()
    return bool(alone >= (1 - _ALONE) * own_ns.sum())


def _few(events: int) -> float:
    """Return by how much more the mean of few events must stand out, as their scatter is badly known (Student's t)."""
    return 1 + 10 / (events - 1) ** 2 if events > 1 else 1.0


def times_longer(beyond_ns: Float64) -> Float64:
    """Return the times by which a rank is longer, where these are at least half as long as the most usual of them."""
    longest = occurrence(range(len(beyond_ns)), beyond_ns).steps
    if not longest:
        return np.zeros(0)
    return beyond_ns[beyond_ns >= np.median(beyond_ns[list(longest)]) / 2]


def judge_pauses(work: Work, pauses: Sequence[PausesOf]) -> Judged:
    """Find the ranks that lose more to pauses, which are not on purpose, than is normal for their class.

    ``work`` is the mean loss per step, with the step as its scale.
    """
    variance = np.array([pause.variance for pause in pauses])
    steps = np.array([pause.steps for pause in pauses], np.int64)
    judged = judge(replace(work, error_ns=error_of_means(variance, steps, work.peers)), OF_PAUSES)
    limit = judged.limit_ns.copy()
    for row in np.flatnonzero(judged.is_slow).tolist():
        peers = work.peers == work.peers[row]
        pauses_of_others = [pauses[number] for number in np.flatnonzero(peers & ~judged.is_slow).tolist()]
        if peers.sum() * chance_of_so_many(pauses[row], pauses_of_others) > CHANCE:
            limit[row] = np.inf
    return replace(judged, limit_ns=limit)


def chance_of_so_many(pauses: PausesOf, pauses_of_others: Sequence[PausesOf]) -> float:
    """Return the probability that at least so many pauses of all ranks fall to one. ``pauses_of_others`` are normal."""
    # Pauses that are less than half as long as those that make up most of this rank's do not count.
    longest = [pauses.ns[at] for at in occurrence(range(len(pauses.ns)), np.array(pauses.ns)).steps]
    if not longest:
        return 1.0
    least = float(np.median(longest)) / 2
    of_rank = sum(ns >= least for ns in pauses.ns)
    if of_rank < Thresholds().fewest_strikes:
        return 1.0
    in_all = of_rank + sum(ns >= least for pause in pauses_of_others for ns in pause.ns)
    return at_least(of_rank, in_all, pauses.steps, pauses.steps + sum(pause.steps for pause in pauses_of_others))
