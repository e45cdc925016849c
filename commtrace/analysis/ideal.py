"""Ideal durations for a replay: what the operations of a run take when like takes as long as like.

Compute is idealised by the mean, as in the what-if literature: total work stays the same. Communication is idealised by
the median: its rare outliers (a retransmission, a descheduled thread) would move a mean.
"""

from __future__ import annotations

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.peers import Float64, grouped_median
from commtrace.analysis.replay_joins import Transfers
from commtrace.analysis.replay_program import Program
from commtrace.analysis.replay_segments import BACKWARD, FORWARD
from commtrace.trace.spans import Int64


def mean_segments(program: Program) -> Int64:
    """Of each segment, the mean over all segments that are the same work, ns."""
    work = program.work
    total = np.bincount(work, program.segments.total_ns.astype(np.float64))
    return np.asarray(np.rint((total / np.bincount(work))[work]), np.int64)


def equal_stages(program: Program, means: Int64) -> Int64:
    """These means, scaled so that forwards (and backwards) of all stages and chunks take the mean of all of them."""
    segments = program.segments
    phase = np.isin(segments.kind, (FORWARD, BACKWARD))
    place = pack([segments.kind, np.where(phase, segments.stage, -1), np.where(phase, segments.chunk, -1)])
    here, everywhere = _mean_of_phase(program, place), _mean_of_phase(program, segments.kind)
    scale = np.where(phase & (here > 0), everywhere / np.maximum(here, 1e-9), 1.0)
    return np.asarray(np.rint(means * scale), np.int64)


def median_transfers(program: Program) -> Int64:
    """Of each transfer, the median over those of the same operation, size and number of participants, ns."""
    transfers = program.transfers
    if not len(transfers):
        return np.zeros(0, np.int64)
    _, group = grouped(transfer_keys(transfers))
    medians = grouped_median(group, transfers.ns, int(group.max()) + 1)
    return np.asarray(np.rint(medians[group]), np.int64)


def transfer_keys(transfers: Transfers) -> Int64:
    """Numbers that are equal for transfers of the same operation, size and number of participants."""
    return pack([transfers.name, transfers.bytes, transfers.participants])


def _mean_of_phase(program: Program, group: Int64) -> Float64:
    """Of each segment: what a whole phase of its group takes in the mean."""
    segments = program.segments
    _, index = grouped(group)
    # The segments of a phase are neighbours.
    first_of_phase = np.ones(len(index), np.bool_)
    first_of_phase[1:] = segments.instance[1:] != segments.instance[:-1]
    for column in (segments.rank, segments.step):
        first_of_phase[1:] |= column[1:] != column[:-1]
    total = np.bincount(index, segments.total_ns.astype(np.float64))
    return np.asarray((total / np.bincount(index[first_of_phase], minlength=len(total)))[index])
