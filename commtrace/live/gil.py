"""Long work beside training, in pieces."""

from __future__ import annotations

import time
from typing import Final

_HOLD_NS: Final = 1_000_000
"""A thread that waits gets the GIL after this at the latest; each time costs both threads some ten µs."""


def let_go_of_the_gil() -> None:
    """Let a training thread that waits for the GIL have it: otherwise it waits a whole switch interval, 5 ms."""
    time.sleep(0)


class Breath:
    """Lets go of the GIL now and then in work of many small pieces.

    >>> breath = Breath()
    >>> for piece in range(1_000):
    ...     breath.take()
    """

    def __init__(self) -> None:
        self._since_ns = time.perf_counter_ns()

    def take(self) -> None:
        """Between two pieces."""
        if time.perf_counter_ns() - self._since_ns > _HOLD_NS:
            let_go_of_the_gil()
            self._since_ns = time.perf_counter_ns()
