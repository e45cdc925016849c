"""Ideal durations for a replay: what the operations of a run take when like takes as long as like.

Compute is idealised by the mean, as in the what-if literature: total work stays the same. Communication is idealised by
the median: its rare outliers (a retransmission, a descheduled thread) would move a mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay.edges import Transfers
from commtrace.analysis.replay.program import Program
from commtrace.analysis.replay.segments import BACKWARD, FORWARD, Segments
from commtrace.analysis.statistics import Float64, grouped_median
from commtrace.trace.spans import Bool, Int64


def mean_segments(program: Program) -> Int64:
    """Return, for each segment, the mean over all segments that are the same work, ns."""
    work = program.work
    total = np.bincount(work, program.segments.total_ns.astype(np.float64))
    return np.asarray(np.rint((total / np.bincount(work))[work]), np.int64)


def equal_stages(program: Program, means: Int64) -> Int64:
    """Return these means, scaled so that phases of all stages and chunks take the mean of all of them."""
    if not len(means):
        return means
    segments, work = program.segments, program.work
    # All of this is equal for segments that are the same work, of which one each is looked at.
    example = np.empty(int(work.max()) + 1, np.int64)
    example[work] = np.arange(len(work))
    kind = segments.kind[example]
    phase = np.isin(kind, (FORWARD, BACKWARD))
    place = pack([kind, *(np.where(phase, column[example], -1) for column in (segments.stage, segments.chunk))])
    is_first = first_of_phase(segments)
    total_ns = segments.total_ns.astype(np.float64)
    here, everywhere = (_mean_of_phase(own, work, is_first, total_ns) for own in (place, kind))
    scale = np.where(phase & (here > 0), everywhere / np.maximum(here, 1e-9), 1.0)
    return np.asarray(np.rint(means * scale[work]), np.int64)


def median_transfers(program: Program) -> Int64:
    """Return, for each transfer, the median over those that are alike (:func:`transfer_keys`), ns."""
    transfers = program.transfers
    if not len(transfers):
        return np.zeros(0, np.int64)
    _, group = grouped(transfer_keys(transfers))
    medians = grouped_median(group, transfers.ns, int(group.max()) + 1)
    return np.asarray(np.rint(medians[group]), np.int64)


def transfer_keys(transfers: Transfers) -> Int64:
    """Return numbers that are equal for transfers of the same operation, size and number of participants."""
    return pack([transfers.name, transfers.bytes, transfers.participants])


def first_of_phase(segments: Segments) -> Bool:
    """Return the first segment of each phase, whose segments are neighbours."""
    first = np.ones(len(segments), np.bool_)
    first[1:] = segments.instance[1:] != segments.instance[:-1]
    for column in (segments.rank, segments.step):
        first[1:] |= column[1:] != column[:-1]
    return first


def _mean_of_phase(group: npt.NDArray[np.integer], work: Int64, first_of_phase: Bool, total_ns: Float64) -> Float64:
    """Return, for each work, what a whole phase of its group takes in the mean."""
    _, of_work = grouped(group)
    index = of_work.take(work)
    total = np.bincount(index, total_ns)
    return np.asarray((total / np.bincount(index[first_of_phase], minlength=len(total)))[of_work])
