"""Change the durations of recorded work and transfers: bandwidth and latency, overlap, slow ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.communication.bandwidth import bus_factor
from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.prediction.changes import BandwidthChange, LatencyChange, OverlapChange
from commtrace.analysis.prediction.recorded_steps import RecordedSteps
from commtrace.analysis.replay.edges import ReplayTransfers
from commtrace.analysis.replay.program import stage_of
from commtrace.analysis.replay.segments import BACKWARD, FORWARD, WorkSegments, same_work
from commtrace.analysis.replay.step_statistics import pause_ns
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.mended import MendedRanks
from commtrace.errors import ConfigurationError
from commtrace.findings.causes import PAUSES
from commtrace.findings.formatting import format_ranks
from commtrace.trace.spans import Bool, Int64

_SIZES_APART: Final = 4
"""Largest by smallest bytes of a kind of transfer, from which on latency and bandwidth can be told apart."""


class Durations(NamedTuple):
    """Durations of the pieces of work and of the transfers, ns, and what had to be assumed for them."""

    piece_ns: Int64
    transfer_ns: Int64
    assumptions: tuple[str, ...] = ()


def measured_durations(recorded: RecordedSteps) -> Durations:
    """Return the durations as recorded."""
    return Durations(recorded.lanes.piece_ns, recorded.transfer_ns)


def with_network(
    recorded: RecordedSteps,
    durations: Durations,
    bandwidth: Sequence[BandwidthChange],
    latency: Sequence[LatencyChange],
) -> Durations:
    """Change transfers. Those of one role, operation and group size take a latency and a time in proportion to bytes.

    Raises:
        ConfigurationError: the run has no transfer of a role.
    """
    if not bandwidth and not latency:
        return durations
    ns = durations.transfer_ns.astype(np.float64)
    fixed_ns, inseparable = _latencies(recorded)
    notes = list(durations.assumptions)
    for change in bandwidth:
        chosen = _transfers_of(recorded, change.role, "--bandwidth")
        variable = np.maximum(ns - fixed_ns, 0.0)
        faster = variable / change.factor if change.gbps is None else _bus_bytes(recorded) / change.gbps
        ns = np.where(chosen, np.minimum(ns, fixed_ns) + faster, ns)
        if kinds := _named(recorded, chosen & inseparable):
            notes.append(
                "Latency and bandwidth cannot be told apart where all calls of an operation are of about one size: "
                f"all of the time of {kinds} is taken to depend on the bandwidth."
            )
    for latency_change in latency:
        chosen = _transfers_of(recorded, latency_change.role, "--latency")
        new = (
            fixed_ns * latency_change.factor + latency_change.ns
            if latency_change.is_added
            else np.full(len(ns), float(latency_change.ns))
        )
        ns = np.where(chosen, np.maximum(ns - fixed_ns + new, 0.0), ns)
        needs_latency = not latency_change.is_added or latency_change.factor != 1.0
        if needs_latency and (kinds := _named(recorded, chosen & inseparable)):
            notes.append(
                "Latency and bandwidth cannot be told apart where all calls of an operation are of about one size: the "
                f"latency of {kinds} is taken as 0."
            )
    roles = {*(change.role for change in bandwidth), *(change.role for change in latency)}
    changed = np.logical_or.reduce([recorded.of_role(role) for role in roles])
    if kinds := _named(recorded, changed & ~recorded.joins.transfers.exact):
        notes.append(
            f"Some transfers of {kinds} are upper bounds, because they ended unseen or were launched behind others in "
            "flight: what a faster network saves of them is an upper bound, too."
        )
    return Durations(durations.piece_ns, np.rint(ns).astype(np.int64), tuple(notes))


def recorded_gbps(recorded: RecordedSteps, changes: Sequence[BandwidthChange]) -> dict[str, float]:
    """Return the bus bandwidth that the roles of changes have beyond their latency, 10⁹ bytes per second.

    It is that of the exact transfers of each role, if there are any; else a lower bound.
    """
    fixed_ns, _ = _latencies(recorded)
    variable_ns = np.maximum(recorded.transfer_ns - fixed_ns, 0.0)
    moved, gbps = _bus_bytes(recorded), {}
    for change in changes:
        chosen = recorded.of_role(change.role)
        exact = chosen & recorded.joins.transfers.exact
        chosen = exact if exact.any() else chosen
        if total_ns := float(variable_ns[chosen].sum()):
            gbps[change.role] = float(moved[chosen].sum()) / total_ns
    return gbps


def _bus_bytes(recorded: RecordedSteps) -> Float64:
    """Return the bytes of each transfer on the busiest link of a ring."""
    transfers = recorded.joins.transfers
    kinds = list(zip(transfers.name.tolist(), transfers.participants.tolist(), strict=True))
    factors = {(name, size): bus_factor(recorded.run.names[name], size) for name, size in set(kinds)}
    return np.asarray(np.maximum(transfers.bytes, 0) * np.array([factors[kind] for kind in kinds], np.float64))


def _usual_ns(transfers: ReplayTransfers, rows: Int64) -> float:
    """Return the median of these transfers, ns: of the exact ones, if there are any."""
    exact = rows[transfers.exact[rows]]
    return float(np.median(transfers.ns[exact if len(exact) else rows]))


def _named(recorded: RecordedSteps, chosen: Bool) -> str:
    """Return the roles and operations of transfers, such as ``dp all_reduce and pp send``."""
    kinds = zip(recorded.transfer_role[chosen].tolist(), recorded.joins.transfers.name[chosen].tolist(), strict=True)
    names = sorted({f"{recorded.roles.words[role]} {recorded.run.names[name]}" for role, name in kinds})
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _transfers_of(recorded: RecordedSteps, role: str, option: str) -> Bool:
    chosen = recorded.of_role(role)
    if not chosen.any():
        held = sorted({recorded.roles.words[code] for code in np.unique(recorded.transfer_role).tolist() if code >= 0})
        raise ConfigurationError(
            f"{option} {role}=…: these steps have no communication of role {role}; they have "
            f"{', '.join(held) or 'none'}"
        )
    return chosen


def _latencies(recorded: RecordedSteps) -> tuple[Float64, Bool]:
    """Return the latency of each transfer, ns, and which transfers have none that can be known.

    A line is put through the medians of the smallest and the largest transfers of the same role, operation and group.
    """
    transfers = recorded.joins.transfers
    latency = np.zeros(len(transfers))
    unknown = np.zeros(len(transfers), np.bool_)
    if not len(transfers):
        return latency, unknown
    first, kind = grouped(pack([recorded.transfer_role, transfers.name, transfers.participants]))
    for number in range(len(first)):
        same_kind = np.flatnonzero((kind == number) & (transfers.participants[first[number]] > 1))
        if not len(same_kind):
            continue
        num_bytes = transfers.bytes[same_kind]
        least, most = int(num_bytes.min()), int(num_bytes.max())
        if most < _SIZES_APART * max(least, 1):
            unknown[same_kind] = True
            continue
        short, long = (_usual_ns(transfers, same_kind[num_bytes == size]) for size in (least, most))
        latency[same_kind] = min(max(short - (long - short) * least / (most - least), 0.0), short)
    return latency, unknown


def with_overlap(recorded: RecordedSteps, durations: Durations, changes: Sequence[OverlapChange]) -> Durations:
    """Hide the transfers of roles as a whole, or hold the lane up for them where they start.

    Raises:
        ConfigurationError: the run has no transfer of a role.
    """
    if not changes:
        return durations
    piece_ns, transfer_ns = durations.piece_ns.copy(), durations.transfer_ns.copy()
    notes = list(durations.assumptions)
    for change in changes:
        chosen = _transfers_of(recorded, change.role, "--overlap")
        if change.is_perfect:
            transfer_ns[chosen] = 0
            continue
        hidden = np.flatnonzero(chosen & overlapping(recorded))
        np.add.at(piece_ns, recorded.lanes.starts.piece[hidden], transfer_ns[hidden])
        notes.append(
            f"Operations of {change.role} that queued behind one another start as late as they did: without overlap "
            "the step may be shorter than predicted."
        )
    return Durations(piece_ns, transfer_ns, tuple(notes))


def overlapping(recorded: RecordedSteps) -> Bool:
    """Return which communications the lane works beside: there is work between their start and the wait for them."""
    starts, waits, lanes = recorded.lanes.starts, recorded.lanes.waits, recorded.lanes
    # The pieces of a lane in a step end where its last node begins; without a wait, that is where work beside it ends.
    ends = np.sort(lanes.last_node.reshape(-1))
    until = lanes.node_piece[ends[np.searchsorted(ends, starts.node)]]
    known = waits.launch >= 0
    until[waits.launch[known]] = lanes.node_piece[waits.node[known]]
    sends = recorded.joins.transfers.name == recorded.run.name_code("send")
    return np.asarray((until > starts.piece) & ~sends & ~recorded.joins.transfers.eager)


def without_slow_ranks(
    recorded: RecordedSteps,
    durations: Durations,
    ranks: Sequence[int],
    like: int | None = None,
    mended: MendedRanks | None = None,
) -> Durations:
    """Let ranks be as fast as the others.

    What a finding names of them, ``mended``, is normal, so that the answer is its cost. The work of other ranks, and
    each kind of pause, takes the mean length of the same elsewhere, in proportion. Where no other rank does the same
    work (one replica of a pipeline), forwards and backwards take the mean of the other stages, or those of the rank
    ``like``.

    Raises:
        ConfigurationError: the run has no such rank, or no other rank to compare with.
    """
    if not ranks:
        return durations
    missing = sorted(set(ranks) - set(recorded.ranks.tolist()))
    if missing:
        raise ConfigurationError(
            f"--without-slow-rank {missing[0]}: the run has {format_ranks(recorded.ranks.tolist())}"
        )
    segments = recorded.lanes.segments
    if np.isin(segments.rank, list(ranks)).all():
        raise ConfigurationError("--without-slow-rank: no other rank is left to compare with")
    if _alone(segments, compared_with_stages(ranks, mended)).any():
        durations = durations._replace(assumptions=(*durations.assumptions, _ALONE))
    if mended is not None and mended.ranks:
        durations = Durations(*recorded.in_scenario(mended.normal, mended.places), durations.assumptions)
        ranks = sorted(set(ranks) - mended.ranks)
    return _as_elsewhere(recorded, durations, ranks, like) if ranks else durations


def compared_with_stages(ranks: Sequence[int], mended: MendedRanks | None) -> list[int]:
    """Return the ranks for which other stages may show what is normal: no finding compared them otherwise."""
    return sorted(set(ranks) if mended is None else set(ranks) - (mended.ranks - mended.of_stages))


_ALONE: Final = (
    "No other rank does the same work as the slow one, so its forwards and backwards take the mean of the other stages."
)


def _alone(segments: WorkSegments, ranks: Sequence[int]) -> Bool:
    """Return the forwards and backwards of these ranks that no other rank does."""
    mended = np.isin(segments.rank, list(ranks))
    elsewhere = _mean_elsewhere(same_work(segments), segments.total_ns.astype(np.float64), mended, ~mended)
    return np.asarray(mended & np.isin(segments.kind, (FORWARD, BACKWARD)) & np.isnan(elsewhere))


def _as_elsewhere(recorded: RecordedSteps, durations: Durations, ranks: Sequence[int], like: int | None) -> Durations:
    """Give the work of ranks the mean length of the same on the others."""
    segments = recorded.lanes.segments
    mended = np.isin(segments.rank, list(ranks))
    total, work_ns = segments.total_ns.astype(np.float64), segments.work_ns.astype(np.float64)
    alike = same_work(segments)
    ratio = _mean_elsewhere(alike, work_ns, mended, ~mended)
    in_phase = np.isin(segments.kind, (FORWARD, BACKWARD))
    alone = _alone(segments, ranks)
    if alone.any():
        _, across = grouped(pack([segments.kind, segments.stalls, segments.ordinal]))
        others = ~mended if like is None else segments.rank == like
        elsewhere = _mean_elsewhere(across, np.where(in_phase, work_ns, 0.0), mended, others)
        ratio = np.where(alone, elsewhere, ratio)
    normal_ns = work_ns * np.nan_to_num(ratio, nan=1.0)
    for cause in PAUSES:  # each where it was: it is no part of the other microbatches
        paused_ns = pause_ns(segments, cause).astype(np.float64)
        normal_ns += paused_ns * np.nan_to_num(_mean_elsewhere(alike, paused_ns, mended, ~mended), nan=1.0)
    ratio = np.where(total > 0, normal_ns / np.maximum(total, 1.0), 1.0)
    scale = np.where(mended, ratio, 1.0)
    piece_ns = np.rint(durations.piece_ns * scale[recorded.lanes.piece_segment]).astype(np.int64)
    return durations._replace(piece_ns=piece_ns)


def fastest_and_slowest_stand_in(recorded: RecordedSteps, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the ranks of least and of most work that may stand for slow ones which nobody works like.

    Empty if all others are of one stage, and so tell nothing of how stages differ. None if no slow rank needs one.
    """
    segments = recorded.lanes.segments
    mended = np.isin(segments.rank, list(ranks))
    in_phase = np.isin(segments.kind, (FORWARD, BACKWARD))
    others = in_phase & ~mended
    if not _alone(segments, ranks).any():
        return None
    work = np.bincount(segments.rank[others], segments.total_ns[others])
    candidates = np.unique(segments.rank[others])
    if len({stage_of(recorded.run.ranks[rank]) for rank in candidates.tolist()}) < 2:
        return ()
    return int(candidates[work[candidates].argmin()]), int(candidates[work[candidates].argmax()])


def _mean_elsewhere(work: Int64, total: Float64, mended: Bool, others: Bool) -> npt.NDArray[np.float64]:
    """Return the mean of the same work on other ranks by that on the mended ones, for each segment; NaN if unknown."""
    count = int(work.max(initial=-1)) + 1
    means = []
    for chosen in (others, mended):
        held = np.bincount(work[chosen], minlength=count)
        summed = np.bincount(work[chosen], total[chosen], minlength=count)
        means.append(np.where(held > 0, summed / np.maximum(held, 1), np.nan))
    of_others, of_slow = means
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(of_slow > 0, of_others / of_slow, 1.0)
    return np.asarray(np.where(np.isnan(of_others), np.nan, ratio)[work])
