"""Fit offsets and drifts of the hosts' clocks to pairs of readings, by robust least squares.

A reading T of clock h is T − o_h − d_h·(T − origin_h) on the reference clock. An observation is the end of a
synchronising collective, read on two clocks; both must give the same result, which is linear in all o and d. Huber's
rule takes weight from outliers (a rank was descheduled before it took the time); the problem stays convex.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import numbered, pack, run_begins, sort_groups
from commtrace.analysis.matching.operations import SYNCHRONISING, named, replayed_rows, unfinished_rows_of
from commtrace.analysis.statistics import MAD_TO_SIGMA
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

MOST_ENDS: Final = 600_000
"""Most ends of collectives that are used."""

Float64 = npt.NDArray[np.float64]

_ROUNDS: Final = 60
# Equations are solved once what is left of them would move clocks by less.
_SOLVED_NS: Final = 1e-6
_MOST_ROUNDS_PER_UNKNOWN: Final = 10
_HUBER_K: Final = 1.345
_SMALLEST_SCALE_NS: Final = 100.0
# A crystal drifts by less than this; it decides where too few observations cannot (one alone: no drift).
_LIKELY_DRIFT: Final = 200e-6
# A round that changes no clock by more is the last one; the rough fit only has to show which drifts can be seen.
_ROUGH_NS: Final = 10.0
_PRECISE_NS: Final = 0.1
# A drift that the observations do not show is not applied: its noise would bend durations.
_SIGMAS_OF_A_DRIFT: Final = 3.0
_FEW_READINGS: Final = 20


@dataclass(frozen=True, slots=True)
class Observations:
    """Pairs of readings of one instant, as columns: the numbers of two clocks and their readings, ns.

    No member leaves a synchronising collective before all have arrived. However late an end was seen, the true
    difference a − b lies between ``least`` and ``most``.
    """

    clock_a: Int64
    clock_b: Int64
    time_a: Int64
    time_b: Int64
    least: Int64  # last start on a less first end on b
    most: Int64  # first end on a less last start on b
    step: Int32 | None = None

    def __len__(self) -> int:
        return len(self.time_a)


def observe(run: Run, keys: Sequence[tuple[str, str]]) -> Observations:
    """Compare the median readings of neighbouring hosts of each collective; clock i is ``keys[i]``."""
    group, seq, clock, start, end, step = _collectives(run, keys)
    bucket = pack((numbered(group), seq))
    order = np.lexsort((end, clock, bucket))
    bucket, clock, start, end, step = bucket[order], clock[order], start[order], end[order], step[order]
    begins = np.flatnonzero(run_begins(bucket) | run_begins(clock))
    last_start = np.maximum.reduceat(start, begins) if len(begins) else start
    first_end = end[begins]
    middle = (begins + np.append(begins[1:], len(end)) - 1) // 2  # lower median: ends are seen late, never early
    bucket, clock, end, step = bucket[middle], clock[middle], end[middle], step[middle]
    a = np.flatnonzero(bucket[1:] == bucket[:-1])
    b = a + 1
    least, most = last_start[a] - first_end[b], first_end[a] - last_start[b]
    return Observations(clock[a], clock[b], end[a], end[b], least, most, step[a])


def _collectives(run: Run, keys: Sequence[tuple[str, str]]) -> tuple[Int64, ...]:
    """Return group, seq, clock, start, end and step of the synchronising collectives of all ranks."""
    number = {key: position for position, key in enumerate(keys)}
    rows = [_synchronising(run, block) for block in run.blocks]
    seqs = [block.spans.seq[rows_of_block] for block, rows_of_block in zip(run.blocks, rows, strict=True)]
    # Which collectives are left out must not depend on the rank: every member keeps the same ones.
    power = least_power(np.concatenate(seqs), MOST_ENDS)
    parts = []
    for block, rows_of_block, seq in zip(run.blocks, rows, seqs, strict=True):
        kept = rows_of_block[multiples(seq, power)]
        clock = np.array([number[run.ranks[rank].clock_key] for rank in block.ranks])
        spans = block.spans
        parts.append(
            (
                spans.group[kept],
                spans.seq[kept],
                block.per_row(clock)[kept],
                spans.start[kept],
                spans.end[kept],
                spans.step[kept],
            )
        )
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _synchronising(run: Run, block: Block) -> Int64:
    spans = block.spans
    rows = (spans.kind == schema.COLLECTIVE) & named(run, spans, SYNCHRONISING) & ~unfinished_rows_of(run, block)
    # An uneven all_to_all does not end together; nor is an operation without group or number an observation.
    rows &= ~replayed_rows(spans)
    return np.flatnonzero(rows & (spans.self_bytes < 0) & (spans.group >= 0) & (spans.seq >= 0))


class Clock(Protocol):
    """A clock whose readings can be put on the reference clock."""

    def to_reference(self, times: Int64, steps: Int32 | None = None) -> Int64:
        """Return these readings, taken in these steps of training, on the reference clock."""


class LinearClock(NamedTuple):
    """A clock that is ``offset_ns`` ahead of the reference at ``origin_ns`` and runs faster by ``drift``."""

    origin_ns: int
    offset_ns: int
    drift: float

    def to_reference(self, times: Int64, steps: Int32 | None = None) -> Int64:
        drifted = np.rint((times - self.origin_ns) * self.drift).astype(np.int64)
        return np.asarray(times - self.offset_ns - drifted)


@dataclass(frozen=True, slots=True)
class Residual:
    """Differences between two readings of one instant on the reference clock, ns."""

    p50: int
    p99: int
    max: int

    @classmethod
    def of(cls, observations: Observations, clocks: Sequence[Clock]) -> Residual:
        times_a, times_b = _on_reference(observations, clocks)
        differences = np.sort(np.abs(times_a - times_b))
        last = len(differences) - 1
        return cls(*(int(differences[round(last * part)]) for part in (0.5, 0.99, 1.0)))


def unconnected(observations: Observations, count: int) -> list[int]:
    """Return the clocks that no chain of observations connects with clock 0."""
    reached = np.zeros(count, np.bool_)
    reached[0] = True
    pairs = np.unique(np.stack([observations.clock_a, observations.clock_b]), axis=1)
    for _ in range(count):
        touched = reached[pairs[0]] | reached[pairs[1]]
        if reached[pairs[:, touched]].all():
            break
        reached[pairs[:, touched]] = True
    return np.flatnonzero(~reached).tolist()


def fit_clocks(observations: Observations, count: int) -> list[LinearClock]:
    """Return the clocks under which the observations agree best; clock 0 is the reference. All must be connected."""
    origins = _origins(observations, count)
    since_a = (observations.time_a - origins[observations.clock_a]).astype(np.float64)
    since_b = (observations.time_b - origins[observations.clock_b]).astype(np.float64)
    design = _Design(observations, since_a, since_b, count)
    none = np.zeros(count, np.bool_)
    solution = design.fit(none, np.zeros(2 * count), precision_ns=_ROUGH_NS)
    errors = design.errors_of_drifts(solution)
    readings = np.bincount(observations.clock_a, minlength=count) + np.bincount(observations.clock_b, minlength=count)
    # The scatter of few readings is often smaller than their error.
    needed = _SIGMAS_OF_A_DRIFT * (1 + _FEW_READINGS / np.maximum(readings, 1))
    invisible = np.abs(solution[1::2]) < needed * errors
    held = np.append(True, invisible[1:])
    solution = design.fit(held if invisible[1:].any() else none, solution, precision_ns=_PRECISE_NS)
    offsets, seconds_of_drift = solution[0::2], solution[1::2]
    return [
        LinearClock(
            int(origins[clock]),
            int(origins[clock] - origins[0]) + round(offsets[clock]),
            float(seconds_of_drift[clock] / design.length),
        )
        for clock in range(count)
    ]


def _origins(observations: Observations, count: int) -> Int64:
    """Return the first reading of each clock; differences from it are exact in float64."""
    origins = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(origins, observations.clock_a, observations.time_a)
    np.minimum.at(origins, observations.clock_b, observations.time_b)
    return origins


class _Design:
    """The linear problem: unknowns are offset and drift of each clock, in turn; clock 0 is held at zero.

    Drift is in ns over ``length``, the time that the observations span, so that all unknowns are of one size.
    """

    def __init__(self, observations: Observations, since_a: Float64, since_b: Float64, count: int) -> None:
        self._count = count
        self.length = max(float(since_a.max()), float(since_b.max()), 1.0)
        self._target = since_a - since_b
        ones = np.ones(len(since_a))
        self._columns = np.stack(
            [
                2 * observations.clock_a,
                2 * observations.clock_a + 1,
                2 * observations.clock_b,
                2 * observations.clock_b + 1,
            ]
        )
        self._factors = np.stack([ones, since_a / self.length, -ones, -since_b / self.length])
        # Few pairs of clocks are compared with each other: only their cells of the normal matrix are not zero.
        cells = self._columns[:, np.newaxis] * (2 * count) + self._columns
        self._cells, of_cell = np.unique(cells, return_inverse=True)
        self._of_cell = of_cell.reshape(cells.shape)
        self._row, self._column = np.divmod(self._cells, 2 * count)

    def residual(self, solution: Float64) -> Float64:
        return np.asarray(self._target - (solution[self._columns] * self._factors).sum(axis=0))

    def fit(self, without_drift: npt.NDArray[np.bool_], start: Float64, *, precision_ns: float) -> Float64:
        """Return the best unknowns.

        Drifts in the mask ``without_drift`` stay zero; ``start`` changes the number of rounds, not the result.
        """
        free = np.ones(2 * self._count, np.bool_)
        free[:2] = False
        free[1::2] &= ~without_drift
        solution = np.where(free, start, 0.0)
        # From zero, the offsets are no idea of how much the readings scatter; all count alike in the first round.
        scale, weights = self._robust(solution) if solution.any() else (1e6, np.ones(len(self._target)))
        for _ in range(_ROUNDS):
            previous = solution
            solution = self._normal(weights, scale, free).solve(previous)
            scale, weights = self._robust(solution)
            if np.abs(solution - previous).max() < precision_ns:
                break
        return solution

    def errors_of_drifts(self, solution: Float64) -> Float64:
        """Return the standard errors of the best drifts, if all unknowns but those of clock 0 are free.

        The covariance of some unknowns is the inverse of the Schur complement of the others in the normal matrix.
        """
        free = np.ones(2 * self._count, np.bool_)
        free[:2] = False
        scale, weights = self._robust(solution)
        matrix = self._normal(weights, scale, free).dense()
        both = matrix[0::2, 1::2]
        without_offsets = matrix[1::2, 1::2] - both.T @ np.linalg.solve(matrix[0::2, 0::2], both)
        return np.append(0.0, scale * np.sqrt(np.diag(np.linalg.inv(without_offsets)))[1:])

    def _robust(self, solution: Float64) -> tuple[float, Float64]:
        """Return the scatter of readings around these clocks, ns, and Huber's weight of each."""
        size = np.abs(self.residual(solution))
        scale = max(MAD_TO_SIGMA * float(np.median(size)), _SMALLEST_SCALE_NS)
        return scale, np.minimum(1.0, _HUBER_K * scale / np.maximum(size, 1e-9))

    def _normal(self, weights: Float64, scale: float, free: npt.NDArray[np.bool_]) -> NormalEquations:
        """Return the normal equations of weighted least squares, for readings that are wrong by ``scale`` ns."""
        size = 2 * self._count
        cells, right = np.zeros(len(self._cells)), np.zeros(size)
        for column, factor, numbers in zip(self._columns, self._factors, self._of_cell, strict=True):
            right += np.bincount(column, weights * factor * self._target, size)
            for cell, other_factor in zip(numbers, self._factors, strict=True):
                cells += np.bincount(cell, weights * factor * other_factor, len(cells))
        likely = (scale / (_LIKELY_DRIFT * self.length)) ** 2
        cells[(self._row == self._column) & (self._row % 2 == 1)] += likely
        # What is held has the equation x = 0.
        held = ~(free[self._row] & free[self._column])
        cells[held] = self._row[held] == self._column[held]
        return NormalEquations(self._row, self._column, cells, np.where(free, right, 0.0), likely)


