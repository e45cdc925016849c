"""Synthetic runs whose clocks are known: collectives over all ranks, read on clocks that are wrong.

>>> job = ClockJob([TrueClock(), TrueClock(offset_ns=5 * SECOND, drift_ppm=80)], ranks_per_host=4)
>>> job.errors_ns(job.run()).max()                                         # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from commtrace.analysis.clocks.align import align
from commtrace.trace.run import Run
from commtrace.trace.spans import Spans
from tests.factory import collective, group, make_run

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
MICROSECOND = 1_000

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrueClock:
    """What a host's clock shows: ``true + offset + drift · true``, and from ``step_at_ns`` (true time) on more."""

    offset_ns: int = 0
    drift_ppm: float = 0.0
    step_at_ns: int = 0
    step_ns: int = 0

    def read(self, true: Times) -> Times:
        stepped = np.where(true >= self.step_at_ns, self.step_ns, 0)
        return np.asarray(true + self.offset_ns + np.rint(true * self.drift_ppm * 1e-6).astype(np.int64) + stepped)


@dataclass(frozen=True)
class ClockJob:
    """One all_reduce over all ranks every ``every_ns``.

    Attributes:
        clocks: one per host.
        ranks_per_host: how many read each of them.
        seconds: length of the run.
        every_ns: between two collectives.
        jitter_ns: standard deviation of how late an end is seen.
        outliers: share of ends that are seen late by up to 50 ms.
        missing: share of rows that a rank did not record.
        seed: of all that is random.
    """

    clocks: Sequence[TrueClock]
    ranks_per_host: int = 1
    seconds: int = 300
    every_ns: int = SECOND // 2
    jitter_ns: float = 5 * MICROSECOND
    outliers: float = 0.01
    missing: float = 0.1
    seed: int = 0

    def run(self) -> Run:
        random = np.random.default_rng(self.seed)
        world = group("dp", *range(len(self.clocks) * self.ranks_per_host))
        true_ends = np.arange(SECOND, self.seconds * SECOND, self.every_ns)
        one_row = make_run(
            {rank: [collective("all_reduce", world, 0, 0, 1)] for rank in world.ranks},
            [world],
            nodes={rank: self._host(rank) for rank in world.ranks},
        )
        rows = {
            rank: self._rows(random, trace.spans, self.clocks[rank // self.ranks_per_host], true_ends)
            for rank, trace in one_row.ranks.items()
        }
        return replace(one_row, ranks={rank: replace(one_row.ranks[rank], spans=own) for rank, own in rows.items()})

    def _host(self, rank: int) -> str:
        return f"host{rank // self.ranks_per_host:04}"

    def _rows(self, random: np.random.Generator, one: Spans, clock: TrueClock, true_ends: Times) -> Spans:
        count = len(true_ends)
        late = np.abs(random.normal(0, self.jitter_ns, count)) + np.where(
            random.random(count) < self.outliers, random.uniform(0, 50 * MILLISECOND, count), 0
        )
        starts = clock.read(true_ends - random.integers(1, 5_000, count) * MICROSECOND)
        ends = np.maximum(clock.read(true_ends + np.rint(late).astype(np.int64)), starts)
        kept = np.flatnonzero(random.random(count) >= self.missing)
        rows = one.take(np.zeros(count, np.int64))
        return rows.replace(start=starts, end=ends, seq=np.arange(count), id=np.arange(count)).take(kept)

    def errors_ns(self, run: Run) -> Times:
        """How far, at 1,000 instants of the run, the hosts' aligned clocks are from each other."""
        by_host = {clock.host: clock for clock in align(run).hosts}
        # Not at the instants of steps themselves: between two collectives nobody can know.
        true = np.linspace(SECOND, (self.seconds - 1) * SECOND, 1_000).astype(np.int64)
        for clock in self.clocks:
            if clock.step_ns:
                true = true[np.abs(true - clock.step_at_ns) > 2 * self.every_ns + abs(clock.step_ns)]
        aligned = np.stack(
            [by_host[f"host{number:04}"].to_reference(clock.read(true)) for number, clock in enumerate(self.clocks)]
        )
        return np.asarray(np.abs(aligned - aligned[0]))
