"""A host's clock over a run: one line, or several where it was stepped.

A clock that is stepped back shows some readings twice; those count to the part that their half of the gap belongs to.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clock_fit import LinearClock
from commtrace.trace.spans import Int64


class PiecewiseClock(NamedTuple):
    """The parts of a clock; part i + 1 holds from the clock's own reading ``begins[i]`` on."""

    parts: tuple[LinearClock, ...]
    begins: tuple[int, ...] = ()

    def to_reference(self, times: Int64) -> Int64:
        """These readings, on the reference clock."""
        if not self.begins:
            return self.parts[0].to_reference(times)
        which = np.searchsorted(np.array(self.begins), times, side="right")
        return np.choose(which, [part.to_reference(times) for part in self.parts])

    def moved_up(self, shift_ns: int) -> PiecewiseClock:
        """The clock whose readings are later on the reference clock by ``shift_ns``."""
        return self._replace(parts=tuple(part._replace(offset_ns=part.offset_ns - shift_ns) for part in self.parts))


NEVER_STEPPED: Final = PiecewiseClock(())
"""The later parts of a clock that has none."""
