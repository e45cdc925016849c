"""Choose the steps to record: ranges (``A:B``, ``A:B:k``), and the plan for steps in detail."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.errors import ConfigurationError

_OPEN_END = 2**31 - 1
_PATTERN = re.compile(r"([0-9]{0,10})(?::([0-9]{0,10})(?::([0-9]{1,10}))?)?")


class StepRange(NamedTuple):
    """Steps ``first``, ``first + every``, … below ``end``."""

    first: int = 0
    end: int = _OPEN_END
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """Parse ``"A:B"``, ``"A:B:k"``, ``"A:"``, ``":B"`` or ``"A"`` (that step); else raise ConfigurationError."""
        match = _PATTERN.fullmatch(text.strip())
        if not match or not text.strip():
            raise ConfigurationError(f"steps {text[:100]!a}: write A:B (B exclusive), A:B:k for one step in k, or A")
        first = int(match[1] or 0)
        end = first + 1 if ":" not in text else int(match[2] or _OPEN_END)
        every = int(match[3] or 1)
        if end <= first or every < 1:
            raise ConfigurationError(f"steps {text[:100]!a} holds no step: A must be below B, and k at least 1")
        return cls(first, end, every)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step < self.end and (step - self.first) % self.every == 0

    def overlaps(self, first: int, last: int) -> bool:
        """Return whether a step from ``first`` to ``last``, inclusive, can be in the range."""
        return self.first <= last and first < self.end

    def mask(self, steps: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        inside: npt.NDArray[np.bool_] = (steps >= self.first) & (steps < self.end)
        inside &= (steps - self.first) % self.every == 0
        return inside

    def __str__(self) -> str:
        end = "" if self.end == _OPEN_END else str(self.end)
        return f"{self.first}:{end}" + (f":{self.every}" if self.every > 1 else "")


class DetailPlan:
    """The steps in detail: multiples of ``every`` (0: none) and ``requested`` ones; equal on all ranks.

    >>> plan = DetailPlan(every=10)
    >>> plan.add(StepRange(13, 15))
    >>> [step for step in range(30) if plan.details(step)]
    [0, 10, 13, 14, 20]
    """

    __slots__ = ("every", "requested")

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.requested: tuple[StepRange, ...] = ()

    def details(self, step: int) -> bool:
        return (self.every > 0 and step % self.every == 0) or self.requests(step)

    def requests(self, step: int) -> bool:
        return any(step in steps for steps in self.requested)

    def add(self, steps: StepRange) -> None:
        self.requested = (*self.requested, steps)
