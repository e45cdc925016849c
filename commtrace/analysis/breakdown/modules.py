"""Time by module, nested ones included. Modules that differ only in a number share a row: ``decoder.layers.*``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Final

import numpy as np

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.statistics import Distribution
from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
_WAYS: Final = (BACKWARD, RECOMPUTE)

_MOST_TIMES: Final = 1_000_000
"""Step times that a table keeps exactly; of more, only their leading bits."""


@dataclass(slots=True)
class ModuleTime:
    """One row, over all ranks and steps that count."""

    name: str  # with ``*`` for numbers
    members: set[str] = field(default_factory=set)  # full names of its modules
    calls: int = 0  # forwards
    ns: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0, RECOMPUTE: 0})  # by way
    exposed_ns: int = 0  # stalls inside, bubble included; a recompute in its backward counts once
    of_step_ns: dict[int, Distribution[int]] = field(default_factory=dict)  # by rank, of each step

    def __add__(self, later: ModuleTime) -> ModuleTime:
        none: Distribution[int] = Distribution.of(np.zeros(0, np.int64))
        return ModuleTime(
            self.name,
            self.members | later.members,
            self.calls + later.calls,
            {way: total + later.ns[way] for way, total in self.ns.items()},
            self.exposed_ns + later.exposed_ns,
            {
                rank: self.of_step_ns.get(rank, none) + later.of_step_ns.get(rank, none)
                for rank in sorted({*self.of_step_ns, *later.of_step_ns})
            },
        )

    def step_quantile(self, percent: int) -> int:
        """Return a quantile of forward and backward of a step, over ranks and steps, ns; 0 without any."""
        return reduce(add, self.of_step_ns.values()).nearest_rank(percent) or 0 if self.of_step_ns else 0

    def to_json(self) -> JsonObject:
        slowest, slower = self.slowest()
        return {
            "module": self.name,
            "modules": len(self.members),
            "calls": self.calls,
            **{f"{way}_ns": total for way, total in self.ns.items()},
            "exposed_ns": self.exposed_ns,
            "median_step_ns": self.step_quantile(50),
            "p95_step_ns": self.step_quantile(95),
            "slowest_rank": slowest,
            "slowest_rank_slower": slower,
        }

    def slowest(self) -> tuple[int | None, float | None]:
        """Return the rank with the largest median, and its excess over the median of medians, as a share.

        Both are None if fewer than two ranks have the module.
        """
        every = {rank: times_of_rank.nearest_rank(50) for rank, times_of_rank in self.of_step_ns.items()}
        medians = {rank: median for rank, median in every.items() if median is not None}
        if len(medians) < 2:
            return None, None
        slowest = max(medians, key=lambda rank: (medians[rank], -rank))
        typical = sorted(medians.values())[(len(medians) - 1) // 2]
        return slowest, medians[slowest] / typical - 1


def module_table(run: Run, times: Partition, steps: Sequence[int]) -> list[ModuleTime]:
    """Return rows of the recorded modules, costliest first; ``times`` is the partition of ``run``."""
    table: dict[str, ModuleTime] = {}
    of_step_ns: dict[tuple[str, int], Int64] = {}
    known = np.array(sorted(steps), np.int64)
    with_modules = {
        rank
        for block in run.blocks
        for rank, is_module in block.split(block.spans.kind == schema.MODULE).items()
        if is_module.any()
    }
    for rank, trace in run.ranks.items():
        if rank not in with_modules:
            continue
        rows = np.flatnonzero((trace.spans.kind == schema.MODULE) & np.isin(trace.spans.step, list(steps)))
        exposed = _exposed_inside(trace, rows, times.stalled_ns[rank])
        exposed[_repeated_in_backward(trace, rows, run.names)] = 0
        duration = (trace.spans.end - trace.spans.start)[rows]
        codes, inverse = np.unique(trace.spans.name[rows], return_inverse=True)
        count = np.bincount(inverse, minlength=len(codes))
        number = np.searchsorted(known, trace.spans.step[rows])
        for position, code in enumerate(codes.tolist()):
            rows_of_module = inverse == position
            row, way = _add(
                table,
                run.names[code],
                int(count[position]),
                int(duration[rows_of_module].sum()),
                int(exposed[rows_of_module].sum()),
            )
            if way != RECOMPUTE:  # it may lie in the backward
                of_step = of_step_ns.setdefault((row.name, rank), np.zeros(len(known), np.int64))
                np.add.at(of_step, number[rows_of_module], duration[rows_of_module])
    for (name, rank), of_step in of_step_ns.items():
        table[name].of_step_ns[rank] = Distribution.of(of_step[of_step > 0])
    return _costliest_first(table.values())


def add_modules(some: Iterable[ModuleTime], later: Iterable[ModuleTime]) -> list[ModuleTime]:
    """Return the table of some steps and of later ones."""
    table = {row.name: row for row in some}
    for row in later:
        table[row.name] = table[row.name] + row if row.name in table else row
    return _costliest_first(table.values())


def _costliest_first(rows: Collection[ModuleTime]) -> list[ModuleTime]:
    if sum(len(times_of_rank) for row in rows for times_of_rank in row.of_step_ns.values()) > _MOST_TIMES:
        rows = [
            replace(row, of_step_ns={rank: times_of_rank.round() for rank, times_of_rank in row.of_step_ns.items()})
            for row in rows
        ]
    return sorted(rows, key=lambda row: (-sum(row.ns.values()), row.name))


def _add(
    table: dict[str, ModuleTime], full_name: str, calls: int, duration: int, exposed: int
) -> tuple[ModuleTime, str]:
    way = next((word for word in _WAYS if full_name.endswith(f" {word}")), FORWARD)
    member = full_name if way == FORWARD else full_name.removesuffix(f" {way}")
    name = ".".join("*" if part.isdecimal() else part for part in member.split("."))
    row = table.setdefault(name, ModuleTime(name))
    row.members.add(member)
    row.calls += calls if way == FORWARD else 0
    row.ns[way] += duration
    row.exposed_ns += exposed
    return row, way


def _exposed_inside(trace: RankTrace, rows: Int64, stalled_ns: Int64) -> Int64:
    """Return, by row, the time of stalls that began inside of it."""
    spans = trace.spans
    if not len(rows):
        return np.zeros(0, np.int64)
    stall_ns = stalled_ns[:, 0] + stalled_ns[:, 1]
    stalls = np.flatnonzero(stall_ns)
    stalls = stalls[np.argsort(spans.start[stalls], kind="stable")]
    total = np.concatenate([[0], np.cumsum(stall_ns[stalls])])
    edges = np.searchsorted(spans.start[stalls], np.stack([spans.start[rows], spans.end[rows]]))
    return np.asarray(total[edges[1]] - total[edges[0]])


def _repeated_in_backward(trace: RankTrace, rows: Int64, names: Sequence[str]) -> Bool:
    spans, name = trace.spans, trace.spans.name[rows]
    is_repeated = np.zeros(len(rows), np.bool_)
    known = {names[code]: code for code in np.unique(name).tolist()}
    for word, code in known.items():
        around = known.get(f"{word.removesuffix(f' {RECOMPUTE}')} {BACKWARD}")
        if word.endswith(f" {RECOMPUTE}") and around is not None:
            repeated, backward = np.flatnonzero(name == code), rows[name == around]
            begun = np.searchsorted(spans.start[backward], spans.start[rows[repeated]], side="right") - 1
            is_repeated[repeated] = (begun >= 0) & (spans.end[backward][begun] >= spans.end[rows[repeated]])
    return is_repeated