class NormalEquations(NamedTuple):
    """Symmetric positive definite equations, of which only the cells that are not zero are kept, by row."""

    row: Int64
    column: Int64
    cells: Float64
    right: Float64
    least: float  # no drift has less than this in the diagonal, whatever the offset of its clock

    def dense(self) -> Float64:
        matrix = np.zeros((len(self.right), len(self.right)))
        matrix[self.row, self.column] = self.cells
        return matrix

    def solve(self, start: Float64) -> Float64:
        """Return the solution by conjugate gradients, from a start near it: few cells are not zero.

        Source: Shewchuk, An Introduction to the Conjugate Gradient Method Without the Agonizing Pain (1994), B3.
        """
        begins = np.searchsorted(self.row, np.arange(len(self.right)))
        clocks = _SingleClocks.of(self)
        solution = start.copy()
        residual = self.right - self._times(solution, begins)
        direction = step = clocks.solve(residual)
        size = float(residual @ step)
        # Without rounding, as many rounds as there are unknowns suffice.
        for _ in range(_MOST_ROUNDS_PER_UNKNOWN * len(self.right)):
            if size <= _SOLVED_NS**2:
                break
            image = self._times(direction, begins)
            length = size / float(direction @ image)
            solution += length * direction
            residual -= length * image
            step = clocks.solve(residual)
            size, previous = float(residual @ step), size
            direction = step + size / previous * direction
        return solution

    def _times(self, vector: Float64, begins: Int64) -> Float64:
        return np.asarray(np.add.reduceat(self.cells * vector[self.column], begins))


