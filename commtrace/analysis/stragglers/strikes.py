"""Decide whether what is far longer than usual in some steps is of one rank, host or link, or chance.

A strike is one step in which a subject takes far longer than usual. Noise strikes any subject in any step alike: it
seldom falls on consecutive steps of one subject, or so often on one of many.

>>> chance_of([10, 11], elsewhere=0, num_subjects=16, num_steps=39) < 0.001
True
>>> chance_of([10, 30], elsewhere=0, num_subjects=16, num_steps=39) > 0.05
True
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import exp, lgamma
from typing import Final, NamedTuple, TypeVar

from commtrace.analysis.stragglers.limits import CHANCE_OF_FEW

_UNSEEN: Final = 0.5
"""Added to the strikes that were counted, as the rate of what was not seen is not zero (Jeffreys' prior)."""

_Subject = TypeVar("_Subject", bound=Hashable)


def chance_of(steps: Sequence[int], elsewhere: int, num_subjects: int, num_steps: int) -> float:
    """Return the probability that strikes by chance fall on any of the subjects as they fall on one of them.

    Args:
        steps: Those in which it is struck, as indices, ascending.
        elsewhere: The number of strikes on the other subjects.
    """
    if len(steps) < 2:
        return 1.0
    cells = num_subjects * num_steps
    longest = max(run.last - run.first + 1 for run in runs_of(steps))
    rate = (elsewhere + len(steps) - longest + _UNSEEN) / cells
    in_a_row = cells * rate**longest if longest > 1 else 1.0
    so_many = num_subjects * at_least(len(steps), len(steps) + elsewhere, num_steps, cells)
    return min(in_a_row, so_many, 1.0)


def not_by_chance(
    steps: Mapping[_Subject, Collection[int]], num_subjects: int, num_steps: int
) -> dict[_Subject, tuple[int, ...]]:
    """Return the subjects that chance does not explain, with their steps. Each is struck in ``steps``."""
    total = sum(map(len, steps.values()))
    struck = {subject: tuple(sorted(steps_struck)) for subject, steps_struck in steps.items()}
    return {
        subject: steps_struck
        for subject, steps_struck in struck.items()
        if chance_of(steps_struck, total - len(steps_struck), num_subjects, num_steps) <= CHANCE_OF_FEW
    }


class StepRun(NamedTuple):
    """Consecutive steps, as indices."""

    first: int
    last: int


def runs_of(steps: Sequence[int]) -> Iterator[StepRun]:
    """Yield the stretches of consecutive steps; ``steps`` ascend."""
    if not steps:
        return
    first = steps[0]
    for step, following in pairwise(steps):
        if following > step + 1:
            yield StepRun(first, step)
            first = following
    yield StepRun(first, steps[-1])


def at_least(some: int, struck: int, own_steps: int, all_steps: int) -> float:
    """Return the hypergeometric probability that ``some`` or more of the struck steps are among a subject's own."""
    if some * all_steps <= struck * own_steps:
        return 1.0
    tail = 0.0
    for number in range(some, min(struck, own_steps) + 1):
        elsewhere = struck - number
        ways = _log_ways(own_steps, number) + _log_ways(all_steps - own_steps, elsewhere) - _log_ways(all_steps, struck)
        tail += exp(ways)
    return tail


def _log_ways(all_of_them: int, some: int) -> float:
    """Return the logarithm of a binomial coefficient."""
    return lgamma(all_of_them + 1) - lgamma(some + 1) - lgamma(all_of_them - some + 1)
