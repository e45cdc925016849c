"""The durations that peers need for the same work: the reference of the what-if analysis.

Two segments are the same work when they belong to the same stage, chunk and kind of phase and lie between the same
stalls of it. Their peers are the segments of the other ranks: those of other data- and tensor-parallel ranks, over all
microbatches and steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay.segments import BETWEEN, Segments, same_work
from commtrace.trace.spans import Bool, Int64

Float64 = npt.NDArray[np.float64]

_USUAL: Final = 0.5
"""What a rank does less often per step is no part of every step."""


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """Typical durations, own and of the peers, of every kind of work on every rank.

    ``own_ns`` is the median over steps of the mean over microbatches: robust against single slow steps, yet a rank
    that is slow in some of its microbatches shows. ``peer_ns`` is the median of ``own_ns`` over the other ranks, or the
    normal ones among them (:meth:`among`); NaN where no other rank does the same.

    Attributes:
        entry: of each segment, its index in the other arrays; what ranks do not do that others of their stage do has
            none, and takes no time.
        rank, kind: of each entry.
        work: of each entry, a number that entries of different ranks share which are the same work.
        per_step: how many segments of this entry a step has, in the mean over all steps: work that occurs in one step
            of many is a small part of each.
    """

    entry: Int64
    rank: Int64
    kind: Int64
    work: Int64
    own_ns: Float64
    peer_ns: Float64
    per_step: Float64

    def among(self, normal: Int64) -> PeerComparison:
        """Return the same, where only these ranks tell what is normal, as far as one of them does the same work."""
        is_normal = np.isin(self.rank, normal) & np.isfinite(self.own_ns)
        peer = np.full(len(self.own_ns), np.nan)
        peer[is_normal] = leave_one_out_median(self.work[is_normal], self.own_ns[is_normal])
        if len(self.work):
            medians = grouped_median(self.work[is_normal], self.own_ns[is_normal], int(self.work.max()) + 1)
            peer[~is_normal] = medians[self.work[~is_normal]]
        return replace(self, peer_ns=np.where(np.isnan(peer), self.peer_ns, peer))

    def from_typical_ns(self) -> dict[int, float]:
        """By rank: how much longer per step it works than is typical of the same work on all ranks, ns."""
        several = np.isfinite(self.peer_ns) & np.isfinite(self.own_ns)
        groups = int(self.work.max(initial=-1)) + 1
        typical = grouped_median(self.work[several], self.own_ns[several], groups)
        beyond = np.where(several, (self.own_ns - typical[self.work]) * self.per_step, 0.0)
        totals = np.bincount(self.rank, beyond, minlength=int(self.rank.max(initial=-1)) + 1)
        return {rank: float(totals[rank]) for rank in np.unique(self.rank).tolist()}

    @property
    def ratio(self) -> Float64:
        """Of each segment: what it would last at the speed of the peers, as a share of what it lasts."""
        comparable = (self.own_ns > 0) & np.isfinite(self.peer_ns)
        ratio = np.ones(len(self.own_ns))
        ratio[comparable] = self.peer_ns[comparable] / self.own_ns[comparable]
        return np.asarray(ratio[self.entry])

    def excess_ns(self) -> Float64:
        """Per entry: time per step that the rank needs beyond its peers; 0 without peers."""
        return np.asarray(np.nan_to_num(self.own_ns - self.peer_ns) * self.per_step)


def compare_with_peers(
    segments: Segments, values_ns: Int64, counted: Bool, work: Int64 | None = None
) -> PeerComparison:
    """Compare a duration of every segment with the same duration on the other ranks.

    Args:
        segments: of a program.
        values_ns: of each segment, what is compared: its work, for example.
        counted: which segments make the statistic; those of a warm-up step are left out.
        work: of these segments, where the caller has it (:func:`same_work`).
    """
    if work is None:
        work = same_work(segments)
    _, entry = grouped(pack([work, segments.rank]))
    entries = int(entry.max(initial=-1)) + 1
    first = np.zeros(entries, np.int64)
    first[entry] = np.arange(len(entry))
    cells, cell = grouped(pack([entry[counted], segments.step[counted]]))
    cell_entry = np.zeros(len(cells), np.int64)
    cell_entry[cell] = entry[counted]
    size = np.bincount(cell, minlength=len(cells))
    mean = np.bincount(cell, values_ns[counted], minlength=len(cells)) / np.maximum(size, 1)
    own = grouped_median(cell_entry, mean, entries)
    steps = int(np.count_nonzero(np.bincount(segments.step[counted])))
    per_step = np.bincount(cell_entry, size, minlength=entries) / max(steps, 1)
    rank, kind, work = (column[first].astype(np.int64) for column in (segments.rank, segments.kind, work))
    pauses = _pauses_of_others(rank, segments.stage[first].astype(np.int64), kind, work, per_step)
    own = np.concatenate([own, np.zeros(len(pauses.rank))])
    work = np.concatenate([work, pauses.work])
    return PeerComparison(
        entry=entry,
        rank=np.concatenate([rank, pauses.rank]),
        kind=np.concatenate([kind, pauses.kind]),
        work=work,
        own_ns=own,
        peer_ns=leave_one_out_median(work, own),
        per_step=np.concatenate([per_step, pauses.per_step]),
    )


class _Pauses(NamedTuple):
    """Work that takes no time on a rank; one row per rank and work."""

    rank: Int64
    kind: Int64
    work: Int64
    per_step: Float64


def _pauses_of_others(rank: Int64, stage: Int64, kind: Int64, work: Int64, per_step: Float64) -> _Pauses:
    """Return what only some ranks of a stage do between two phases, of its other ranks.

    A stretch between phases that takes no time is no segment: of a rank whose host launches late, which pauses there in
    every step, there would be nothing to compare with.
    """
    usual = np.flatnonzero((kind >= BETWEEN) & (per_step > _USUAL))
    usual = usual[np.unique(work[usual], return_index=True)[1]]
    ranks, at = np.unique(rank, return_index=True)
    which, other = np.nonzero(stage[usual][:, np.newaxis] == stage[at])
    which, other = usual[which], ranks[other]
    key = pack([np.concatenate([work[which], work]), np.concatenate([other, rank])])
    missing = ~np.isin(key[: len(which)], key[len(which) :])
    which = which[missing]
    return _Pauses(other[missing], kind[which], work[which], per_step[which])


def grouped_median(group: Int64, values: Float64 | Int64, groups: int) -> Float64:
    """Median of the values of each group; NaN for a group without any."""
    size = np.bincount(group, minlength=groups)
    first = np.concatenate([[0], np.cumsum(size)])
    medians = np.full(groups, np.nan)
    some = size > 0
    ordered = values[np.lexsort((values, group))]
    lower, upper = first[:-1] + (size - 1) // 2, first[:-1] + size // 2
    medians[some] = (ordered[lower[some]] + ordered[upper[some]]) / 2
    return medians


def leave_one_out_median(group: Int64, values: Float64) -> Float64:
    """Of each value, the median of the other values of its group; NaN for one that is alone."""
    order = np.lexsort((values, group))
    ordered, ordered_group = values[order], group[order]
    heads = np.flatnonzero(np.concatenate([[True], np.diff(ordered_group) != 0])) if len(values) else order
    first = np.repeat(heads, np.diff(np.append(heads, len(values))))
    size = np.repeat(np.diff(np.append(heads, len(values))), np.diff(np.append(heads, len(values))))
    own = np.arange(len(values)) - first
    medians = np.full(len(values), np.nan)
    several = size > 1
    lower, upper = np.maximum(size - 2, 0) // 2, np.maximum(size - 1, 0) // 2
    lower, upper = lower + (lower >= own), upper + (upper >= own)
    middle = (ordered[(first + lower)[several]] + ordered[(first + upper)[several]]) / 2
    medians[order[several]] = middle
    return medians
