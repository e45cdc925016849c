"""Decide which ranks pause more than their peers: for input, garbage collection, checkpoints, evaluation.

Ranks are compared by their mean loss per step. Pauses that are not on purpose must also be more than chance explains
(Fisher's exact test: Fisher, The Design of Experiments, 1935).

>>> six, none = PausesOf((5.0,) * 6, steps=60), PausesOf((), steps=60)
>>> round(chance_of_so_many(six, [none] * 3), 6)
0.000201
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, lgamma
from typing import NamedTuple

import numpy as np

from commtrace.analysis.statistics import error_of_means
from commtrace.analysis.stragglers.costs import occurrence
from commtrace.analysis.stragglers.limits import CHANCE, OF_PAUSES, Thresholds
from commtrace.analysis.stragglers.normal import Judged, Work, judge


class PausesOf(NamedTuple):
    """The pauses of a rank."""

    ns: tuple[float, ...]  # beyond what is usual in every step
    steps: int  # all, with those without a pause

    @property
    def variance(self) -> float:
        """Return the variance of the loss in single steps."""
        steps = max(self.steps, 1)
        return max(sum(one * one for one in self.ns) / steps - (sum(self.ns) / steps) ** 2, 0.0)


def judge_pauses(work: Work, pauses: Sequence[PausesOf], *, meant: bool) -> Judged:
    """Find the ranks that lose more to pauses than is normal for their class.

    ``work`` is the mean loss per step, with the step as its scale. A pause that is ``meant`` is no chance even once.
    """
    if meant:
        return judge(replace(work, error_ns=np.zeros(len(work.rank))), OF_PAUSES)
    variance = np.array([one.variance for one in pauses])
    steps = np.array([one.steps for one in pauses], np.int64)
    judged = judge(replace(work, error_ns=error_of_means(variance, steps, work.peers)), OF_PAUSES)
    limit = judged.limit_ns.copy()
    for row in np.flatnonzero(judged.is_slow).tolist():
        peers = work.peers == work.peers[row]
        others = [pauses[other] for other in np.flatnonzero(peers & ~judged.is_slow).tolist()]
        if peers.sum() * chance_of_so_many(pauses[row], others) > CHANCE:
            limit[row] = np.inf
    return replace(judged, limit_ns=limit)


def chance_of_so_many(own: PausesOf, others: Sequence[PausesOf]) -> float:
    """Return the probability that at least so many pauses of all ranks fall to one. ``others`` pause normally."""
    # Pauses that are less than half as long as those that make up most of this rank's do not count.
    longest = [own.ns[at] for at in occurrence(range(len(own.ns)), np.array(own.ns)).steps]
    if not longest:
        return 1.0
    least = float(np.median(longest)) / 2
    of_rank = sum(ns >= least for ns in own.ns)
    if of_rank < Thresholds().fewest_strikes:
        return 1.0
    in_all = of_rank + sum(ns >= least for one in others for ns in one.ns)
    return _at_least(of_rank, in_all, own.steps, own.steps + sum(one.steps for one in others))


def _at_least(some: int, struck: int, own_steps: int, all_steps: int) -> float:
    """Return the hypergeometric probability that ``some`` or more of the struck steps are among a rank's own."""
    if some * all_steps <= struck * own_steps:
        return 1.0
    tail = 0.0
    for number in range(some, min(struck, own_steps) + 1):
        others = struck - number
        ways = _log_ways(own_steps, number) + _log_ways(all_steps - own_steps, others) - _log_ways(all_steps, struck)
        tail += exp(ways)
    return tail


def _log_ways(all_of_them: int, some: int) -> float:
    """Return the logarithm of a binomial coefficient."""
    return lgamma(all_of_them + 1) - lgamma(some + 1) - lgamma(all_of_them - some + 1)