class _SingleClocks(NamedTuple):
    """The equations of each clock without those of others, which precondition the whole: one column per clock."""

    offset: Float64  # the cell of its offset
    drift_per_offset: Float64
    drift: Float64  # the cell of its drift once the offset is eliminated

    @classmethod
    def of(cls, equations: NormalEquations) -> _SingleClocks:
        row, column = equations.row, equations.column
        offset = equations.cells[(row == column) & (row % 2 == 0)]
        drift = equations.cells[(row == column) & (row % 2 == 1)]
        both = equations.cells[(row == column + 1) & (row % 2 == 1)]
        ratio = both / offset
        return cls(offset, ratio, np.maximum(drift - ratio * both, equations.least))

    def solve(self, right: Float64) -> Float64:
        drifts = (right[1::2] - self.drift_per_offset * right[0::2]) / self.drift
        offsets = right[0::2] / self.offset - self.drift_per_offset * drifts
        return np.stack([offsets, drifts], axis=1).reshape(-1)


def _on_reference(observations: Observations, clocks: Sequence[Clock]) -> tuple[Int64, Int64]:
    times_a, times_b = np.empty_like(observations.time_a), np.empty_like(observations.time_b)
    steps = observations.step
    for number, a in rows_by_clock(observations.clock_a):
        times_a[a] = clocks[number].to_reference(observations.time_a[a], None if steps is None else steps[a])
    for number, b in rows_by_clock(observations.clock_b):
        times_b[b] = clocks[number].to_reference(observations.time_b[b], None if steps is None else steps[b])
    return times_a, times_b


