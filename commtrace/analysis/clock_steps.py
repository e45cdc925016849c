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
import numpy.typing as npt

from commtrace.analysis.clock_observations import Observations
from commtrace.analysis.piecewise_clock import Begin
from commtrace.trace.spans import Int32, Int64

Float64 = npt.NDArray[np.float64]

_WINDOW: Final = 15
"""So many readings on either side decide: their medians ignore those that were seen late."""

_SMALLEST_STEP_NS: Final = 20_000
_SIGMAS: Final = 6.0
_SPREADS: Final = 8.0
"""A step must stand out from how the medians of neighbouring windows differ elsewhere, not only from the readings."""

_PERSISTENCE: Final = 0.8
_NEIGHBOURHOOD: Final = 4 * _WINDOW
"""So much of what is so near to the step must be on its side of it: operations whose ends are seen late by turns are
no steps."""

_MOST_STEPS: Final = 8
_MAD_TO_SIGMA: Final = 1.4826
_MEDIAN_TO_MEAN_ERROR: Final = 1.2533
"""Standard error of a median over that of a mean, of normal noise."""


class ClockStep(NamedTuple):
    """A clock jumped between two of its readings.

    Attributes:
        clock: which.
        at_ns: the middle between them, where the later part begins.
        steps: of training, in which these readings were taken; −1 where there are none.
        is_back: whether the clock jumped back.
        is_far: back by more than these steps took.
    """

    clock: int
    at_ns: int
    steps: tuple[int, int] = (-1, -1)
    is_back: bool = False
    is_far: bool = False

    @property
    def begin(self) -> Begin:
        """Of the part of the clock that follows."""
        return Begin(self.at_ns, self.steps if self.is_back else None, self.is_far)


class _Jump(NamedTuple):
    """Clocks a and b differ otherwise from ``after`` on than until ``before``: their readings on either side, the steps
    of training in which they were taken, and how long these steps took.
    """

    clocks: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    steps: tuple[int, int]
    took_ns: int

    def side(self, clock: int) -> tuple[int, int]:
        """The readings of one of the two clocks, before and after."""
        position = self.clocks.index(clock)
        return self.before[position], self.after[position]


class _Series(NamedTuple):
    """Readings of two clocks at the same instants, in order; ``axis`` rises, and ``step`` is that of training."""

    clocks: tuple[int, int]
    times: tuple[Int64, Int64]
    axis: Int64
    step: Int32

    def of(self, clock: int) -> Int64:
        return self.times[self.clocks.index(clock)]


def find_steps(observations: Observations) -> list[ClockStep]:
    """The steps of all clocks, by clock and in the order in which they happened."""
    # Pairs that met often first: they say best when a clock was stepped.
    pairs = sorted(_series(observations), key=lambda pair: (-len(pair.times[0]), pair.clocks))
    jumps = [jump for pair in pairs for jump in _jumps(pair)]
    steps: dict[int, list[_Jump]] = {}
    for jump in jumps:
        clock = _culprit(jump, jumps, pairs)
        known, side = steps.setdefault(clock, []), jump.side(clock)
        readings = next(pair.of(clock) for pair in pairs if pair.clocks == jump.clocks)
        if not any(_overlap(side, other.side(clock), readings) for other in known):
            known.append(jump)
    found = [_step(clock, jump) for clock, own in steps.items() for jump in own]
    return sorted(found, key=lambda step: (step.clock, step.steps, step.at_ns))


