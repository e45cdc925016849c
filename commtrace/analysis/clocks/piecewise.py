"""A host's clock over a run: one line, or several where it was stepped.

A clock that is stepped back shows some readings twice. Which part such a reading is of, the step of training tells in
which it was taken. In the steps in which the clock may have been stepped, a jump that is longer than they are tells it:
what reads more was read before. Where there are no steps, it is the part that its half of the overlap is nearer to.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.fit import LinearClock
from commtrace.trace.spans import Bool, Int32, Int64


class Begin(NamedTuple):
    """The begin of a later part of a clock.

    Attributes:
        at_ns: the clock's own reading.
        back_in: where it was stepped back, the steps of training, first and last, in which that can have been; (−1, −1)
            where there are none. None where it was stepped forward.
        is_far: back by more than these steps took.
        unsure: readings between these may be of either part, as far as they themselves tell.
    """

    at_ns: int
    back_in: tuple[int, int] | None = None
    is_far: bool = False
    unsure: tuple[int, int] = (0, 0)

    def is_past(self, times: Int64, steps: Int32 | None) -> Bool:
        """Return which of these readings, taken in these steps of training (−1: in none), are of the later part."""
        past = np.asarray(times >= self.at_ns)
        if self.back_in is None or self.back_in[0] < 0 or steps is None:
            return past
        first, last = self.back_in
        around = ~past if self.is_far else past if first == last else steps > first
        return np.where(steps < 0, past, (steps > last) | ((steps >= first) & around))

    def is_sure(self, times: Int64, steps: Int32) -> Bool:
        """Of which of these readings it is known which part they are of."""
        lowest, highest = self.unsure
        is_past = np.asarray((times < lowest) | (times > highest))
        if self.back_in is None or self.back_in[0] < 0:
            return is_past
        first, last = self.back_in
        return is_past | ((steps >= 0) & ((steps < first) | (steps > last)))


class PiecewiseClock(NamedTuple):
    """The parts of a clock, in their order; part i + 1 holds from ``starts[i]`` on."""

    parts: tuple[LinearClock, ...]
    starts: tuple[Begin, ...] = ()

    @property
    def begins(self) -> tuple[int, ...]:
        """The clock's own readings at which its later parts begin."""
        return tuple(start.at_ns for start in self.starts)

    @property
    def goes_back(self) -> bool:
        """Return whether some readings were shown twice, so that what was read first need not be earlier."""
        return any(start.back_in is not None for start in self.starts)

    def is_sure(self, times: Int64, steps: Int32) -> Bool:
        """Of which of these readings, taken in these steps of training, it is known what they are on the reference."""
        sure = np.ones(len(times), np.bool_)
        for start in self.starts:
            sure &= start.is_sure(times, steps)
        return sure

    def to_reference(self, times: Int64, steps: Int32 | None = None) -> Int64:
        """Return these readings, on the reference clock; ``steps`` of training in which they were taken, if anybody
        knows.
        """
        moved = self.parts[0].to_reference(times)
        for start, part in zip(self.starts, self.parts[1:], strict=True):
            moved = np.where(start.is_past(times, steps), part.to_reference(times), moved)
        return np.asarray(moved)

    def moved_up(self, shift_ns: int) -> PiecewiseClock:
        """Return the clock whose readings are later on the reference clock by ``shift_ns``."""
        return self._replace(parts=tuple(part._replace(offset_ns=part.offset_ns - shift_ns) for part in self.parts))


NEVER_STEPPED: Final = PiecewiseClock(())
"""The later parts of a clock that has none."""
