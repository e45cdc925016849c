"""Transfers over the links of a job: the duration of communications after all participants had arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from commtrace.analysis.keys import grouped
from commtrace.analysis.replay.step_statistics import Link, Traffic, TransferTable
from commtrace.analysis.statistics import Float64, grouped_median
from commtrace.analysis.stragglers.limits import FEWEST_TRANSFERS
from commtrace.trace.spans import Bool, Int64


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """The transfers of the steps that count, one row for all similar transfers over a link."""

    traffic: tuple[Traffic, ...]
    like: Int64  # equal for rows of the same operation, size and number of members, within hosts or between them
    is_between_hosts: Bool
    row: Int64  # of each communication, as are step and ns
    step: Int64
    ns: Float64
    each: TransferTable  # of every participant

    @classmethod
    def of(cls, table: TransferTable, counted: Bool, node: Mapping[int, str]) -> LinkTransfers | None:
        """Return the transfers of the steps that count; None if these are too few. ``node`` is by rank."""
        rows = np.flatnonzero(counted[table.step] & (table.row >= 0))
        if len(rows) < FEWEST_TRANSFERS:
            return None
        first, join = grouped(table.join[rows])
        ns = np.zeros(len(first))
        np.maximum.at(ns, join, table.ns[rows].astype(np.float64))  # a sender may not see the end of what it sent
        crosses = [len({node.get(rank) for rank in one.link.ranks}) > 1 for one in table.traffic]
        number: dict[tuple[str, int, int, bool], int] = {}
        like = [
            number.setdefault((one.operation, one.num_bytes, one.participants, between), len(number))
            for one, between in zip(table.traffic, crosses, strict=True)
        ]
        return cls(
            traffic=table.traffic,
            like=np.array(like, np.int64),
            is_between_hosts=np.array(crosses),
            row=table.row[rows][first].astype(np.int64),
            step=table.step[rows][first].astype(np.int64),
            ns=ns,
            each=table,
        )

    def __len__(self) -> int:
        return len(self.traffic)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(one.link for one in self.traffic)

    def typical_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in these steps; NaN if there are too few transfers."""
        chosen = steps[self.step]
        enough = np.bincount(self.row[chosen], minlength=len(self)) >= FEWEST_TRANSFERS
        return np.where(enough, grouped_median(self.row[chosen], self.ns[chosen], len(self)), np.nan)

    def per_step_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in each of these steps, shape (rows, steps); NaN without any."""
        count = len(steps)
        medians = grouped_median(self.row * count + self.step, self.ns, len(self) * count)
        return np.asarray(medians.reshape(-1, count)[:, steps])
