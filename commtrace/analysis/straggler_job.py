"""What holds up a job although no single rank computes slowly: uneven sequences, a slow link.

These are looked for only when no slow worker was found: a slow worker changes what its neighbours' communications and
stages look like, and only the cause shall be named.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.ideal import mean_segments, transfer_keys
from commtrace.analysis.keys import pack
from commtrace.analysis.peers import Float64, grouped_median, leave_one_out_median
from commtrace.analysis.replay_segments import BACKWARD, FORWARD
from commtrace.analysis.straggler_costs import Bench, Cost
from commtrace.analysis.straggler_verdict import NEXT_STEP, Verdict
from commtrace.trace.spans import Bool, Int64

_CORRELATION: Final = 0.7
"""Forward and backward of a microbatch lengthen together when its sequences do.

Of Megatron's example on a machine with more processes than cores, where single microbatches take ten times as long, the
ranks of both have a correlation of 0.1 to 0.3, and of 0.8 to 0.95 with sequences of different length.
"""

_LONG: Final = 0.5
"""A microbatch is far longer than usual by this share of it."""

_FEWEST_LONG: Final = 8
_SCATTER_OF_MICROBATCHES: Final = 0.1
_SLOW_LINK: Final = 2.0
"""Transfers of a slow link take this many times as long as the same transfers elsewhere."""

_HALF_OF_UPPER_HALF: Final = 0.6745
"""Median of what lies above the median, in standard deviations, for normal noise."""

_FEWEST_TRANSFERS: Final = 8
_MOST_SUSPECTS: Final = 8
_CLEARLY_DEARER: Final = 1.3


class JobFindings(NamedTuple):
    """Verdicts, and sentences on what could not be told."""

    verdicts: list[Verdict]
    abstentions: list[str]


def job_wide_causes(bench: Bench) -> JobFindings:
    """Look for causes other than slow workers and uneven stages."""
    links = _slow_links(bench)
    uneven = _uneven_sequences(bench)
    return JobFindings([*([uneven] if uneven else []), *links.verdicts], links.abstentions)


def _uneven_sequences(bench: Bench) -> Verdict | None:
    """Microbatches whose forwards and backwards are long together, on changing ranks."""
    forward, backward = _microbatch_times(bench)
    if len(forward) < 2 * _FEWEST_TRANSFERS:
        return None
    spread = float(np.std(forward))
    if spread < _SCATTER_OF_MICROBATCHES or float(np.std(backward)) == 0.0:
        return None
    correlation, alike = _rank_correlation(forward, backward), _share_long_in_both(forward, backward)
    if correlation < _CORRELATION and alike < _CORRELATION:
        return None
    segments = bench.program.segments
    in_phase = np.isin(segments.kind, (FORWARD, BACKWARD))
    cost = bench.cost(np.where(in_phase, mean_segments(bench.program), segments.total_ns))
    evidence = (
        f"Forwards of one stage differ by {100 * spread:.0f} % between microbatches, and a microbatch with a long "
        f"forward has a long backward ({_how_alike(correlation, alike)}); no rank is slow in the mean."
    )
    who = "no single rank: it moves"
    return _verdict(bench, -1, "sequence_length_imbalance", who, cost, evidence) if bench.passes(cost) else None


def _share_long_in_both(forward: Float64, backward: Float64) -> float:
    """Of the few microbatches that are far longer than the others in one phase, the share that is so in both.

    Where only single microbatches are long, ranks of all the others, which are noise, hide them from a correlation.
    """
    longer, also_longer = forward > _LONG, backward > _LONG
    either = int((longer | also_longer).sum())
    return float((longer & also_longer).sum()) / either if either >= _FEWEST_LONG else 0.0


def _how_alike(correlation: float, alike: float) -> str:
    if correlation >= _CORRELATION:
        return f"rank correlation {correlation:.2f}"
    return f"so are {alike:.0%} of those that take half as long again as usual"


def _rank_correlation(first: Float64, second: Float64) -> float:
    """Spearman's, with the equal sharing a rank: one microbatch that the machine holds up does not hide the others."""
    rank, other_rank = (np.unique(values, return_inverse=True)[1].reshape(-1) for values in (first, second))
    return float(np.corrcoef(rank, other_rank)[0, 1])


def _microbatch_times(bench: Bench) -> tuple[Float64, Float64]:
    """Forward and backward of every microbatch, relative to what the rank needs for one in the median."""
    segments = bench.program.segments
    chosen = bench.counted & (segments.microbatch >= 0)
    place = [segments.rank, segments.step, segments.chunk, segments.microbatch]
    times = []
    for kind in (FORWARD, BACKWARD):
        mask = chosen & (segments.kind == kind)
        key = pack([column[mask] for column in place])
        cells, first, cell = np.unique(key, return_index=True, return_inverse=True)
        total = np.asarray(np.bincount(cell.reshape(-1), segments.work_ns[mask], minlength=len(cells)), np.float64)
        own = pack([segments.rank[mask][first], segments.chunk[mask][first]])
        _, group = np.unique(own, return_inverse=True)
        group = group.reshape(-1)
        typical = grouped_median(group, total, int(group.max(initial=-1)) + 1)
        times.append((cells, total / np.maximum(typical[group], 1.0) - 1))
    (forward_cells, forward), (backward_cells, backward) = times
    if not np.array_equal(forward_cells, backward_cells):
        return np.zeros(0), np.zeros(0)
    return forward, backward


