"""Find jumps of clocks: a machine that was suspended or migrated, a wall clock that was set.

The difference of two hosts' readings is a straight line with noise. A lasting jump is a step of one clock, or a delay:
where cores are scarce, the ends on one host may be seen late for a while. A delay scatters, and never makes an end
earlier than a start of another member. A jump is taken for a step of a clock if it does not scatter, or if starts and
ends before and after it contradict each other without one.

A clock's differences with other hosts show which one was stepped. Of two hosts alone, it is the one that is not the
reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.fit import Begin, Float64, Observations
from commtrace.analysis.statistics import ERROR_OF_MEDIAN, MAD_TO_SIGMA, sigma_of_deviations
from commtrace.trace.spans import Int32, Int64

_FEWEST: Final = 3
"""Readings of a pair needed on either side of an instant to judge a jump there."""

_SIGMAS: Final = 3.0

WINDOW: Final = 15
"""Readings on either side that decide: their medians ignore late ones."""

_WINDOWS: Final = 5
"""Windows shrink if the readings do not fill so many of them: most must hold no jump."""
_SMALLEST_WINDOW: Final = 4
_SMALLEST_STEP_NS: Final = 20_000

_SIGMAS_OF_A_JUMP: Final = 6.0
"""For medians of whole windows; more for smaller ones, whose scatter is less well known."""

_SPREADS: Final = 8.0
"""A step must also stand out from the differences between neighbouring windows elsewhere."""

_PERSISTENCE: Final = 0.8

_NEIGHBOURHOOD: Final = 4 * WINDOW
"""Readings near a step that :data:`_PERSISTENCE` is about: late ends that alternate are no steps."""
_MOST_CHANGES: Final = 8

_MOST_READINGS: Final = 0.9
_SCATTERS: Final = 10.0
"""A change by so many times the scatter of nine readings in ten is no delay: delays by scarce cores scatter widely."""

_SHARE_OF_A_JUMP: Final = 0.25
_MOST_DRIFT: Final = 1e-3
"""Of two clocks that are slewed by 500 ppm each; two crystals differ by less."""
_HALVINGS: Final = 40


class ClockStep(NamedTuple):
    """A jump of a clock between two of its readings, ns."""

    clock: int
    before: int
    after: int
    size_ns: int = 0  # negative: back
    steps: tuple[int, int] = (-1, -1)  # training steps of the readings; −1 without any
    took_ns: int = 0  # duration of these steps

    @property
    def is_possible(self) -> bool:
        """Return whether time went on between the readings."""
        first, last = self.steps
        return self.after - self.before >= self.size_ns and first <= last

    @property
    def begin(self) -> Begin:
        """Return the begin of the part of the clock that follows."""
        unsure = sorted((self.before + self.size_ns, self.after - self.size_ns))
        back_in = self.steps if self.size_ns < 0 else None
        return Begin((self.before + self.after) // 2, back_in, -self.size_ns > self.took_ns, (unsure[0], unsure[1]))

    def narrowed(self, other: ClockStep) -> ClockStep:
        """Return the same step, narrowed by another sight of it; unchanged if the two contradict each other."""
        both = self._replace(
            before=max(self.before, other.before),
            after=min(self.after, other.after),
            steps=(max(self.steps[0], other.steps[0]), min(self.steps[1], other.steps[1])),
            took_ns=min(self.took_ns, other.took_ns),
        )
        return both if both.is_possible else self


class _Jump(NamedTuple):
    """A jump of the difference of two clocks a − b, by ``size_ns``; ``before`` and ``after`` are readings of both."""

    clocks: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    size_ns: int
    steps: tuple[int, int]
    took_ns: int

    def of(self, clock: int) -> ClockStep:
        """Return the step of this one of the two clocks, if it was the one that jumped."""
        side = self.clocks.index(clock)
        size = self.size_ns if side == 0 else -self.size_ns
        return ClockStep(clock, self.before[side], self.after[side], size, self.steps, self.took_ns)


class _Series(NamedTuple):
    """Readings of two clocks at the same instants, by ``axis``; ``level`` is their difference less its slope."""

    clocks: tuple[int, int]
    times: tuple[Int64, Int64]
    axis: Int64
    step: Int32
    level: Float64
    least: Float64  # bounds of the difference by causality, from its first reading
    most: Float64

    def of(self, clock: int) -> Int64:
        return self.times[self.clocks.index(clock)]


def find_steps(observations: Observations) -> list[ClockStep]:
    """Return the steps of all clocks, by clock and in time order."""
    # Pairs that met often first: they say best when a clock was stepped.
    pairs = sorted(_series(observations), key=lambda pair: (-len(pair.axis), pair.clocks))
    steps: list[ClockStep] = []
    for jump, readings in [(jump, pair) for pair in pairs for jump in _jumps(pair)]:
        step = jump.of(_culprit(jump, pairs))
        same = (at for at, known in enumerate(steps) if _may_be_one(known, step, readings))
        at = next(same, None)
        if at is None:
            steps.append(step)
        else:
            steps[at] = steps[at].narrowed(step)
    return sorted(steps, key=lambda step: (step.clock, step.steps, step.before))


def split_at(observations: Observations, steps: Sequence[ClockStep], count: int) -> tuple[Observations, list[int]]:
    """Return the observations with each later part of a clock under a new number, and the clock of each number."""
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
    series = []
    for a, b in np.unique(pairs, axis=1).T.tolist():
        rows = np.flatnonzero((observations.clock_a == a) & (observations.clock_b == b))
        axis = _axis(observations.time_a[rows], observations.time_b[rows])
        order = np.argsort(axis, kind="stable")
        rows = rows[order]
        time_a, time_b, axis = observations.time_a[rows], observations.time_b[rows], axis[order]
        step = np.full(len(rows), -1, np.int32) if observations.step is None else observations.step[rows]
        difference = time_a - time_b
        level = without_drift(_since_first(axis), _since_first(difference))
        least, most = (
            np.asarray((bound[rows] - difference[0]).astype(np.float64))
            for bound in (observations.least, observations.most)
        )
        series.append(_Series((a, b), (time_a, time_b), axis, step, level, least, most))
    return series


def _axis(time_a: Int64, time_b: Int64) -> Int64:
    """Return an axis that orders the readings of two clocks, one of which may have been stepped back."""
    # Observations come group by group and in each by number, so that readings rise from one to the next. Where those of
    # one clock fall and those of the other rise, the former was stepped back.
    rise_a, rise_b = np.diff(time_a), np.diff(time_b)
    falls_a = -int(rise_a[(rise_a < 0) & (rise_b > 0)].sum())
    falls_b = -int(rise_b[(rise_b < 0) & (rise_a > 0)].sum())
    if falls_a == falls_b:
        return np.asarray(time_a // 2 + time_b // 2)
    return time_a if falls_a < falls_b else time_b


def _since_first(times: Int64) -> Float64:
    return np.asarray((times - times[0]).astype(np.float64))


def _jumps(pair: _Series) -> Iterator[_Jump]:
    changes = change_points(_since_first(pair.axis), _since_first(pair.times[0] - pair.times[1]))
    for change in _no_delays(changes, pair):
        at = change.position
        before, after = ((int(pair.times[0][position]), int(pair.times[1][position])) for position in (at - 1, at))
        first, last = sorted((int(pair.step[at - 1]), int(pair.step[at])))
        steps = (first, last) if first >= 0 else (-1, -1)
        yield _Jump(pair.clocks, before, after, round(change.size), steps, _length(pair, first, last))


def _no_delays(changes: Sequence[ClockChange], pair: _Series) -> list[ClockChange]:
    """Return the changes that are no delays, ascending; the largest is judged first, and parts the others."""
    kept: list[ClockChange] = []
    for change in sorted(changes, key=lambda change: -abs(change.size)):
        at = change.position
        positions = [earlier.position for earlier in kept]
        first = max([at - _NEIGHBOURHOOD, 0, *(position for position in positions if position < at)])
        last = min([at + _NEIGHBOURHOOD, len(pair.axis), *(position for position in positions if position > at)])
        if _is_steady(change, pair.level[first:at], pair.level[at:last]) or _is_forced(change, pair, first, last):
            kept.append(change)
    return sorted(kept)


def _is_steady(change: ClockChange, before: Float64, after: Float64) -> bool:
    """Return whether the readings on both sides scatter so little beside the change that delays do not make it."""
    scatter = max(np.quantile(np.abs(side - np.median(side)), _MOST_READINGS) for side in (before, after))
    return bool(abs(change.size) >= _SCATTERS * scatter)


def _is_forced(change: ClockChange, pair: _Series, first: int, last: int) -> bool:
    """Return whether the bounds of these readings contradict each other unless a clock jumped here."""
    time = _since_first(pair.axis)
    whole, before, after = (
        contradiction(time[rows], pair.least[rows], pair.most[rows])
        for rows in (slice(first, last), slice(first, change.position), slice(change.position, last))
    )
    return whole - max(before, after) >= max(_SHARE_OF_A_JUMP * abs(change.size), _SMALLEST_STEP_NS)


def contradiction(time: Float64, least: Float64, most: Float64) -> float:
    """Return by how much the bounds contradict each other under the drift that suits them best, ns; 0 if they agree."""
    low, high = -_MOST_DRIFT, _MOST_DRIFT
    for _ in range(_HALVINGS):
        drift = (low + high) / 2
        lowest, highest = least - drift * time, most - drift * time
        above, below = int(np.argmax(lowest)), int(np.argmin(highest))
        # The larger the drift, the less the later of the two bounds.
        low, high = (drift, high) if time[above] > time[below] else (low, drift)
    return max(0.0, float(lowest[above] - highest[below]))


def _length(pair: _Series, first: int, last: int) -> int:
    """Return the duration of these training steps, from the last reading before to the last one in them, ns."""
    before, until = pair.axis[pair.step < first], pair.axis[pair.step <= last]
    begin = before.max() if len(before) else pair.axis[0]
    return int(until.max() - begin)


def _culprit(jump: _Jump, pairs: Sequence[_Series]) -> int:
    """Return the clock whose differences with others jump too; of equals the one that is not the reference."""
    return max(jump.clocks, key=lambda clock: (_evidence(jump.of(clock), jump.clocks, pairs), clock))


def _evidence(step: ClockStep, seen_by: tuple[int, int], pairs: Sequence[_Series]) -> int:
    """Count pairs of this clock with others whose difference jumps at that instant, less those where it stays."""
    return sum(_vote(step, pair) for pair in pairs if step.clock in pair.clocks and pair.clocks != seen_by)


def _vote(step: ClockStep, pair: _Series) -> int:
    """Return 1 if the difference of this pair jumped with the clock, −1 if not, 0 if that is unknown."""
    before, after = _sides(step, pair)
    fewest = min(len(before), len(after))
    if fewest < _FEWEST or _SIGMAS * error_of_median(noise_of(pair.level), fewest) > abs(step.size_ns) / 2:
        return 0
    expected = step.size_ns if step.clock == pair.clocks[0] else -step.size_ns
    change = float(np.median(pair.level[after]) - np.median(pair.level[before]))
    return 1 if abs(change - expected) < abs(change) else -1


def _sides(step: ClockStep, pair: _Series) -> tuple[Int64, Int64]:
    """Return positions of the last readings surely before this step, and of the first after it."""
    first, last = step.steps
    if first >= 0 and (pair.step >= 0).all():
        before, after = pair.step < first, pair.step > last
    else:
        times = pair.of(step.clock)
        before, after = times <= min(step.before, step.after), times >= max(step.before, step.after)
    return np.flatnonzero(before)[-WINDOW:], np.flatnonzero(after)[:WINDOW]


def _may_be_one(known: ClockStep, step: ClockStep, readings: _Series) -> bool:
    """Return whether two steps of a clock may be one: of like size, and at most a window of readings apart."""
    larger = max(abs(known.size_ns), abs(step.size_ns))
    if known.clock != step.clock or abs(known.size_ns - step.size_ns) > larger / 2:
        return False
    # A clock that was stepped back reads less afterwards.
    known_range, step_range = sorted((known.before, known.after)), sorted((step.before, step.after))
    between = sorted((*known_range, *step_range))[1:3]
    times = readings.of(step.clock)
    inside = int(((times > between[0]) & (times < between[1])).sum())
    return (known_range[0] < step_range[1] and step_range[0] < known_range[1]) or inside < WINDOW


class ClockChange(NamedTuple):
    """A rise of the line by ``size`` ns from this position on."""

    position: int
    size: float


def change_points(time: Float64, difference: Float64, most: int = _MOST_CHANGES) -> list[ClockChange]:
    """Return the jumps of the line, ascending; the largest is found first, then those on either side of it."""
    largest = _largest_jump(time, difference) if most else None
    if largest is None:
        return []
    position = largest.position
    left = change_points(time[:position], difference[:position], most - 1)
    right = change_points(time[position:], difference[position:], most - 1 - len(left))
    return [*left, largest, *(ClockChange(position + change.position, change.size) for change in right)]


def without_drift(time: Float64, difference: Float64) -> Float64:
    """Return the difference less its slope."""
    if not len(time) or time[-1] <= time[0]:
        return difference
    # The median over pairs a tenth of the time apart, few of which hold a jump. By time, not by number: of readings
    # that come in bursts, as those of a step do, neighbours show only noise. Of medians, as all readings of a burst
    # have the same partner, which may be late.
    window = max(1, min(WINDOW, len(time) // _WINDOWS))
    time_of, middle = (np.median(_windows(values, window), axis=1) for values in (time, difference))
    later = np.searchsorted(time_of, time_of + (time[-1] - time[0]) / 10)
    earlier = np.flatnonzero(later < len(time_of))
    later = later[earlier]
    slope = np.median((middle[later] - middle[earlier]) / (time_of[later] - time_of[earlier]))
    # A jump by more than the run took is in the time as well, and in most pairs.
    slope = np.clip(slope, -_MOST_DRIFT, _MOST_DRIFT)
    return np.asarray(difference - slope * time)


def _windows(values: Float64, window: int) -> Float64:
    return np.lib.stride_tricks.sliding_window_view(values, window)


def noise_of(level: Float64) -> float:
    """Return the standard deviation of single readings; jumps do not count."""
    return MAD_TO_SIGMA * float(np.median(np.abs(np.diff(level)))) / float(np.sqrt(2))


def error_of_median(noise: float, count: int) -> float:
    """Return the standard error of the median of so many readings."""
    return noise * ERROR_OF_MEDIAN / float(np.sqrt(count))


def _largest_jump(time: Float64, difference: Float64) -> ClockChange | None:
    window = min(WINDOW, len(time) // _WINDOWS)
    if window < _SMALLEST_WINDOW:
        return None
    level = without_drift(time, difference)
    medians = np.median(_windows(level, window), axis=1)
    jumps = medians[window:] - medians[:-window]  # jumps[i]: between readings i + window − 1 and i + window
    largest = int(np.argmax(np.abs(jumps)))
    error_of_jump = error_of_median(noise_of(level), window) * float(np.sqrt(2))
    spread = sigma_of_deviations(jumps)
    if abs(jumps[largest]) < max(
        _SMALLEST_STEP_NS, _SIGMAS_OF_A_JUMP * WINDOW / window * error_of_jump, _SPREADS * spread
    ):
        return None
    left, right = float(medians[largest]), float(medians[largest + window])
    position = largest + _best_split(level[largest : largest + 2 * window], left, right)
    return ClockChange(position, right - left) if _persists(level, position, left, right) else None


def _persists(level: Float64, position: int, left: float, right: float) -> bool:
    nearer_to_left = np.abs(level - left) < np.abs(level - right)
    before = nearer_to_left[max(0, position - _NEIGHBOURHOOD) : position]
    after = ~nearer_to_left[position : position + _NEIGHBOURHOOD]
    return bool(min(before.mean(), after.mean()) >= _PERSISTENCE)


def _best_split(level: Float64, left: float, right: float) -> int:
    error_left = np.concatenate([[0.0], np.cumsum(np.abs(level - left))])
    error_right = np.concatenate([[0.0], np.cumsum(np.abs(level - right)[::-1])])[::-1]
    return 1 + int(np.argmin((error_left + error_right)[1:-1]))
