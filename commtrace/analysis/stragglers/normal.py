"""Decide what is normal among ranks that do the same work, and which ranks exceed it (docs/stragglers.md).

>>> judge(work, RECORDED).slow_ranks                            # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.replay.step_statistics import LinkTraffic
from commtrace.analysis.statistics import sigma_of_deviations
from commtrace.analysis.stragglers.limits import FEWEST_FOR_SCATTER, Limits
from commtrace.findings.finding import Norm
from commtrace.findings.formatting import format_ranks
from commtrace.trace.spans import Bool, Int64

Float64 = npt.NDArray[np.float64]

MAJORITY: Final[Norm] = "majority"
PAST: Final[Norm] = "past"
BASELINE: Final[Norm] = "baseline"
FASTEST: Final[Norm] = "fastest"
UNKNOWN: Final[Norm] = ""


class Usual(NamedTuple):
    """Usual durations, for when stages and links do not show what is normal."""

    quickest_ns: Mapping[int, float] = {}  # by stage, work of its quickest rank per step in forward and backward
    transfer_ns: Mapping[LinkTraffic, float] = {}  # typical transfers
    by: Norm = BASELINE  # or PAST


@dataclass(frozen=True, slots=True)
class Work:
    """The work of ranks per step, one row each; ns. Waiting for other ranks is no work."""

    rank: Int64
    peers: Int64  # equal for ranks that do the same work
    host: Int64  # number
    total_ns: Float64
    error_ns: Float64  # standard error of ``total_ns``
    scale_ns: Float64  # the whole that shares refer to
    before_ns: Float64 | None = None  # when the job was healthy; NaN if unknown
    before_by: Norm = PAST  # or BASELINE


@dataclass(frozen=True, slots=True)
class Judged:
    """The slow ranks; one row per rank of the work."""

    rank: Int64
    normal_ns: Float64  # of its class; NaN if unknown
    excess_ns: Float64
    limit_ns: Float64  # excess beyond which a rank is slow
    is_normal: Bool  # its work makes the norm
    norm_source: tuple[Norm, ...]  # the source of normal: MAJORITY, PAST, BASELINE, FASTEST or UNKNOWN
    undecided: tuple[str, ...]  # sentences on classes without a norm, with what would help

    @property
    def is_slow(self) -> Bool:
        return np.asarray(np.nan_to_num(self.excess_ns) > self.limit_ns)

    @property
    def slow_ranks(self) -> list[int]:
        return [int(rank) for rank in self.rank[self.is_slow]]

    @property
    def normal_ranks(self) -> Int64:
        return self.rank[self.is_normal]


class Names(NamedTuple):
    """The names of the compared things in sentences."""

    describe: Callable[[Sequence[int]], str]  # ``ranks 0–2``
    alike: str  # those of a class


RANKS: Final = Names(format_ranks, "ranks that do the same work")


def judge(work: Work, limits: Limits, names: Names = RANKS) -> Judged:
    """Find the ranks, or stages, whose work is beyond the normal work of their class."""
    normal = np.full(len(work.rank), np.nan)
    limit = np.full(len(work.rank), np.inf)
    is_normal = np.zeros(len(work.rank), np.bool_)
    norm_source = np.full(len(work.rank), UNKNOWN, dtype=object)
    undecided: list[str] = []
    for rows in _rows_by(work.peers):
        if len(rows) < 2:
            continue
        clusters = _clusters(work, rows, limits)
        chosen = _normal_cluster(work, clusters, limits)
        if chosen is None:
            undecided.append(_no_majority(work, clusters, names))
            continue
        number, by = chosen
        members = clusters[number]
        if by == MAJORITY and _is_far_behind(work, clusters[0], members, limits):
            undecided.append(_faster_minority(work, clusters[0], members, names))
        middle = float(np.median(work.total_ns[members]))
        scatter = sigma_of_deviations(work.total_ns[members]) if len(members) >= FEWEST_FOR_SCATTER else 0.0
        noise = np.hypot(work.error_ns[rows], float(np.median(work.error_ns[members])))
        normal[rows] = middle
        limit[rows] = np.maximum(_least(work, rows, limits), limits.sigmas * np.hypot(noise, scatter))
        if by == FASTEST:
            limit[rows] = np.maximum(limit[rows], limits.clearly * work.scale_ns[rows])
        is_normal[members] = True
        norm_source[rows] = by
    return Judged(
        rank=work.rank,
        normal_ns=normal,
        excess_ns=work.total_ns - normal,
        limit_ns=limit,
        is_normal=is_normal,
        norm_source=tuple(norm_source.tolist()),
        undecided=tuple(undecided),
    )


def _rows_by(values: Int64) -> Iterator[Int64]:
    for value in np.unique(values):
        yield np.flatnonzero(values == value)


def _least(work: Work, rows: Int64, limits: Limits) -> Float64:
    return np.asarray(np.maximum(limits.share * work.scale_ns[rows], limits.least_ns))


def _clusters(work: Work, rows: Int64, limits: Limits) -> list[Int64]:
    """Return the rows, fastest first, split where neighbours differ by more than noise and limits allow."""
    ordered = rows[np.argsort(work.total_ns[rows], kind="stable")]
    error = work.error_ns[ordered]
    allowed = np.maximum(_least(work, ordered, limits)[:-1], limits.sigmas * np.hypot(error[:-1], error[1:]))
    return list(np.split(ordered, np.flatnonzero(np.diff(work.total_ns[ordered]) > allowed) + 1))


def _normal_cluster(work: Work, clusters: Sequence[Int64], limits: Limits) -> tuple[int, Norm] | None:
    if len(clusters) == 1:
        return 0, MAJORITY
    sizes = [len(cluster) for cluster in clusters]
    largest = int(np.argmax(sizes))
    has_majority = 2 * sizes[largest] > sum(sizes)
    if has_majority and largest == 0:
        return 0, MAJORITY
    unchanged = _unchanged(work, clusters, limits)
    if unchanged is not None:
        return unchanged, work.before_by
    if has_majority and not _are_whole_hosts(work, clusters[0], np.concatenate(clusters[1:])):
        return largest, MAJORITY
    enough = 2 * sizes[0] >= sum(sizes) or 1 < sizes[0] == max(sizes)
    return (0, FASTEST) if has_majority or enough else None


def _unchanged(work: Work, clusters: Sequence[Int64], limits: Limits) -> int | None:
    """Return the only cluster whose work is the same as when the job was healthy."""
    if work.before_ns is None or not np.isfinite(work.before_ns[np.concatenate(clusters)]).all():
        return None
    grown = [float(np.median(work.total_ns[cluster] - work.before_ns[cluster])) for cluster in clusters]
    allowed = [
        float(np.median(np.maximum(_least(work, cluster, limits), limits.sigmas * work.error_ns[cluster])))
        for cluster in clusters
    ]
    same = [number for number in range(len(clusters)) if abs(grown[number]) <= allowed[number]]
    return same[0] if len(same) == 1 else None


def _are_whole_hosts(work: Work, some: Int64, rest: Int64) -> bool:
    """Return whether the two share no host, and every host has several ranks."""
    hosts, count = np.unique(work.host[np.concatenate([some, rest])], return_counts=True)
    shared = np.intersect1d(work.host[some], work.host[rest])
    return not len(shared) and len(hosts) > 1 and bool((count > 1).all())


def _is_far_behind(work: Work, fastest: Int64, members: Int64, limits: Limits) -> bool:
    behind = float(np.median(work.total_ns[members]) - np.median(work.total_ns[fastest]))
    return behind > limits.clearly * float(np.median(work.scale_ns[members]))


def _faster_minority(work: Work, fastest: Int64, members: Int64, names: Names) -> str:
    few, many = (float(np.median(work.total_ns[cluster])) / 1e6 for cluster in (fastest, members))
    return (
        f"{_works(names, work.rank[fastest].tolist()).capitalize()} {few:.1f} ms per step, and most {names.alike} "
        f"{many:.1f} ms: either these are slow, or the former have less to do. A healthy run (--baseline "
        "RUN) decides."
    )


def _no_majority(work: Work, clusters: Sequence[Int64], names: Names) -> str:
    groups = [
        f"{_works(names, work.rank[cluster].tolist())} {float(np.median(work.total_ns[cluster])) / 1e6:.1f} ms per step"
        for cluster in clusters[:3]
    ]
    more = ", and others more" if len(clusters) > 3 else ""
    return (
        f"Which of the {names.alike} are slow is unknown: {', '.join(groups)}{more}, and no group of "
        "them is a majority. A healthy run (--baseline RUN) or steps from before the change would show it."
    )


def _works(names: Names, numbers: Sequence[int]) -> str:
    return f"{names.describe(numbers)} work{'s' * (len(numbers) == 1)}"