def _slow_links(bench: Bench) -> JobFindings:
    """Ranks whose transfers take longer than the same transfers of other ranks."""
    transfers = bench.program.transfers
    steady = bench.steady[transfers.step] & (transfers.participants > 1)
    rows = np.flatnonzero(steady)
    if len(rows) < _FEWEST_TRANSFERS:
        return JobFindings([], [])
    key = _transfer_keys(bench)[rows]
    _, entry, count = np.unique(pack([key, transfers.rank[rows]]), return_inverse=True, return_counts=True)
    entry = entry.reshape(-1)
    first = np.zeros(len(count), np.int64)
    first[entry] = np.arange(len(rows))
    own = grouped_median(entry, transfers.ns[rows].astype(np.float64), len(count))
    others = leave_one_out_median(key[first], own)
    scatter = _typical_scatter(key[first], entry, transfers.ns[rows].astype(np.float64), own)
    stands_out = own - others > bench.thresholds.sigmas * scatter
    slow = (own > _SLOW_LINK * others) & stands_out & (count >= _FEWEST_TRANSFERS)
    excess = np.where(slow, np.nan_to_num(own - others) * count, 0.0)
    by_rank = np.bincount(transfers.rank[rows][first], excess, minlength=int(bench.program.ranks.max()) + 1)
    suspects = [int(rank) for rank in np.argsort(-by_rank, kind="stable")[:_MOST_SUSPECTS] if by_rank[rank] > 0]
    costs = {rank: bench.cost(None, _at_speed_of_others(bench, rank)) for rank in suspects}
    dearest = sorted((rank for rank in suspects if bench.passes(costs[rank])), key=lambda rank: -costs[rank].ms)
    if not dearest:
        return JobFindings([], [])
    rank, *rest = dearest
    alike = [other for other in rest if costs[other].ms * _CLEARLY_DEARER > costs[rank].ms]
    if alike:
        ranks = ", ".join(map(str, sorted([rank, *alike])))
        return JobFindings(
            [],
            [
                f"Transfers between ranks {ranks} cost {costs[rank].ms:.1f} ms per step more than the same transfers "
                "elsewhere; which end of the link is slow cannot be told, as these ranks have no comparable "
                "communication with others."
            ],
        )
    slowest = float(np.nanmax(np.where((transfers.rank[rows][first] == rank) & slow, own / others, np.nan)))
    evidence = (
        f"Communications of rank {rank} take up to {slowest:.1f} times as long, after all participants have arrived, "
        "as the same communications of other ranks; its own work is not slow."
    )
    who = f"rank {rank} on {bench.run.ranks[rank].metadata.node}"
    return JobFindings([_verdict(bench, rank, "communication", who, costs[rank], evidence)], [])


def _typical_scatter(key: Int64, entry: Int64, values: Float64, median: Float64) -> Float64:
    """Of each entry: how far single transfers of its key are from the median of their rank, on the typical rank.

    The upper half counts, as a standard deviation: transfers on a busy host are short, with a long tail.
    """
    above = values - median[entry]
    upper = above >= 0
    spread = grouped_median(entry[upper], above[upper], len(median)) / _HALF_OF_UPPER_HALF
    _, group = np.unique(key, return_inverse=True)
    group = group.reshape(-1)
    return np.asarray(grouped_median(group, spread, int(group.max()) + 1)[group])


def _transfer_keys(bench: Bench) -> Int64:
    return transfer_keys(bench.program.transfers)


def _at_speed_of_others(bench: Bench, rank: int) -> Int64:
    """Transfer durations with all communications of a rank as quick as the same ones that it has no part in."""
    transfers = bench.program.transfers
    touched: Bool = np.isin(transfers.join, transfers.join[transfers.rank == rank])
    _, key = np.unique(_transfer_keys(bench), return_inverse=True)
    key = key.reshape(-1)
    keys, values = int(key.max()) + 1, transfers.ns.astype(np.float64)
    own, others = (grouped_median(key[mask], values[mask], keys) for mask in (touched, ~touched))
    ratio = np.ones(keys)
    comparable = np.isfinite(others) & (own > others) & (own > 0)
    ratio[comparable] = others[comparable] / own[comparable]
    return np.asarray(np.rint(np.where(touched, values * ratio[key], values)), np.int64)


def _verdict(bench: Bench, rank: int, cause: str, who: str, cost: Cost, evidence: str) -> Verdict:
    return Verdict(
        rank=rank,
        host=bench.run.ranks[rank].metadata.node if rank >= 0 else "",
        cause=cause,
        who=who,
        cost_ms_per_step=cost.ms,
        gpu_hours_per_day=bench.gpu_hours_per_day(cost),
        persistence=cost.persistence,
        evidence=evidence,
        next_step=NEXT_STEP[cause],
    )
