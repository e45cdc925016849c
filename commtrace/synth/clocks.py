"""Simulate the clocks of hosts, which disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from commtrace.trace.metadata import ClockAnchor
from commtrace.trace.spans import Int64

EPOCH_NS = 1_700_000_000_000_000_000
"""Epoch ns of the true instant 0."""

_ANCHOR_BRACKET_NS = 120
_ANCHOR_EVERY_NS = 10_000_000_000
_MOST_UPTIME_NS = 30 * 24 * 3600 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Clock:
    """A host's monotonic clock and wall clock.

    At the true instant t the monotonic clock shows t + ``offset_ns`` + round(t · ``drift_ppm`` · 10⁻⁶). The wall clock
    has the same rate, off by ``wall_error_ns``. From ``step_at_ns`` on both are ahead, by ``step_ns`` and
    ``wall_step_ns``.
    """

    offset_ns: int = 0
    drift_ppm: float = 0.0
    wall_error_ns: int = 0
    step_at_ns: int = 0
    step_ns: int = 0
    wall_step_ns: int = 0

    def read(self, true_ns: Int64) -> Int64:
        """Return the monotonic clock's readings at true instants, ns."""
        drifted = true_ns + np.rint(true_ns * (self.drift_ppm * 1e-6)).astype(np.int64) + self.offset_ns
        if self.step_ns:
            drifted = drifted + np.where(true_ns >= self.step_at_ns, self.step_ns, 0)
        return np.asarray(drifted, np.int64)

    def anchors(self, first_ns: int, last_ns: int) -> tuple[ClockAnchor, ...]:
        """Return a recorder's pairs of readings between two true instants: at the start and every ten seconds."""
        moments = np.arange(first_ns, last_ns + 1, _ANCHOR_EVERY_NS, dtype=np.int64)
        monotonic = self.read(moments)
        wall = monotonic - self.offset_ns + self.wall_error_ns + EPOCH_NS
        wall = wall + np.where((moments >= self.step_at_ns) & (self.wall_step_ns != 0), self.wall_step_ns, 0)
        return tuple(
            ClockAnchor(int(shown), int(real), _ANCHOR_BRACKET_NS) for shown, real in zip(monotonic, wall, strict=True)
        )


PERFECT = Clock()


def random_clocks(hosts: int, *, wall_error_ns: int = 0, drift_ppm: float = 0.0, seed: int = 0) -> Mapping[int, Clock]:
    """Return the clocks of hosts, by number, with random uptimes and errors up to the given amounts."""
    random = np.random.default_rng([seed, hosts])
    return {
        host: Clock(
            offset_ns=int(random.integers(0, _MOST_UPTIME_NS)),
            drift_ppm=float(random.uniform(-drift_ppm, drift_ppm)),
            wall_error_ns=int(random.integers(-wall_error_ns, wall_error_ns + 1)),
        )
        for host in range(hosts)
    }
