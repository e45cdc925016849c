"""Which steps are recorded in detail: a rule on the step's number alone, so that all ranks agree without a word.

>>> plan = DetailPlan(every=10)
>>> [step for step in range(30) if plan.details(step)]
[0, 10, 20]
>>> plan.add(StepRange(13, 15))
>>> [step for step in range(30) if plan.details(step)]
[0, 10, 13, 14, 20]
"""

from __future__ import annotations

from commtrace.trace.step_range import StepRange


class DetailPlan:
    """The steps in detail: one in ``every`` (those divisible by it; 0: none), and what was asked for since.

    Attributes:
        every: one step in so many.
        requested: further steps. Replaced as a whole, so that any thread may read it.
    """

    __slots__ = ("every", "requested")

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.requested: tuple[StepRange, ...] = ()

    def details(self, step: int) -> bool:
        """Whether ``step`` is recorded in detail."""
        return (self.every > 0 and step % self.every == 0) or self.requests(step)

    def requests(self, step: int) -> bool:
        """Whether somebody has asked for this very step."""
        return any(step in steps for steps in self.requested)

    def add(self, steps: StepRange) -> None:
        """Also these steps. Ranges that have been asked for before stay."""
        self.requested = (*self.requested, steps)
