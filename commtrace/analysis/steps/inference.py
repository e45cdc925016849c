"""Infer unmarked steps from the period of a run's communication.

The sequence of operations (group, operation, bytes) is cut into blocks at every occurrence of one of them. The best cut
has most of the sequence in blocks that contain the most frequent block; of several, the shortest block wins. A step
begins before the longest gap in the block, where an iteration computes. The ranks must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.matching.operations import communication_rows, is_kernel_trace
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64, Spans

FEWEST_STEPS: Final = 3
"""Two repetitions may be chance."""

_NEARLY_ALL: Final = 0.97
"""Equal buckets and a smaller last one are no period of one bucket, up to 32 of them."""
_MOST: Final = 0.8
_MOST_WORDS: Final = 64
_ROWS_LOOKED_AT: Final = 100_000


class _Period(NamedTuple):
    """The begins of blocks and the end of the last one, and the most frequent block."""

    anchors: Int64
    usual: npt.NDArray[np.int32]


def infer_steps(run: Run) -> Run | None:
    """Return a run without step rows with the steps that its communication suggests; None where it suggests none."""
    if any(is_kernel_trace(trace.spans) or np.any(trace.spans.kind == schema.STEP) for trace in run.ranks.values()):
        return None
    if not all(trace.has_times for trace in run.ranks.values()):
        return None
    rows = {rank: np.flatnonzero(communication_rows(trace.spans)) for rank, trace in run.ranks.items()}
    words = {rank: _words(trace.spans, rows[rank]) for rank, trace in run.ranks.items()}
    periods = _periods(words)
    if periods is None:
        return None
    offsets = _offsets(run, rows, periods)
    ranks = {
        rank: _with_steps(run, trace, _boundaries(trace.spans, rows[rank], periods[rank].anchors + offsets[rank]))
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks, steps_inferred=True)


def _words(spans: Spans, rows: Int64) -> npt.NDArray[np.int32]:
    """Return the sequence of a rank: numbers that are equal where operation, bytes and group are."""
    _, first, group = np.unique(spans.group[rows], return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(first))[group.reshape(-1)]
    table = np.stack([spans.name[rows], spans.bytes[rows], group], axis=1)
    _, words = np.unique(table, axis=0, return_inverse=True)
    return np.asarray(words.reshape(-1), np.int32)


def _periods(words: Mapping[int, npt.NDArray[np.int32]]) -> dict[int, _Period] | None:
    """Return the period of each rank, if all repeat themselves equally often; one that was killed may lack the last."""
    known: dict[bytes, _Period | None] = {}
    periods: dict[int, _Period] = {}
    for rank, words_of_rank in words.items():
        key = words_of_rank.tobytes()
        if key not in known:
            known[key] = _period(words_of_rank)
        period = known[key]
        if period is None:
            return None
        periods[rank] = period
    counts = [len(period.anchors) for period in periods.values()]
    if not counts or max(counts) - min(counts) > 1:
        return None
    return {rank: period._replace(anchors=period.anchors[: min(counts)]) for rank, period in periods.items()}


def _period(words: npt.NDArray[np.int32]) -> _Period | None:
    counts = Counter(words[:_ROWS_LOOKED_AT].tolist())
    often = [word for word, count in counts.items() if count > FEWEST_STEPS]
    chosen = often[:: max(1, len(often) // _MOST_WORDS)]
    tried = [(_coverage(words[:_ROWS_LOOKED_AT], word), word) for word in chosen]
    good = [(length, word) for (covered, length), word in tried if covered >= _NEARLY_ALL]
    if not good:
        good = [(length, word) for (covered, length), word in sorted(tried)[-1:] if covered >= _MOST]
    if not good:
        return None
    length, word = min(good)
    anchors = np.flatnonzero(words == word)
    usual = _usual_block(words, anchors)
    whole = [_holds(words[begin:end], usual) for begin, end in pairwise(anchors)]
    # Before the first and after the last whole block are set-up, evaluation and the end.
    first, last = int(np.argmax(whole)), len(whole) - int(np.argmax(whole[::-1]))
    blocks = anchors[first : last + 1]
    # The ends of the sequence may cut a block in two: its remainder may still hold the begin of a step.
    before, after = words[: anchors[0]], words[anchors[-1] :]
    if first == 0 and _common(before[::-1], usual[::-1]) == min(len(before), length):
        blocks = np.append(anchors[0] - length, blocks)
    if last == len(whole) and _common(after, usual) == min(len(after), length):
        blocks = np.append(blocks, anchors[-1] + length)
    return _Period(blocks, usual) if last - first >= FEWEST_STEPS - 1 else None


def _coverage(words: npt.NDArray[np.int32], word: int) -> tuple[float, int]:
    """Return the share of the sequence in usual blocks between occurrences of a word, and the length of one."""
    anchors = np.flatnonzero(words == word)
    usual = _usual_block(words, anchors)
    blocks = Counter(words[begin:end].tobytes() for begin, end in pairwise(anchors))
    holding = sum(count for block, count in blocks.items() if _holds(np.frombuffer(block, np.int32), usual))
    at_the_ends = _common(words[: anchors[0]][::-1], usual[::-1]) + _common(words[anchors[-1] :], usual)
    return (holding * len(usual) + at_the_ends) / len(words), len(usual)


def _common(sequence: npt.NDArray[np.int32], usual: npt.NDArray[np.int32]) -> int:
    length = min(len(sequence), len(usual))
    differ = np.flatnonzero(sequence[:length] != usual[:length])
    return int(differ[0]) if len(differ) else length


def _usual_block(words: npt.NDArray[np.int32], anchors: Int64) -> npt.NDArray[np.int32]:
    blocks = Counter(words[begin:end].tobytes() for begin, end in pairwise(anchors))
    return np.frombuffer(blocks.most_common(1)[0][0], np.int32)


def _holds(block: npt.NDArray[np.int32], usual: npt.NDArray[np.int32]) -> bool:
    """Return whether ``usual`` is a subsequence of the block: a barrier at a checkpoint may come between."""
    if len(block) == len(usual):
        return bool(np.array_equal(block, usual))
    following = iter(block.tolist())
    return len(block) > len(usual) and all(word in following for word in usual.tolist())


def _offsets(
    run: Run,
    rows: Mapping[int, Int64],
    periods: Mapping[int, _Period],
) -> dict[int, int]:
    gaps: dict[bytes, list[Int64]] = {}
    for rank, period in periods.items():
        gaps.setdefault(period.usual.tobytes(), []).append(_gaps(run.ranks[rank].spans, rows[rank], period))
    longest = {key: int(np.argmax(np.sum(of_ranks, axis=0))) for key, of_ranks in gaps.items()}
    return {rank: longest[period.usual.tobytes()] for rank, period in periods.items()}


def _gaps(spans: Spans, rows: Int64, period: _Period) -> Int64:
    """Return, before each operation of the usual block, the median time without communication in flight, ns."""
    start, end = spans.start[rows], np.maximum.accumulate(spans.end[rows])
    before = np.maximum(start - np.concatenate([start[:1], end[:-1]]), 0)
    length = len(period.usual)
    usual = period.anchors[:-1][np.diff(period.anchors) == length]
    usual = usual[(usual >= 0) & (usual + length <= len(rows))]
    return np.asarray(np.median(before[usual[:, np.newaxis] + np.arange(length)], axis=0), np.int64)


def _boundaries(spans: Spans, rows: Int64, first_of_step: Int64) -> Int64:
    """Return the begins of steps: the end of the operation before the first of each."""
    first_of_step = first_of_step[(first_of_step >= 0) & (first_of_step <= len(rows))]
    start = np.append(spans.start[rows], np.iinfo(np.int64).max)[first_of_step]
    before = np.maximum.accumulate(spans.end[rows])[np.maximum(first_of_step - 1, 0)]
    return np.asarray(np.where(first_of_step > 0, np.minimum(before, start), start))


def _with_steps(run: Run, trace: RankTrace, boundaries: Int64) -> RankTrace:
    spans = trace.spans
    number = np.searchsorted(boundaries, spans.start, side="right") - 1
    number[number >= len(boundaries) - 1] = schema.NOT_APPLICABLE
    steps: Sequence[dict[str, object]] = [
        {"kind": "step", "name": "step", "start": int(begin), "end": int(end), "step": step}
        for step, (begin, end) in enumerate(pairwise(boundaries))
    ]
    with_steps = Spans.concatenate([Spans.from_rows(steps, run.names), spans.replace(step=number.astype(np.int32))])
    return replace(trace, spans=with_steps.take(np.lexsort((-with_steps.end, with_steps.start))))
