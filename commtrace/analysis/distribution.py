"""How values are distributed: exactly while they are few, else to half a thousandth, in memory that does not grow.

Distributions of parts add up to that of the whole, in any order.

>>> Distribution.of(np.array([5, 1, 9])).nearest_rank(50)       # doctest: +SKIP
5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Int64

_BITS: Final = 11
"""Leading bits that are kept of a value when there are very many. The middle of what they leave open is wrong by at
most one part in 2^11."""

Values = npt.NDArray[Any]
Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True)
class Distribution(Generic[Value]):
    """Values that are not negative.

    Attributes:
        parts: the values themselves, in any order; none once they were rounded.
        rounded, counts: the values rounded to their leading bits, ascending, and how often each occurs.
        maximum: of all values, exactly.
    """

    parts: tuple[Values, ...]
    rounded: Values
    counts: Int64
    maximum: Value

    @classmethod
    def of(cls, values: Values) -> Distribution[Value]:
        """Return that of these values, which are int64 or float64."""
        return cls((values,), values[:0], np.zeros(0, np.int64), values.max(initial=0).item())

    def __len__(self) -> int:
        return sum(map(len, self.parts)) + int(self.counts.sum())

    @property
    def is_exact(self) -> bool:
        """Whether nothing was rounded."""
        return not len(self.rounded)

    def __add__(self, other: Distribution[Value]) -> Distribution[Value]:
        maximum = max(self.maximum, other.maximum)
        if self.is_exact and other.is_exact:
            return Distribution(self.parts + other.parts, self.rounded, self.counts, maximum)
        one, another = self.round(), other.round()
        values, which = np.unique(np.concatenate([one.rounded, another.rounded]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, which.reshape(-1), np.concatenate([one.counts, another.counts]))
        return Distribution((), values, counts, maximum)

    def round(self) -> Distribution[Value]:
        """Return the same with its values rounded to their leading bits."""
        if not self.is_exact:
            return self
        rounded, counts = np.unique(_rounded(np.concatenate(self.parts)), return_counts=True)
        return Distribution((), rounded, counts.astype(np.int64), self.maximum)

    def nearest_rank(self, percent: int) -> Value | None:
        """Return the smallest value that at least ``percent`` % of the values do not exceed; None without values."""
        count = len(self)
        if not count:
            return None
        return self.maximum if percent == 100 else self._at(-(-percent * count // 100) - 1)

    def median(self) -> float | None:
        """Return the middle value, of an even number of them the mean of the middle two; None without values."""
        count = len(self)
        return float(np.mean([self._at((count - 1) // 2), self._at(count // 2)])) if count else None

    def _at(self, place: int) -> Value:
        """The value at a place of the ascending order."""
        if self.is_exact:
            value = np.partition(np.concatenate(self.parts), place)[place]
        else:
            value = self.rounded[np.searchsorted(np.cumsum(self.counts), place, side="right")]
        found: Value = value.item()
        return found


def _rounded(values: Values) -> Values:
    """Values in the middle of what their leading bits leave open; whole numbers of few bits stay as they are."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    leading = np.floor(np.ldexp(fraction, _BITS))
    is_whole = exponent <= _BITS if values.dtype == np.int64 else leading == 0
    middle = np.ldexp(np.where(is_whole, leading, leading + 0.5), exponent - _BITS)
    return np.asarray(middle.astype(values.dtype))
