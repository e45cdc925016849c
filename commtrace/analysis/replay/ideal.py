"""Ideal durations for a replay: the same operation takes the same time everywhere.

Compute takes its mean, as in the what-if literature: total work stays the same. Communication takes its median, which
rare outliers (a retransmission, a descheduled thread) do not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import find_rows, grouped, pack
from commtrace.analysis.replay.step_statistics import (
    Entries,
    StepStatistics,
    TransferKind,
    TransferTable,
    WorkTable,
)
from commtrace.analysis.statistics import Float64, exact_of_each, grouped_median
from commtrace.trace.spans import Int32, Int64


class Ideal(NamedTuple):
    """Ideal durations of the operations of a run, ns."""

    entries: Entries
    mean_ns: Int64  # of each entry, over the same work
    equal_ns: Int64  # of each entry, if all stages and chunks took the mean of all of them
    kinds: tuple[TransferKind, ...]
    transfer_ns: Int64  # median of each kind

    @classmethod
    def of(cls, statistics: StepStatistics) -> Ideal:
        table, transfers = statistics.table, statistics.transfers
        means = mean_work(table)
        equal = equal_stages(table, means, table.by_entry(table.total_ns))
        return cls(table.entries, means, equal, transfers.kinds, median_transfers(transfers))

    def of_work(self, entries: Entries, entry: Int32, ns: Int64) -> tuple[Int64, Int64]:
        """Return the mean, and that of equal stages, of work; its own duration ``ns`` where they are unknown.

        ``entry`` indexes ``entries``.
        """
        known = find_rows(self.entries, entries)[entry]
        mean, equal = (
            np.where(known >= 0, np.append(durations, 0)[known], ns) for durations in (self.mean_ns, self.equal_ns)
        )
        return mean, equal

    def of_transfers(self, kinds: Sequence[TransferKind], kind: Int32, ns: npt.NDArray[np.integer]) -> Int64:
        """Return the median of transfers, their own ``ns`` where it is unknown; ``kind`` indexes ``kinds``."""
        number = {key: at for at, key in enumerate(self.kinds)}
        known = np.array([number.get(key, -1) for key in kinds], np.int64)[kind]
        return np.where(known >= 0, np.append(self.transfer_ns, 0)[known], ns)


def mean_work(table: WorkTable) -> Int64:
    """Return the mean duration of the same work for each entry, ns."""
    work = table.entries.work
    total = np.bincount(work, table.by_entry(table.total_ns))
    return np.asarray(np.rint((total / np.bincount(work, table.count))[work]), np.int64)


def equal_stages(table: WorkTable, ns: Int64, total_ns: Int64) -> Int64:
    """Scale durations of the entries so that phases of all stages and chunks take the mean of all of them.

    ``total_ns`` is the time of each entry in all steps together.
    """
    entries, phase = table.entries, table.entries.is_in_phase
    part = pack([entries.kind, *(np.where(phase, column, -1) for column in (entries.stage, entries.chunk))])
    begun = table.by_entry(table.begins_phase)
    here, everywhere = (_mean_of_phase(group, begun, total_ns) for group in (part, entries.kind))
    scale = np.where(phase & (here > 0), everywhere / np.maximum(here, 1e-9), 1.0)
    return np.asarray(np.rint(ns * scale), np.int64)


def _mean_of_phase(group: npt.NDArray[np.integer], begun: Int64, total_ns: Int64) -> Float64:
    """Return the mean duration of a whole phase of its group for each entry."""
    _, number = grouped(group)
    return np.asarray((np.bincount(number, total_ns) / np.maximum(np.bincount(number, begun), 1))[number])


def median_transfers(transfers: TransferTable) -> Int64:
    """Return the median duration of each kind of transfer, ns: of the exact ones, if there are any."""
    chosen = exact_of_each(transfers.exact, transfers.kind)
    medians = grouped_median(transfers.kind[chosen], transfers.ns[chosen], len(transfers.kinds))
    return np.asarray(np.rint(medians), np.int64)
