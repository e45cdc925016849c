"""Let training threads run during long work in their process."""

from __future__ import annotations

import time
from typing import Final

_HOLD_NS: Final = 1_000_000
"""Longest time to hold the GIL; each yield costs both threads some ten µs."""


def yield_gil() -> None:
    """Give the GIL to a waiting training thread, which would otherwise wait for the switch interval, 5 ms."""
    time.sleep(0)


class GilYield:
    """Yields the GIL from time to time in work of many small pieces.

    >>> gil_yield = GilYield()
    >>> for piece in range(1_000):
    ...     gil_yield.maybe_yield()
    """

    def __init__(self) -> None:
        self._since_ns = time.perf_counter_ns()

    def maybe_yield(self) -> None:
        """Yield if the GIL was held for long; call it between two pieces."""
        if time.perf_counter_ns() - self._since_ns > _HOLD_NS:
            yield_gil()
            self._since_ns = time.perf_counter_ns()
