"""Find microbatches that are longer because their sequences are: in some replicas, or on changing ranks.

All ranks of a replica then take longer for the same microbatches, in forward and backward. A slow device is slow in
all microbatches, and in the optimizer step as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay.ideal import mean_work
from commtrace.analysis.replay.scenarios import EqualMicrobatches, LongMicrobatches, Replay, Scenario
from commtrace.analysis.replay.segments import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from commtrace.analysis.statistics import Float64, grouped_median
from commtrace.analysis.stragglers.costs import cost_of, finding_of, stands_out, whole_cost
from commtrace.analysis.stragglers.limits import (
    FAR_LONGER,
    FEW_MICROBATCHES,
    FEWEST_LONG,
    FEWEST_MICROBATCHES,
    LONG_MICROBATCH,
    LONG_TOGETHER,
    MOST_OF_EXCESS,
    SCATTER_OF_MICROBATCHES,
)
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import JOB, advice
from commtrace.findings.finding import Finding
from commtrace.findings.formatting import format_ranks, format_spread
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

SEQUENCES = "sequence_length_imbalance"
"""The cause."""

_SHARED_INPUT = ("pp", "tp", "cp", "ep")
"""Ranks that differ only in these coordinates work on the same microbatches."""


@dataclass(frozen=True, slots=True)
class MicrobatchComparison:
    """The microbatches of each rank and step, compared with the same work on other ranks."""

    work: WorkStatistics
    rank: Int64
    step: Int64
    chunk: Int64
    microbatch: Int64
    excess_ns: Float64  # of forward and backward over ``normal_ns``
    normal_ns: Float64
    is_long: Bool  # forward and backward are both far longer
    longer_ns: Float64  # excess of the work of long microbatches; 0 of others

    def long_ones(self, ranks: Collection[int]) -> LongMicrobatches:
        chosen = self.is_long & np.isin(self.rank, list(ranks))
        return LongMicrobatches(
            rank=self.rank[chosen],
            step=self.step[chosen],
            chunk=self.chunk[chosen],
            microbatch=self.microbatch[chosen],
            normal_ns=self.work.peers.peer_ns,
        )

    def holds(self, rank: int) -> bool:
        """Return whether a rank is slow because few microbatches of a step are long."""
        of_rank = self.rank == rank
        struck = np.isin(self.step[of_rank], self.step[of_rank & self.is_long])
        if not struck.any() or self.is_long[of_rank][struck].mean() > FEW_MICROBATCHES:
            return False
        return float(self.excess_ns[of_rank & self.is_long].sum()) >= MOST_OF_EXCESS * float(
            self.excess_ns[of_rank].sum()
        )

    def excess_of_ns(self, rank: int) -> float:
        return float(self.longer_ns[self.rank == rank].sum()) / self.work.num_steps

    def describe(self, ranks: Collection[int]) -> str:
        """Return ``microbatch 3 takes 3.0 times as long``, or ``2 microbatches per step take``."""
        chosen = self.is_long & np.isin(self.rank, list(ranks))
        times = float(self.excess_ns[chosen].sum() / self.normal_ns[chosen].sum()) + 1
        numbers, count = np.unique(self.microbatch[chosen], return_counts=True)
        most = int(np.argmax(count))
        if count[most] >= MOST_OF_EXCESS * count.sum():
            return f"microbatch {numbers[most]} takes {times:.1f} times as long"
        per_step = chosen.sum() / self.work.num_steps / len(ranks)
        return f"{per_step:.2g} microbatches per step take {times:.1f} times as long"


def compare_microbatches(work: WorkStatistics) -> MicrobatchComparison:
    table = work.table
    usual_ns = np.nan_to_num(work.peers.peer_ns[table.entry])
    rows = np.flatnonzero(table.is_in_phase & (table.microbatch >= 0) & (usual_ns > 0) & work.counted)
    work_ns, usual_ns = table.work_ns[rows], usual_ns[rows]
    columns = [column[rows].astype(np.int64) for column in (table.rank, table.step, table.chunk, table.microbatch)]
    first, cell = grouped(pack(columns))

    def sums(values: Float64 | Int64, chosen: Bool) -> Float64:
        return np.asarray(np.bincount(cell[chosen], values[chosen], minlength=len(first)), np.float64)

    phases = [table.kind[rows] == kind for kind in (FORWARD, BACKWARD)]
    both = [(sums(work_ns, phase), sums(usual_ns, phase)) for phase in phases]
    is_long = np.logical_and.reduce([own_ns > (1 + LONG_MICROBATCH) * usual_ns for own_ns, usual_ns in both])
    longer = np.bincount(cell, np.maximum(work_ns - usual_ns, 0.0), minlength=len(first))
    return MicrobatchComparison(
        work=work,
        rank=columns[0][first],
        step=columns[1][first],
        chunk=columns[2][first],
        microbatch=columns[3][first],
        excess_ns=np.asarray(sum(own_ns - usual_ns for own_ns, usual_ns in both)),
        normal_ns=np.asarray(sum(usual_ns for _, usual_ns in both)),
        is_long=is_long,
        longer_ns=np.where(is_long, longer, 0.0),
    )


class LongerInput(NamedTuple):
    """All ranks of a replica whose input is longer than that of others."""

    ranks: tuple[int, ...]
    microbatches: str  # the long ones in words; empty if all of them are longer


def longer_inputs(compared: MicrobatchComparison, slow: Collection[int]) -> Iterator[LongerInput]:
    """Yield the replicas whose ranks are all slow only because their input is longer."""
    for ranks in replicas(compared.work.run):
        if not set(ranks) <= set(slow):
            continue
        # Of a single rank, only few long microbatches separate its input from its device.
        if all(compared.holds(rank) for rank in ranks):
            yield LongerInput(ranks, compared.describe(ranks))
        elif len(ranks) > 1 and is_input_longer(compared.work, ranks):
            yield LongerInput(ranks, "")


def evidence_of_longer_input(ranks: Collection[int], percent: Iterable[float], microbatches: str) -> str:
    """Say that the input of these ranks is longer; ``percent`` is each one's excess, ``microbatches`` the long ones."""
    where = f"on {format_ranks(sorted(ranks))}" + (" alike" if len(ranks) > 1 else "")
    if microbatches:
        return (
            f"{microbatches.capitalize()} as on other ranks, in forward and in backward, {where}; the other "
            "microbatches take no longer than elsewhere. So its input is longer, and its devices are not slow."
        )
    return (
        f"Forward and backward take {format_spread(percent)}% longer than on the ranks that do the same work, "
        f"{where}, and the optimizer step takes no longer. So its input is longer, and its devices are not slow."
    )


