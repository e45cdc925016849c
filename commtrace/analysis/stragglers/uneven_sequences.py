"""Microbatches that are not equally long, on changing ranks: no rank is slow in the mean, and each step waits."""

from __future__ import annotations

import numpy as np

from commtrace.analysis.keys import pack
from commtrace.analysis.replay.ideal import mean_segments
from commtrace.analysis.replay.peers import Float64, grouped_median
from commtrace.analysis.replay.segments import BACKWARD, FORWARD
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.limits import (
    FAR_LONGER,
    FEWEST_LONG,
    FEWEST_MICROBATCHES,
    LONG_TOGETHER,
    SCATTER_OF_MICROBATCHES,
)
from commtrace.analysis.stragglers.long_microbatches import SEQUENCES
from commtrace.analysis.stragglers.verdict import JOB, NEXT_STEP, Verdict


def uneven_sequences(bench: Bench) -> Verdict | None:
    """Microbatches whose forwards and backwards are long together, on changing ranks."""
    forward, backward = _microbatch_times(bench)
    if len(forward) < FEWEST_MICROBATCHES:
        return None
    spread = float(np.std(forward))
    if spread < SCATTER_OF_MICROBATCHES or float(np.std(backward)) == 0.0:
        return None
    correlation, alike = _rank_correlation(forward, backward), _share_long_in_both(forward, backward)
    if correlation < LONG_TOGETHER and alike < LONG_TOGETHER:
        return None
    segments = bench.program.segments
    in_phase = np.isin(segments.kind, (FORWARD, BACKWARD))
    cost = bench.cost(np.where(in_phase, mean_segments(bench.program), segments.total_ns))
    evidence = (
        f"Forwards of one stage differ by {100 * spread:.0f} % between microbatches, and a microbatch with a long "
        f"forward has a long backward ({_how_alike(correlation, alike)}); no rank is slow in the mean."
    )
    if not bench.passes(cost):
        return None
    return Verdict(
        rank=-1,
        host="",
        place=JOB,
        cause=SEQUENCES,
        who="changing ranks",
        cost_ms_per_step=cost.ms,
        gpu_hours_per_day=bench.gpu_hours_per_day(cost),
        persistence=cost.persistence,
        evidence=evidence,
        next_step=NEXT_STEP[SEQUENCES],
    )


def _share_long_in_both(forward: Float64, backward: Float64) -> float:
    """Of the few microbatches that are far longer than the others in one phase, the share that is so in both.

    Where only single microbatches are long, ranks of all the others, which are noise, hide them from a correlation.
    """
    longer, also_longer = forward > FAR_LONGER, backward > FAR_LONGER
    either = int((longer | also_longer).sum())
    return float((longer & also_longer).sum()) / either if either >= FEWEST_LONG else 0.0


def _how_alike(correlation: float, alike: float) -> str:
    if correlation >= LONG_TOGETHER:
        return f"rank correlation {correlation:.2f}"
    return f"so are {alike:.0%} of those that take half as long again as usual"


def _rank_correlation(first: Float64, second: Float64) -> float:
    """Spearman's, with the equal sharing a rank: one microbatch that the machine holds up does not hide the others."""
    rank, other_rank = (np.unique(values, return_inverse=True)[1].reshape(-1) for values in (first, second))
    return float(np.corrcoef(rank, other_rank)[0, 1])


def _microbatch_times(bench: Bench) -> tuple[Float64, Float64]:
    """Forward and backward of every microbatch, relative to what the rank needs for one in the median.

    That is the median of the same step where a step has several: a device that is slower in some steps than in others
    lengthens all microbatches of these.
    """
    segments = bench.program.segments
    chosen = bench.counted & (segments.microbatch >= 0)
    place = [segments.rank, segments.step, segments.chunk, segments.microbatch]
    alike = [segments.rank, segments.chunk]
    if len(np.unique(segments.microbatch[chosen])) > 1:
        alike.append(segments.step)
    times = []
    for kind in (FORWARD, BACKWARD):
        mask = chosen & (segments.kind == kind)
        key = pack([column[mask] for column in place])
        cells, first, cell = np.unique(key, return_index=True, return_inverse=True)
        total = np.asarray(np.bincount(cell.reshape(-1), segments.work_ns[mask], minlength=len(cells)), np.float64)
        own = pack([column[mask][first] for column in alike])
        _, group = np.unique(own, return_inverse=True)
        group = group.reshape(-1)
        typical = grouped_median(group, total, int(group.max(initial=-1)) + 1)
        times.append((cells, total / np.maximum(typical[group], 1.0) - 1))
    (forward_cells, forward), (backward_cells, backward) = times
    if not np.array_equal(forward_cells, backward_cells):
        return np.zeros(0), np.zeros(0)
    return forward, backward
