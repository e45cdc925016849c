"""Ideal durations for a replay: what the operations of a run take when like takes as long as like.

Compute is idealised by the mean, as in the what-if literature: total work stays the same. Communication is idealised by
the median: its rare outliers (a retransmission, a descheduled thread) would move a mean.
"""

from __future__ import annotations

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.peers import Float64, grouped_median, work_keys
from commtrace.analysis.replay_program import Program, by_rank
from commtrace.analysis.replay_segments import BACKWARD, FORWARD
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64


def mean_segments(program: Program) -> Int64:
    """Of each segment, the mean over all segments that are the same work, ns."""
    _, work = grouped(work_keys(program.segments))
    total = np.bincount(work, program.segments.total_ns.astype(np.float64))
    return np.asarray(np.rint((total / np.bincount(work))[work]), np.int64)


def equal_stages(program: Program) -> Int64:
    """The same, scaled so that forwards (and backwards) of all stages and chunks take the mean of all of them."""
    segments = program.segments
    phase = np.isin(segments.kind, (FORWARD, BACKWARD))
    place = pack([segments.kind, np.where(phase, segments.stage, -1), np.where(phase, segments.chunk, -1)])
    here, everywhere = _mean_of_phase(program, place), _mean_of_phase(program, segments.kind)
    scale = np.where(phase & (here > 0), everywhere / np.maximum(here, 1e-9), 1.0)
    return np.asarray(np.rint(mean_segments(program) * scale), np.int64)


def median_transfers(run: Run, program: Program) -> Int64:
    """Of each transfer, the median over those of the same operation, size and number of participants, ns."""
    transfers = program.transfers
    if not len(transfers):
        return np.zeros(0, np.int64)
    names, sizes = (of_transfers(run, program, column) for column in ("name", "bytes"))
    _, group = grouped(pack([names, sizes, transfers.participants]))
    medians = grouped_median(group, transfers.ns.astype(np.float64), int(group.max()) + 1)
    return np.asarray(np.rint(medians[group]), np.int64)


def of_transfers(run: Run, program: Program, column: str) -> Int64:
    """A column of the communication rows behind the transfers."""
    transfers = program.transfers
    return by_rank(program, transfers.rank, transfers.row, lambda rank: getattr(run.ranks[rank].spans, column))


def _mean_of_phase(program: Program, group: Int64) -> Float64:
    """Of each segment: what a whole phase of its group takes in the mean."""
    segments = program.segments
    _, index = grouped(group)
    first_of_phase, _ = grouped(pack([index, segments.rank, segments.step, segments.instance]))
    total = np.bincount(index, segments.total_ns.astype(np.float64))
    return np.asarray((total / np.bincount(index[first_of_phase], minlength=len(total)))[index])
