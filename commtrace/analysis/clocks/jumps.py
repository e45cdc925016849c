"""Finds instants at which a clock jumped: a machine that was suspended or migrated, a wall clock that was set.

Between two hosts the difference of their readings is a straight line (an offset and a drift) with noise. A jump that
stays is a step of one of the two clocks; which one, their differences with other hosts tell. Of two hosts alone nobody
can tell: then it is the one that is not the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.change_points import (
    WINDOW,
    Float64,
    change_points,
    error_of_median,
    noise_of,
    without_drift,
)
from commtrace.analysis.clocks.fit import Observations
from commtrace.analysis.clocks.piecewise import Begin
from commtrace.trace.spans import Int32, Int64

_FEWEST: Final = 3
"""Readings of a pair on either side of an instant, from which on it says whether its difference jumped there."""

_SIGMAS: Final = 3.0


class ClockStep(NamedTuple):
    """A clock jumped between two of its readings.

    Attributes:
        clock: which.
        before, after: these readings, ns.
        size_ns: how far it jumped; back where negative.
        steps: of training, in which they were taken; −1 where there are none.
        took_ns: how long these steps took.
    """

    clock: int
    before: int
    after: int
    size_ns: int = 0
    steps: tuple[int, int] = (-1, -1)
    took_ns: int = 0

    @property
    def is_possible(self) -> bool:
        """Return whether time went on between the readings."""
        first, last = self.steps
        return self.after - self.before >= self.size_ns and first <= last

    @property
    def begin(self) -> Begin:
        """Of the part of the clock that follows."""
        unsure = sorted((self.before + self.size_ns, self.after - self.size_ns))
        back_in = self.steps if self.size_ns < 0 else None
        return Begin((self.before + self.after) // 2, back_in, -self.size_ns > self.took_ns, (unsure[0], unsure[1]))

    def narrowed(self, other: ClockStep) -> ClockStep:
        """Return the same step, as it was seen with other hosts too; as it is, where they contradict each other."""
        both = self._replace(
            before=max(self.before, other.before),
            after=min(self.after, other.after),
            steps=(max(self.steps[0], other.steps[0]), min(self.steps[1], other.steps[1])),
            took_ns=min(self.took_ns, other.took_ns),
        )
        return both if both.is_possible else self


class _Jump(NamedTuple):
    """Clocks a and b differ otherwise from ``after`` on than until ``before``: their readings on either side, the steps
    of training in which they were taken, and how long these steps took. Afterwards a − b is larger by ``size_ns``.
    """

    clocks: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    size_ns: int
    steps: tuple[int, int]
    took_ns: int

    def of(self, clock: int) -> ClockStep:
        """Return the step that it was, if it was this one of the two clocks that jumped."""
        side = self.clocks.index(clock)
        size = self.size_ns if side == 0 else -self.size_ns
        return ClockStep(clock, self.before[side], self.after[side], size, self.steps, self.took_ns)


class _Series(NamedTuple):
    """Readings of two clocks at the same instants, in order; ``axis`` rises, and ``step`` is that of training.

    Attributes:
        level: difference of the readings less its slope, ns.
    """

    clocks: tuple[int, int]
    times: tuple[Int64, Int64]
    axis: Int64
    step: Int32
    level: Float64

    def of(self, clock: int) -> Int64:
        return self.times[self.clocks.index(clock)]


def find_steps(observations: Observations) -> list[ClockStep]:
    """Return the steps of all clocks, by clock and in the order in which they happened."""
    # Pairs that met often first: they say best when a clock was stepped.
    pairs = sorted(_series(observations), key=lambda pair: (-len(pair.axis), pair.clocks))
    found: list[ClockStep] = []
    for jump, readings in [(jump, pair) for pair in pairs for jump in _jumps(pair)]:
        step = jump.of(_culprit(jump, pairs))
        same = (at for at, known in enumerate(found) if _may_be_one(known, step, readings))
        at = next(same, None)
        if at is None:
            found.append(step)
        else:
            found[at] = found[at].narrowed(step)
    return sorted(found, key=lambda step: (step.clock, step.steps, step.before))


def split_at(observations: Observations, steps: Sequence[ClockStep], count: int) -> tuple[Observations, list[int]]:
    """Return the observations with every later part of a clock under a number of its own, and the clock of each number.

    Args:
        observations: of all clocks.
        steps: those of each clock in the order in which they happened.
        count: of clocks.
    """
    owner = list(range(count))
    clock_a, clock_b = observations.clock_a.copy(), observations.clock_b.copy()
    for step in steps:
        for clocks, original, times in (
            (clock_a, observations.clock_a, observations.time_a),
            (clock_b, observations.clock_b, observations.time_b),
        ):
            clocks[(original == step.clock) & step.begin.is_past(times, observations.step)] = len(owner)
        owner.append(step.clock)
    return replace(observations, clock_a=clock_a, clock_b=clock_b), owner


def _series(observations: Observations) -> list[_Series]:
    pairs = np.stack([observations.clock_a, observations.clock_b])
    found = []
    for a, b in np.unique(pairs, axis=1).T.tolist():
        rows = np.flatnonzero((observations.clock_a == a) & (observations.clock_b == b))
        axis = _axis(observations.time_a[rows], observations.time_b[rows])
        order = np.argsort(axis, kind="stable")
        rows = rows[order]
        time_a, time_b, axis = observations.time_a[rows], observations.time_b[rows], axis[order]
        step = np.full(len(rows), -1, np.int32) if observations.step is None else observations.step[rows]
        difference = time_a - time_b
        level = without_drift(_since_first(axis), _since_first(difference))
        found.append(_Series((a, b), (time_a, time_b), axis, step, level))
    return found


def _axis(time_a: Int64, time_b: Int64) -> Int64:
    """Return what brings the readings of two clocks into order, of which one may have been stepped back.

    Observations come group by group and in each by number, so that readings rise from one to the next. Where those of
    one clock fall and those of the other rise, the former was stepped back and does not tell the order.
    """
    rise_a, rise_b = np.diff(time_a), np.diff(time_b)
    falls_a = -int(rise_a[(rise_a < 0) & (rise_b > 0)].sum())
    falls_b = -int(rise_b[(rise_b < 0) & (rise_a > 0)].sum())
    if falls_a == falls_b:
        return np.asarray(time_a // 2 + time_b // 2)
    return time_a if falls_a < falls_b else time_b


def _since_first(times: Int64) -> Float64:
    return np.asarray((times - times[0]).astype(np.float64))


def _jumps(pair: _Series) -> Iterator[_Jump]:
    for change in change_points(_since_first(pair.axis), _since_first(pair.times[0] - pair.times[1])):
        at = change.position
        before, after = ((int(pair.times[0][place]), int(pair.times[1][place])) for place in (at - 1, at))
        first, last = sorted((int(pair.step[at - 1]), int(pair.step[at])))
        steps = (first, last) if first >= 0 else (-1, -1)
        yield _Jump(pair.clocks, before, after, round(change.size), steps, _length(pair, first, last))


def _length(pair: _Series, first: int, last: int) -> int:
    """Return how long these steps of training took, from the last reading before them to the last one in them; ns."""
    before, until = pair.axis[pair.step < first], pair.axis[pair.step <= last]
    begin = before.max() if len(before) else pair.axis[0]
    return int(until.max() - begin)


def _culprit(jump: _Jump, pairs: Sequence[_Series]) -> int:
    """Return the clock whose differences with others jump at that instant too; of equals the one that is not the
    reference.
    """
    return max(jump.clocks, key=lambda clock: (_evidence(jump.of(clock), jump.clocks, pairs), clock))


def _evidence(step: ClockStep, seen_by: tuple[int, int], pairs: Sequence[_Series]) -> int:
    """Pairs of this clock with others whose difference jumps at that instant by as much, less those where it stays."""
    return sum(_vote(step, pair) for pair in pairs if step.clock in pair.clocks and pair.clocks != seen_by)


def _vote(step: ClockStep, pair: _Series) -> int:
    """1 where the difference of this pair jumped with the clock, −1 where it did not, 0 where nobody can tell."""
    before, after = _sides(step, pair)
    fewest = min(len(before), len(after))
    if fewest < _FEWEST or _SIGMAS * error_of_median(noise_of(pair.level), fewest) > abs(step.size_ns) / 2:
        return 0
    expected = step.size_ns if step.clock == pair.clocks[0] else -step.size_ns
    change = float(np.median(pair.level[after]) - np.median(pair.level[before]))
    return 1 if abs(change - expected) < abs(change) else -1


def _sides(step: ClockStep, pair: _Series) -> tuple[Int64, Int64]:
    """Positions of the last readings that were surely taken before this step of a clock, and of the first after it."""
    first, last = step.steps
    if first >= 0 and (pair.step >= 0).all():
        before, after = pair.step < first, pair.step > last
    else:
        times = pair.of(step.clock)
        before, after = times <= min(step.before, step.after), times >= max(step.before, step.after)
    return np.flatnonzero(before)[-WINDOW:], np.flatnonzero(after)[:WINDOW]


def _may_be_one(known: ClockStep, step: ClockStep, readings: _Series) -> bool:
    """Return whether two steps of a clock may be one: of like size, and no more than a window of readings between
    them.
    """
    larger = max(abs(known.size_ns), abs(step.size_ns))
    if known.clock != step.clock or abs(known.size_ns - step.size_ns) > larger / 2:
        return False
    # A clock that was stepped back reads less afterwards.
    one, other = sorted((known.before, known.after)), sorted((step.before, step.after))
    between = sorted((*one, *other))[1:3]
    times = readings.of(step.clock)
    inside = int(((times > between[0]) & (times < between[1])).sum())
    return (one[0] < other[1] and other[0] < one[1]) or inside < WINDOW
