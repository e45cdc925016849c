"""The rule for steps in detail. It depends on the step's number alone, so all ranks agree without communication.

>>> plan = DetailPlan(every=10)
>>> [step for step in range(30) if plan.details(step)]
[0, 10, 20]
>>> plan.add(StepRange(13, 15))
>>> [step for step in range(30) if plan.details(step)]
[0, 10, 13, 14, 20]
"""

from __future__ import annotations

from commtrace.trace.selection.step_range import StepRange


class DetailPlan:
    """The steps in detail: one in ``every`` (those divisible by it; 0: none), and requested ones.

    Attributes:
        every: one step in so many.
        requested: further steps. Replaced as a whole, so that any thread may read it.
    """

    __slots__ = ("every", "requested")

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.requested: tuple[StepRange, ...] = ()

    def details(self, step: int) -> bool:
        """Return whether ``step`` is recorded in detail."""
        return (self.every > 0 and step % self.every == 0) or self.requests(step)

    def requests(self, step: int) -> bool:
        """Return whether this step was requested."""
        return any(step in steps for steps in self.requested)

    def add(self, steps: StepRange) -> None:
        """Add steps to those that were requested before."""
        self.requested = (*self.requested, steps)
