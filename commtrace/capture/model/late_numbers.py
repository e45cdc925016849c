"""Change the numbers of steps that began before this rank knew how many steps its world had behind it.

A process that joins others counts from 0; they have trained before, and go on with their count. It hears of that from
the store, beside training, when it may have begun some steps.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.trace.spans import RowBatch

_ANY_STEP: Final = int(np.iinfo(np.int32).max)


class LateNumbers:
    """Adds ``shift`` to the numbers of all steps: as they are given, from then on, and in the rows of those before."""

    def __init__(self, shift: int) -> None:
        self._shift = shift
        self._last = _ANY_STEP  # of the steps with a number that is too low
        self._has_given = False

    def next(self, step: int) -> int:
        """Return the number of the next step, which would be ``step``. On the training thread."""
        if self._has_given:
            return step
        self._last, self._has_given = step - 1, True
        return step + self._shift

    def renumber(self, batch: RowBatch) -> RowBatch:
        """Return rows with the numbers that their steps should have had. On the harvester's thread."""
        return batch.with_later_steps(self._last, self._shift)
