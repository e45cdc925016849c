"""The times of every rank in every step, or in blocks of neighbouring steps when there are many.

>>> rank_steps(analyse("commtrace-runs/my-run")).of("compute") # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.states import BUBBLE, COMPUTE, TRANSFER, WAIT
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.transfers import large_transfers
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.trace.spans import Int64

QUANTITIES: Final = ("steps", "wall", "compute", "wait", "transfer", "bubble", "bus_bytes", "bus_ns")
"""``steps`` is a number, ``bus_bytes`` and ``bus_ns`` are bytes on the bus and time of large calls (busbw is their
ratio); the others are ns, summed over the steps."""

UNKNOWN: Final = -1

MOST_BLOCKS: Final = 512
MOST_CELLS: Final = 32_768
"""Ranks × blocks that are kept: of more, neighbouring blocks are added up."""


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Sums by rank and block of steps. Those of several windows of a run add up."""

    ranks: Int64  # numbers, ascending
    block: Int64  # step number >> halvings, ascending
    first: Int64  # first and last step of each block
    last: Int64
    values: Int64  # ranks × blocks × QUANTITIES
    halvings: int = 0

    def __add__(self, other: RankSteps) -> RankSteps:
        halvings = max(self.halvings, other.halvings)
        first, second = self._halved(halvings), other._halved(halvings)
        both = RankSteps(
            self.ranks,
            np.concatenate([first.block, second.block]),
            np.concatenate([first.first, second.first]),
            np.concatenate([first.last, second.last]),
            np.concatenate([first.values, second.values], axis=1),
            halvings,
        )
        return both._summed().bounded()

    def of(self, quantity: str) -> Int64:
        """Return one of the :data:`QUANTITIES`, ranks × blocks."""
        return np.asarray(self.values[:, :, QUANTITIES.index(quantity)])

    def blocks_of(self, steps: Int64) -> Int64:
        """Return the index of the block of each step."""
        return np.searchsorted(self.block, steps >> self.halvings)

    def bounded(self) -> RankSteps:
        """Return the same with so few blocks as are kept."""
        bounded = self
        while len(bounded.block) > max(1, min(MOST_BLOCKS, MOST_CELLS // max(len(self.ranks), 1))):
            bounded = bounded._halved(bounded.halvings + 1)
        return bounded

    def _halved(self, halvings: int) -> RankSteps:
        if halvings == self.halvings:
            return self
        return replace(self, block=self.block >> (halvings - self.halvings), halvings=halvings)._summed()

    def _summed(self) -> RankSteps:
        """Add up equal blocks."""
        block, begins, which = np.unique(self.block, return_index=True, return_inverse=True)
        if len(block) == len(self.block):
            return self
        by_block = np.zeros((len(block), len(self.ranks), len(QUANTITIES)), np.int64)
        np.add.at(by_block, which.reshape(-1), self.values.transpose(1, 0, 2))
        first, last = self.first[begins], self.last[begins]
        np.minimum.at(first, which, self.first)
        np.maximum.at(last, which, self.last)
        return replace(self, block=block, first=first, last=last, values=by_block.transpose(1, 0, 2))


def rank_steps(analysis: Analysis) -> RankSteps:
    """Add up the steps that count, by rank and step."""
    times = analysis.partition
    ranks, steps = np.array([*analysis.context.run.ranks], np.int64), np.unique(times.step).astype(np.int64)
    values = np.zeros((len(ranks), len(steps), len(QUANTITIES)), np.int64)
    cell = np.searchsorted(ranks, times.rank), np.searchsorted(steps, times.step)
    for column, amount in enumerate(_amounts(times)):
        np.add.at(values[:, :, column], cell, amount)
    context = analysis.context
    for block in context.run.blocks:
        large = large_transfers(context, block)
        cell = np.searchsorted(ranks, block.rank()[large.row]), np.searchsorted(steps, block.spans.step[large.row])
        np.add.at(values[:, :, QUANTITIES.index("bus_bytes")], cell, np.rint(large.bus_bytes).astype(np.int64))
        np.add.at(values[:, :, QUANTITIES.index("bus_ns")], cell, large.ns)
    return RankSteps(ranks, steps, steps, steps, values).bounded()


def _amounts(times: Partition) -> tuple[Int64, ...]:
    """Return the first columns of the quantities."""
    num_steps = np.ones(len(times.rank), np.int64)
    return (num_steps, times.wall_ns, *(times.total(kind) for kind in (COMPUTE, WAIT, TRANSFER, BUBBLE)))


def own_and_typical_work(
    times: RankSteps, work: StepStatistics | None, slow: Collection[int] = ()
) -> tuple[Int64, Int64]:
    """Return the own work of each rank per step and the median of its stage, ns, by rank and block.

    Ranks that are known to be ``slow`` are left out of the median: of two ranks it would be as far from both.
    It is :data:`UNKNOWN` of ranks alone in their stage, and without ``work``, where steps could not be replayed.
    """
    shape = times.of("steps").shape
    if work is None:
        return (np.full(shape, UNKNOWN, np.int64),) * 2
    work_ns = work.by_rank_and_step(work.table.work_ns)
    typical_ns = work.typical_work_ns(work_ns, slow)
    rank, block = np.searchsorted(times.ranks, work.ranks), times.blocks_of(work.steps)
    number = np.bincount(block, minlength=shape[1])

    def mean(values: npt.NDArray[np.float64]) -> Int64:
        sums = np.zeros(shape)
        np.add.at(sums, (rank[:, np.newaxis], block[np.newaxis, :]), values)
        known = (number > 0) & np.isfinite(sums)
        return np.where(known, np.rint(np.nan_to_num(sums) / np.maximum(number, 1)), UNKNOWN).astype(np.int64)

    return mean(work_ns), mean(typical_ns)