def is_input_longer(work: WorkStatistics, ranks: Collection[int]) -> bool:
    """Return whether forward and backward of these slow ranks are longer and the optimizer step is not."""
    peers, of_ranks = work.peers, np.isin(work.peers.rank, list(ranks))
    excess, usual = peers.excess_ns, peers.usual_ns

    def share(kind: int) -> float:
        here = of_ranks & (peers.kind == kind)
        return float(excess[here].sum()) / max(float(usual[here].sum()), 1.0)

    has_optimizer = bool(usual[of_ranks & (peers.kind == OPTIMIZER)].any())
    in_phase = float(excess[of_ranks & (peers.kind < BETWEEN)].sum())
    shares = share(FORWARD), share(BACKWARD)
    return has_optimizer and in_phase > 0 and min(shares) > max(shares) / 2 and abs(share(OPTIMIZER)) < min(shares) / 2


def replicas(run: Run) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each data-parallel replica, which work on the same microbatches."""
    by_position: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, trace in run.ranks.items():
        position = tuple(sorted((name, at) for name, at in trace.coordinates.items() if name not in _SHARED_INPUT))
        by_position.setdefault(position, []).append(rank)
    yield from (tuple(ranks) for ranks in by_position.values())


def replica_of_ranks(run: Run) -> dict[int, int]:
    """Return the data-parallel coordinate of each rank that has one."""
    return {rank: trace.coordinates["dp"] for rank, trace in run.ranks.items() if "dp" in trace.coordinates}


def format_replicas(replica_of: Mapping[int, int], ranks: Sequence[int]) -> str:
    """Return ``data-parallel replica 1 (ranks 1, 3)``; only the ranks if one has no place in data parallelism."""
    places = {replica_of.get(rank) for rank in ranks}
    if None in places:
        return format_ranks(ranks)
    numbers = ", ".join(map(str, sorted(replica for replica in places if replica is not None)))
    return f"data-parallel replica{'s' * (len(places) > 1)} {numbers} ({format_ranks(ranks)})"


def uneven_sequences(work: WorkStatistics, replay: Replay) -> Finding | None:
    """Return the finding on microbatches whose forwards and backwards are long together, on changing ranks."""
    forward, backward = _microbatch_times(work)
    if len(forward) < FEWEST_MICROBATCHES:
        return None
    spread = float(np.std(forward))
    if spread < SCATTER_OF_MICROBATCHES or float(np.std(backward)) == 0.0:
        return None
    correlation, alike = _rank_correlation(forward, backward), _share_long_in_both(forward, backward)
    if correlation < LONG_TOGETHER and alike < LONG_TOGETHER:
        return None
    cost = cost_of(work, replay.saved_ns(Scenario(work=(EqualMicrobatches(mean_work(work.table)),))))
    evidence = (
        f"Forwards of one stage differ by {100 * spread:.0f}% between microbatches, and a microbatch with a long "
        f"forward has a long backward ({_how_alike(correlation, alike)}); no rank is slow on average."
    )
    if not stands_out(work, cost):
        return None
    return finding_of(
        JOB, SEQUENCES, "changing ranks", whole_cost(work, cost), evidence=evidence, advice=advice(SEQUENCES, 0)
    )


def _share_long_in_both(forward: Float64, backward: Float64) -> float:
    """Return the share of microbatches that are far longer in both phases, among those that are so in one."""
    longer, also_longer = forward > FAR_LONGER, backward > FAR_LONGER
    either = int((longer | also_longer).sum())
    return float((longer & also_longer).sum()) / either if either >= FEWEST_LONG else 0.0


def _how_alike(correlation: float, alike: float) -> str:
    if correlation >= LONG_TOGETHER:
        return f"rank correlation {correlation:.2f}"
    return f"so are {alike:.0%} of those that take half as long again as usual"


def _rank_correlation(first: Float64, second: Float64) -> float:
    """Return Spearman's correlation, with equal values sharing a rank."""
    rank, other_rank = (np.unique(values, return_inverse=True)[1].reshape(-1) for values in (first, second))
    return float(np.corrcoef(rank, other_rank)[0, 1])