def rows_by_clock(clock: Int64) -> Iterator[tuple[int, Int64]]:
    """Yield the number of each clock that occurs, and its rows."""
    order, begins = sort_groups(clock)
    for rows in np.split(order, begins)[1:]:
        yield int(clock[rows[0]]), rows


class Begin(NamedTuple):
    """The begin of a later part of a clock, by its own reading."""

    at_ns: int
    back_in: tuple[int, int] | None = None  # training steps of the step back, (−1, −1) without steps; None if forward
    is_far: bool = False  # back by more than these steps took
    unsure: tuple[int, int] = (0, 0)  # readings between these may be of either part

    def is_past(self, times: Int64, steps: Int32 | None) -> Bool:
        """Return a mask of the readings of the later part; ``steps`` is −1 outside of any step."""
        past = np.asarray(times >= self.at_ns)
        if self.back_in is None or self.back_in[0] < 0 or steps is None:
            return past
        first, last = self.back_in
        around = ~past if self.is_far else past if first == last else steps > first
        return np.where(steps < 0, past, (steps > last) | ((steps >= first) & around))

    def is_sure(self, times: Int64, steps: Int32) -> Bool:
        """Return a mask of the readings whose part is known."""
        lowest, highest = self.unsure
        is_past = np.asarray((times < lowest) | (times > highest))
        if self.back_in is None or self.back_in[0] < 0:
            return is_past
        first, last = self.back_in
        return is_past | ((steps >= 0) & ((steps < first) | (steps > last)))


