"""What two clocks showed at one instant: ends of collectives that nobody can leave before everybody has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import numbered, pack
from commtrace.analysis.matching.operations import SYNCHRONISING, named, unfinished_rows_of
from commtrace.analysis.thinning import least_power, multiples
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Int32, Int64

MOST_ENDS: Final = 600_000
"""Fewer ends of collectives than so many tell how the clocks differ."""


@dataclass(frozen=True, slots=True)
class Observations:
    """Pairs of readings of one instant; all arrays have the same length.

    Attributes:
        clock_a, clock_b: numbers of two clocks.
        time_a, time_b: what they showed, ns.
        step: of training, in which the collective was launched; None where nobody asked.
    """

    clock_a: Int64
    clock_b: Int64
    time_a: Int64
    time_b: Int64
    step: Int32 | None = None

    def __len__(self) -> int:
        return len(self.time_a)


def observe(run: Run, keys: Sequence[tuple[str, str]]) -> Observations:
    """Compare the hosts' readings of each collective; clock i is ``keys[i]``.

    A host's reading is the median of its ranks' ends. Of k hosts that took part, neighbours are compared: k − 1 pairs.
    """
    group, seq, clock, end, step = _ends(run, keys)
    bucket = pack((numbered(group), seq))
    order = np.lexsort((end, clock, bucket))
    bucket, clock, end, step = bucket[order], clock[order], end[order], step[order]
    begins = np.flatnonzero(_changes(bucket) | _changes(clock))
    middle = (begins + np.append(begins[1:], len(end)) - 1) // 2  # lower median: ends are seen late, never early
    bucket, clock, end, step = bucket[middle], clock[middle], end[middle], step[middle]
    pair = np.flatnonzero(bucket[1:] == bucket[:-1])
    return Observations(clock[pair], clock[pair + 1], end[pair], end[pair + 1], step[pair])


def _changes(values: Int64) -> npt.NDArray[np.bool_]:
    changes = np.ones(len(values), np.bool_)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _ends(run: Run, keys: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
    """Group, seq, clock, end and step of the synchronising collectives of all ranks."""
    number = {key: position for position, key in enumerate(keys)}
    rows = [_synchronising(run, block) for block in run.blocks]
    seqs = [block.spans.seq[own] for block, own in zip(run.blocks, rows, strict=True)]
    # Which collectives are left out must not depend on the rank: every member keeps the same ones.
    power = least_power(np.concatenate(seqs), MOST_ENDS)
    parts = []
    for block, own, seq in zip(run.blocks, rows, seqs, strict=True):
        kept = own[multiples(seq, power)]
        clock = np.array([number[run.ranks[rank].clock_key] for rank in block.ranks])
        spans = block.spans
        parts.append(
            (spans.group[kept], spans.seq[kept], block.per_row(clock)[kept], spans.end[kept], spans.step[kept])
        )
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _synchronising(run: Run, block: Block) -> Int64:
    spans = block.spans
    rows = (spans.kind == schema.COLLECTIVE) & named(run, spans, SYNCHRONISING) & ~unfinished_rows_of(run, block)
    # An uneven all_to_all does not end together; nor is an operation without group or number an observation.
    return np.flatnonzero(rows & (spans.self_bytes < 0) & (spans.group >= 0) & (spans.seq >= 0))