def _step(clock: int, jump: _Jump) -> ClockStep:
    before, after = jump.side(clock)
    first, last = sorted(jump.steps)
    steps = (first, last) if first >= 0 else (-1, -1)
    return ClockStep(clock, (before + after) // 2, steps, after < before, before - after > jump.took_ns)


def split_at(observations: Observations, steps: Sequence[ClockStep], count: int) -> tuple[Observations, list[int]]:
    """The observations with every later part of a clock under a number of its own, and the clock of each number.

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
        step = np.full(len(rows), -1, np.int32) if observations.step is None else observations.step[rows]
        found.append(_Series((a, b), (observations.time_a[rows], observations.time_b[rows]), axis[order], step))
    return found


def _axis(time_a: Int64, time_b: Int64) -> Int64:
    """What brings the readings of two clocks into order, of which one may have been stepped back.

    Observations come group by group and in each by number, so that readings rise from one to the next. Where those of
    one clock fall and those of the other rise, the former was stepped back and does not tell the order.
    """
    rise_a, rise_b = np.diff(time_a), np.diff(time_b)
    falls_a = -int(rise_a[(rise_a < 0) & (rise_b > 0)].sum())
    falls_b = -int(rise_b[(rise_b < 0) & (rise_a > 0)].sum())
    if falls_a == falls_b:
        return np.asarray(time_a // 2 + time_b // 2)
    return time_a if falls_a < falls_b else time_b


def _jumps(pair: _Series) -> Iterator[_Jump]:
    time = (pair.axis - pair.axis[0]).astype(np.float64)
    difference = pair.times[0] - pair.times[1]
    for position in sorted(_change_points(time, (difference - difference[0]).astype(np.float64), _MOST_STEPS)):
        before, after = ((int(pair.times[0][at]), int(pair.times[1][at])) for at in (position - 1, position))
        steps = int(pair.step[position - 1]), int(pair.step[position])
        yield _Jump(pair.clocks, before, after, steps, _length(pair, *sorted(steps)))


def _length(pair: _Series, first: int, last: int) -> int:
    """How long these steps of training took, from the last reading before them to the last one in them; ns."""
    before, until = pair.axis[pair.step < first], pair.axis[pair.step <= last]
    begin = before.max() if len(before) else pair.axis[0]
    return int(until.max() - begin)


def _change_points(time: Float64, difference: Float64, most: int) -> list[int]:
    """Positions at which the line jumps: the largest jump first, then those on either side of it."""
    position = _largest_jump(time, difference) if most else None
    if position is None:
        return []
    left = _change_points(time[:position], difference[:position], most - 1)
    right = _change_points(time[position:], difference[position:], most - 1 - len(left))
    return [position, *left, *(position + one for one in right)]


def _largest_jump(time: Float64, difference: Float64) -> int | None:
    if len(time) < 2 * _WINDOW:
        return None
    level = _without_drift(time, difference)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(level, _WINDOW), axis=1)
    jumps = medians[_WINDOW:] - medians[:-_WINDOW]  # jumps[i]: between readings i + _WINDOW − 1 and i + _WINDOW
    largest = int(np.argmax(np.abs(jumps)))
    noise = _MAD_TO_SIGMA * float(np.median(np.abs(np.diff(level)))) / np.sqrt(2)
    error_of_jump = noise * _MEDIAN_TO_MEAN_ERROR * np.sqrt(2 / _WINDOW)
    spread = _MAD_TO_SIGMA * float(np.median(np.abs(jumps - np.median(jumps))))
    if abs(jumps[largest]) < max(_SMALLEST_STEP_NS, _SIGMAS * error_of_jump, _SPREADS * spread):
        return None
    left, right = float(medians[largest]), float(medians[largest + _WINDOW])
    position = largest + _best_split(level[largest : largest + 2 * _WINDOW], left, right)
    return position if _persists(level, position, left, right) else None


def _persists(level: Float64, position: int, left: float, right: float) -> bool:
    nearer_to_left = np.abs(level - left) < np.abs(level - right)
    before = nearer_to_left[max(0, position - _NEIGHBOURHOOD) : position]
    after = ~nearer_to_left[position : position + _NEIGHBOURHOOD]
    return bool(min(before.mean(), after.mean()) >= _PERSISTENCE)


def _without_drift(time: Float64, difference: Float64) -> Float64:
    """The difference less its slope: the median over pairs a tenth of the series apart, few of which hold a jump."""
    lag = max(1, len(time) // 10)
    elapsed = time[lag:] - time[:-lag]
    known = elapsed > 0
    slope = np.median((difference[lag:] - difference[:-lag])[known] / elapsed[known]) if known.any() else 0.0
    return np.asarray(difference - slope * time)


def _best_split(level: Float64, left: float, right: float) -> int:
    """Where the readings go over from one level to the other: least absolute error."""
    error_left = np.concatenate([[0.0], np.cumsum(np.abs(level - left))])
    error_right = np.concatenate([[0.0], np.cumsum(np.abs(level - right)[::-1])])[::-1]
    return 1 + int(np.argmin((error_left + error_right)[1:-1]))


def _culprit(jump: _Jump, jumps: Sequence[_Jump], pairs: Sequence[_Series]) -> int:
    """The clock whose differences with others jump at that instant too; of equals the one that is not the reference."""
    a, b = jump.clocks
    return max((a, b), key=lambda clock: (_evidence(clock, jump, jumps, pairs), clock))


def _evidence(clock: int, jump: _Jump, jumps: Sequence[_Jump], pairs: Sequence[_Series]) -> int:
    """Pairs of this clock with others that jump at the same time, less those that do not."""
    evidence = 0
    for pair in pairs:
        if clock not in pair.clocks or pair.clocks == jump.clocks:
            continue
        others = [other.side(clock) for other in jumps if other.clocks == pair.clocks]
        if any(_overlap(side, jump.side(clock), pair.of(clock)) for side in others):
            evidence += 1
        elif _was_observed_around(pair.of(clock), jump.side(clock)):
            evidence -= 1
    return evidence


def _overlap(one: tuple[int, int], other: tuple[int, int], times: Int64) -> bool:
    """Whether two jumps may be one: no more than a window of readings lies between them."""
    one, other = (min(one), max(one)), (min(other), max(other))  # a clock that was stepped back reads less afterwards
    between = sorted((*one, *other))[1:3]
    inside = int(((times > between[0]) & (times < between[1])).sum())
    return (one[0] < other[1] and other[0] < one[1]) or inside < _WINDOW


def _was_observed_around(times: Int64, side: tuple[int, int]) -> bool:
    return bool((times <= min(side)).sum() >= _WINDOW and (times >= max(side)).sum() >= _WINDOW)
