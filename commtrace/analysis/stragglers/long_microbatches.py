"""Data-parallel replicas whose microbatches are longer than those of others: long input, not slow devices.

All ranks that share the input of a replica, at every stage, take longer for the same microbatches, in forward and in
backward. A slow device is slow in all microbatches, and in the optimizer step as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.rank_words import range_in_words, ranks_in_words
from commtrace.analysis.replay.peers import Float64
from commtrace.analysis.replay.segments import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.limits import FEW_MICROBATCHES, LONG_MICROBATCH, MOST_OF_EXCESS
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

SEQUENCES = "sequence_length_imbalance"
"""The cause."""

_SHARED_INPUT = ("pp", "tp", "cp", "ep")
"""Ranks that differ by nothing else work on the same microbatches."""


@dataclass(frozen=True, slots=True)
class LongMicrobatches:
    """The microbatches of each rank, compared with the same work on other ranks; one row for each in each step.

    Attributes:
        bench: of the steps, its peers those whose work is normal.
        rank, step, microbatch: of each row.
        excess_ns: by which forward and backward are longer than is normal.
        normal_ns: what is normal of both.
        is_long: both are far longer.
        segment_ns: of each segment, by how much it is longer, in long microbatches.
    """

    bench: Bench
    rank: Int64
    step: Int64
    microbatch: Int64
    excess_ns: Float64
    normal_ns: Float64
    is_long: Bool
    segment_ns: Float64

    @classmethod
    def of(cls, bench: Bench) -> LongMicrobatches:
        segments = bench.program.segments
        normal = np.nan_to_num(bench.work.peer_ns[bench.work.entry])
        in_phase = np.isin(segments.kind, (FORWARD, BACKWARD)) & (segments.microbatch >= 0) & (normal > 0)
        rows = np.flatnonzero(in_phase & bench.counted)
        place = (segments.rank, segments.step, segments.chunk, segments.microbatch)
        first, cell = grouped(pack([column[rows] for column in place]))

        def sums(values: Float64 | Int64, kind: int) -> Float64:
            own = segments.kind[rows] == kind
            return np.asarray(np.bincount(cell[own], values[rows][own], minlength=len(first)), np.float64)

        phases = [(sums(segments.work_ns, kind), sums(normal, kind)) for kind in (FORWARD, BACKWARD)]
        is_long = np.logical_and.reduce([own > (1 + LONG_MICROBATCH) * usual for own, usual in phases])
        longer = np.zeros(len(segments))
        chosen = rows[is_long[cell]]
        longer[chosen] = np.maximum(segments.work_ns[chosen] - normal[chosen], 0.0)
        return cls(
            bench=bench,
            rank=segments.rank[rows][first].astype(np.int64),
            step=segments.step[rows][first].astype(np.int64),
            microbatch=segments.microbatch[rows][first].astype(np.int64),
            excess_ns=np.asarray(sum(own - usual for own, usual in phases)),
            normal_ns=np.asarray(sum(usual for _, usual in phases)),
            is_long=is_long,
            segment_ns=longer,
        )

    def holds(self, rank: int) -> bool:
        """Return whether a rank is slow because few microbatches of a step are long."""
        own = self.rank == rank
        struck = np.isin(self.step[own], self.step[own & self.is_long])
        if not struck.any() or self.is_long[own][struck].mean() > FEW_MICROBATCHES:
            return False
        return float(self.excess_ns[own & self.is_long].sum()) >= MOST_OF_EXCESS * float(self.excess_ns[own].sum())

    def excess_of_ns(self, rank: int) -> float:
        """By how much long microbatches are longer, per step."""
        return float(self.segment_ns[self.bench.program.segments.rank == rank].sum()) / self.bench.num_steps

    def in_words(self, ranks: Collection[int]) -> str:
        """``microbatch 3 takes 3.0 times as long``, or ``some microbatches take``, in the mean of these ranks."""
        own = self.is_long & np.isin(self.rank, list(ranks))
        times = float(self.excess_ns[own].sum() / self.normal_ns[own].sum()) + 1
        numbers, count = np.unique(self.microbatch[own], return_counts=True)
        most = int(np.argmax(count))
        if count[most] >= MOST_OF_EXCESS * count.sum():
            return f"microbatch {numbers[most]} takes {times:.1f} times as long"
        return (
            f"{own.sum() / self.bench.num_steps / len(ranks):.2g} microbatches per step take {times:.1f} times as long"
        )


class LongerInput(NamedTuple):
    """Replicas whose input is longer than that of others.

    Attributes:
        ranks: all of a replica.
        microbatches: the long ones in words; empty where all of them are longer.
    """

    ranks: tuple[int, ...]
    microbatches: str


def longer_inputs(long: LongMicrobatches, slow: Collection[int]) -> Iterator[LongerInput]:
    """Yield the replicas, all of whose ranks are slow, and only because their input is longer.

    A replica of a single rank must have few long microbatches: else nothing tells its input from its device.

    Args:
        long: the microbatches.
        slow: ranks that work too long.
    """
    for ranks in replicas(long.bench.run):
        if not set(ranks) <= set(slow):
            continue
        if all(long.holds(rank) for rank in ranks):
            yield LongerInput(ranks, long.in_words(ranks))
        elif len(ranks) > 1 and is_input_longer(long.bench, ranks):
            yield LongerInput(ranks, "")


def evidence_of_longer_input(ranks: Collection[int], percent: Iterable[float], microbatches: str) -> str:
    """Return what tells that the input of these ranks is longer, and they are not slow.

    Args:
        ranks: of the replicas.
        percent: by how much longer each works, in percent of what is normal.
        microbatches: the long ones in words; empty where all of them are longer.
    """
    where = f"on {ranks_in_words(sorted(ranks))}" + (" alike" if len(ranks) > 1 else "")
    if microbatches:
        return (
            f"{microbatches.capitalize()} as on other ranks, in forward and in backward, {where}; the other "
            "microbatches take no longer than elsewhere. So its input is longer, and its devices are not slow."
        )
    return (
        f"Forward and backward take {range_in_words(percent)} % longer than on the ranks that do the same work, "
        f"{where}, and the optimizer step takes no longer. So its input is longer, and its devices are not slow."
    )


def is_input_longer(bench: Bench, ranks: Collection[int]) -> bool:
    """Return whether forwards and backwards of these ranks are longer and their optimizer steps are not.

    Args:
        bench: of the steps, its peers those whose work is normal.
        ranks: that are slow.
    """
    work, own = bench.work, np.isin(bench.work.rank, list(ranks))
    excess, usual = work.excess_ns(), np.nan_to_num(work.peer_ns * work.per_step)

    def share(kind: int) -> float:
        here = own & (work.kind == kind)
        return float(excess[here].sum()) / max(float(usual[here].sum()), 1.0)

    has_optimizer = bool(usual[own & (work.kind == OPTIMIZER)].any())
    in_phase = float(excess[own & (work.kind < BETWEEN)].sum())
    shares = share(FORWARD), share(BACKWARD)
    return has_optimizer and in_phase > 0 and min(shares) > max(shares) / 2 and abs(share(OPTIMIZER)) < min(shares) / 2


def replicas(run: Run) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each data-parallel replica, which work on the same microbatches."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, trace in run.ranks.items():
        place = tuple(sorted((name, at) for name, at in trace.coordinates.items() if name not in _SHARED_INPUT))
        found.setdefault(place, []).append(rank)
    yield from (tuple(ranks) for ranks in found.values())


def replica_of_ranks(run: Run) -> dict[int, int]:
    """Return the place of each rank in data parallelism, as far as they tell it."""
    return {rank: trace.coordinates["dp"] for rank, trace in run.ranks.items() if "dp" in trace.coordinates}


def replicas_in_words(replica_of: Mapping[int, int], ranks: Sequence[int]) -> str:
    """Return ``data-parallel replica 1 (ranks 1, 3)``; only the ranks where one has no place in data parallelism.

    Args:
        replica_of: as :func:`replica_of_ranks` gives it.
        ranks: of the replicas.
    """
    places = {replica_of.get(rank) for rank in ranks}
    if None in places:
        return ranks_in_words(ranks)
    numbers = ", ".join(map(str, sorted(one for one in places if one is not None)))
    return f"data-parallel replica{'s' * (len(places) > 1)} {numbers} ({ranks_in_words(ranks)})"
