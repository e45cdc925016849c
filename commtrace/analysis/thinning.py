"""Thin very many rows to those whose number is a multiple of 2^k, with the smallest k that leaves fewer than the limit.

No part needs a larger k than the whole, so parts can be thinned one by one, and then together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Bool, Spans


def least_power(numbers: npt.NDArray[np.generic], fewer_than: int, power: int = 0) -> int:
    """Return the smallest k ≥ ``power`` with fewer multiples of 2^k than the limit."""
    while np.count_nonzero(multiples(numbers, power)) >= fewer_than and power < 62:
        power += 1
    return power


def multiples(numbers: npt.NDArray[Any], power: int) -> Bool:
    return np.asarray(numbers & ((1 << power) - 1) == 0)


@dataclass(frozen=True, slots=True)
class Thinned:
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