class PiecewiseClock(NamedTuple):
    """A host's clock over a run: part i + 1 holds from ``starts[i]`` on.

    A clock that is stepped back shows some readings twice. The step of training decides between them. Within the steps
    of the jump, a jump longer than they are decides: the higher reading came first. Without steps, the nearer half of
    the overlap decides.
    """

    parts: tuple[LinearClock, ...]
    starts: tuple[Begin, ...] = ()

    @property
    def begins(self) -> tuple[int, ...]:
        """Return the clock's own readings at which its later parts begin."""
        return tuple(start.at_ns for start in self.starts)

    @property
    def goes_back(self) -> bool:
        """Return whether some readings were shown twice, so that reading order need not be time order."""
        return any(start.back_in is not None for start in self.starts)

    def is_sure(self, times: Int64, steps: Int32) -> Bool:
        sure = np.ones(len(times), np.bool_)
        for start in self.starts:
            sure &= start.is_sure(times, steps)
        return sure

    def to_reference(self, times: Int64, steps: Int32 | None = None) -> Int64:
        moved = self.parts[0].to_reference(times)
        for start, part in zip(self.starts, self.parts[1:], strict=True):
            moved = np.where(start.is_past(times, steps), part.to_reference(times), moved)
        return np.asarray(moved)

    def moved_up(self, shift_ns: int) -> PiecewiseClock:
        """Return the clock whose readings are later on the reference clock by ``shift_ns``."""
        return self._replace(parts=tuple(part._replace(offset_ns=part.offset_ns - shift_ns) for part in self.parts))


NEVER_STEPPED: Final = PiecewiseClock(())
"""The later parts of a clock that has none."""


def least_power(numbers: npt.NDArray[np.integer], fewer_than: int, power: int = 0) -> int:
    """Return the smallest k ≥ ``power`` with fewer multiples of 2^k than the limit."""
    while np.count_nonzero(multiples(numbers, power)) >= fewer_than and power < 62:
        power += 1
    return power


def multiples(numbers: npt.NDArray[np.integer], power: int) -> Bool:
    return np.asarray(numbers & ((1 << power) - 1) == 0)


@dataclass(frozen=True, slots=True)
class Thinned:
    """Rows whose number is a multiple of 2^``power``: of very many, few enough to fit clocks to.

    No part needs a larger power than the whole, so parts can be thinned one by one, and then together.
    """

    spans: Spans
    power: int = 0

    @classmethod
    def none(cls) -> Thinned:
        return cls(Spans.empty())

    def plus(self, spans: Spans, fewer_than: int) -> Thinned:
        """Return these rows and others, thinned until they are fewer than the limit."""
        new = spans.take(multiples(spans.seq, self.power))
        both = Spans.concatenate([self.spans, new])
        power = least_power(both.seq, fewer_than, self.power)
        return Thinned(both if power == self.power else both.take(multiples(both.seq, power)), power)