def _microbatch_times(work: WorkStatistics) -> tuple[Float64, Float64]:
    """Return forward and backward of every microbatch, relative to the median of its rank."""
    table = work.table
    chosen = work.counted & (table.microbatch >= 0)
    columns = [table.rank, table.step, table.chunk, table.microbatch]
    alike = [table.rank, table.chunk]
    # A device that is slower in some steps than in others lengthens all microbatches of these.
    if len(np.unique(table.microbatch[chosen])) > 1:
        alike.append(table.step)
    times = []
    for kind in (FORWARD, BACKWARD):
        mask = chosen & (table.kind == kind)
        key = pack([column[mask] for column in columns])
        cells, first, cell = np.unique(key, return_index=True, return_inverse=True)
        total = np.asarray(np.bincount(cell.reshape(-1), table.work_ns[mask], minlength=len(cells)), np.float64)
        keys = pack([column[mask][first] for column in alike])
        _, group = np.unique(keys, return_inverse=True)
        group = group.reshape(-1)
        typical = grouped_median(group, total, int(group.max(initial=-1)) + 1)
        times.append((cells, total / np.maximum(typical[group], 1.0) - 1))
    (forward_cells, forward), (backward_cells, backward) = times
    if not np.array_equal(forward_cells, backward_cells):
        return np.zeros(0), np.zeros(0)
    return forward, backward
