"""A few whole steps of every rank, row by row, which the monitor replays like a recording.

Costs, stages and links need rows. All ranks choose the same steps by their numbers alone: multiples of the smallest
power of two that leaves few of them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta

from commtrace.live.monitoring.wire_types import Instant, Number, Text, WireGroup, group_members, most_group_members
from commtrace.live.rank import LiveRank
from commtrace.trace import schema
from commtrace.trace.files.decoding import possible_rows
from commtrace.trace.metadata import ClockAnchor, Group, RankMetadata
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN, Int64, RowBatch, Spans

MOST_STEPS: Final = 32
"""Limit per window: all steps if they take an eighth of a second or more."""

MOST_REPLAYED: Final = 16
"""Limit per window of the steps that are replayed in any case."""

FEWEST_STEPS: Final = 8
"""Older steps are added to fewer: nothing would stand out of the noise between steps."""

_MOST_ROWS_OF_RANK: Final = 10_000
_MOST_ROWS_OF_JOB: Final = 200_000
"""Limits per window: the monitor keeps the rows, 160 bytes each, and replays some of them beside training."""

_MOST_KEPT: Final = 2
"""The rows that are kept fill so many windows of these limits."""

_MOST_BYTES: Final = 128 * 1024
_MOST_GROUPS: Final = 64
_MOST_WORDS: Final = 256
_MOST_DIMENSIONS: Final = 32
_MOST_WORDS_OF_JOB: Final = 10_000
_MOST_WINDOWS: Final = 16
_LARGEST_STRIDE: Final = 1 << 20

_REPLAYED: Final = frozenset(
    {
        schema.STEP, schema.FORWARD, schema.BACKWARD, schema.RECOMPUTE, schema.OPTIMIZER, schema.COLLECTIVE, schema.P2P,
        schema.STALL, schema.DATA, schema.CHECKPOINT, schema.GC, schema.EVALUATION, schema.BETWEEN,
    }
)  # fmt: skip
"""The kinds of rows that a replay needs, without modules and user spans."""

_CODES: Final = {"kind": len(schema.KINDS), "lane": len(schema.LANES), "timing": len(schema.TIMINGS)}

Dimensions = Annotated[dict[Text, Number], Meta(max_length=_MOST_DIMENSIONS)]


def _replayed(rows: Sequence[Row]) -> RowBatch:
    batch = RowBatch.of(rows)
    return batch.where(np.isin(batch.columns.kind, list(_REPLAYED)))


class SampleError(ValueError):
    """The sampled steps of a rank are not valid."""


class StepSample(NamedTuple):
    """Some whole steps of a rank."""

    boot_id: Text  # equal for ranks that read the same clock
    monotonic_ns: Instant  # of the clock of the rows; realtime_ns is the same instant of the wall clock
    realtime_ns: Instant
    coordinates: Dimensions
    parallel: Dimensions
    first_step: Number  # of the process
    groups: Annotated[tuple[WireGroup, ...], Meta(max_length=_MOST_GROUPS)]
    words: Annotated[tuple[Text, ...], Meta(max_length=_MOST_WORDS)]  # the texts of the codes in the rows
    # the columns of Spans one after the other, 64 bits each, deflated
    rows: Annotated[bytes, Meta(max_length=_MOST_BYTES)]


class StepSampler:
    """Gathers the sampled steps of one rank in a window. Not thread-safe."""

    def __init__(self, rank: LiveRank) -> None:
        self._rank = rank
        self._most_rows = most_rows_of_rank(rank.metadata.world_size)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._stride = 1
        self._steps: list[tuple[int, RowBatch]] = []

    def add(self, step: int, rows: Sequence[Row]) -> None:
        if step % self._stride:
            return
        self._steps.append((step, _replayed(rows)))
        while len(self._steps) > MOST_STEPS or sum(len(own) for _, own in self._steps) > self._most_rows:
            self._draw()

    def _draw(self) -> None:
        """Leave out every second step."""
        self._stride *= 2
        self._steps = [(step, own) for step, own in self._steps if step % self._stride == 0]
        if self._stride > _LARGEST_STRIDE:
            self._steps.clear()  # a single step has too many rows

    def take(self) -> StepSample | None:
        """Return the sample of the steps so far, and begin the next one; None if there is nothing to send."""
        sample = None
        while sample is None and self._steps:
            sample = self._sample()
            self._draw()
        self._begin_anew()
        return sample

    def _sample(self) -> StepSample | None:
        """Return the sample of the present steps; None if it is too large."""
        rank = self._rank
        batch = RowBatch(row for _, own in self._steps for row in own)
        if not batch:
            return None
        columns = np.array([getattr(batch.columns, name) for name in DTYPE_OF_COLUMN], np.int64)
        used = set(batch.columns.group.tolist())
        groups = [group for number, group in dict(rank.marks.groups).items() if number in used]
        packed = zlib.compress(columns.tobytes(), level=1)
        if len(packed) > _MOST_BYTES or len(groups) > _MOST_GROUPS or len(batch.names) > _MOST_WORDS:
            return None
        anchor = rank.anchor
        return StepSample(
            boot_id=rank.metadata.boot_id,
            monotonic_ns=anchor.monotonic_ns,
            realtime_ns=anchor.realtime_ns,
            coordinates=dict(rank.marks.coordinates),
            parallel=dict(rank.marks.parallel),
            first_step=int(rank.marks.topology.get("first_step", 0)),
            groups=tuple(map(group_members, groups)),
            words=tuple(batch.names),
            rows=packed,
        )


def most_rows_of_rank(world_size: int) -> int:
    """Return the limit of rows of one rank and window."""
    return min(_MOST_ROWS_OF_RANK, _MOST_ROWS_OF_JOB // world_size)


class _RankSteps(NamedTuple):
    """The sampled steps of one rank in one window; all ranks share the codes of names."""

    trace: RankTrace
    steps: Int64
    step_ns: Int64  # their durations


class StepDurations(NamedTuple):
    """How long the steps that all ranks sent, and that are still kept, took."""

    steps: Int64  # ascending
    ns: Int64  # shape (ranks, steps)
    first_step: int  # of the job, in which it warms up


class SampledSteps:
    """The newest sampled steps of all ranks; ``windows`` counts the windows behind the new steps of the last run."""

    def __init__(self, world_size: int) -> None:
        self.windows = 0
        self._world_size = world_size
        self._sampled: dict[int, deque[_RankSteps]] = {}
        self._names: list[str] = []
        self._members: dict[object, tuple[int, ...]] = {}
        self._members_left = most_group_members(world_size)
        self._newest_judged = -1

    def take(self, rank: int, host: str, sample: StepSample) -> None:
        """Add the sample of a rank's window; raise :class:`SampleError` if it is not valid."""
        spans = self._spans_of(sample)
        trace = RankTrace(
            metadata=_metadata(rank, host, self._world_size, sample),
            spans=spans,
            groups={sent.id: self._group(sent) for sent in sample.groups},
            coordinates=sample.coordinates,
            parallel=sample.parallel,
            topology={"first_step": sample.first_step},
        )
        rows = spans.kind == schema.STEP
        steps, which = np.unique(spans.step[rows], return_inverse=True)
        step_ns = np.zeros(len(steps), np.int64)
        np.maximum.at(step_ns, which.reshape(-1), (spans.end - spans.start)[rows])
        windows = self._sampled.setdefault(rank, deque(maxlen=_MOST_WINDOWS))
        windows.append(_RankSteps(trace, steps.astype(np.int64), step_ns))
        self._forget_oldest(windows)

    def newest_run(self) -> Run | None:
        """Return the new steps since the last call, with older ones if these are few; None without new ones of all.

        The run has ``FEWEST_STEPS`` to twice ``MOST_REPLAYED`` steps, each sent by every rank.
        """
        common = self._common_steps()
        new = common[common > self._newest_judged]
        if not len(new) or len(common) < FEWEST_STEPS:
            return None
        self._newest_judged = int(new[-1])
        self.windows = sum(bool(np.isin(own.steps, new).any()) for own in next(iter(self._sampled.values())))
        new, stride = new[-2 * MOST_STEPS :], 1
        while len(new) > min(self.windows, 2) * MOST_REPLAYED:
            stride *= 2
            new = new[new % stride == 0]
        return self.run_of(new if len(new) >= FEWEST_STEPS else common[-FEWEST_STEPS:])

    def run_of(self, steps: Int64) -> Run:
        """Return some of the steps that all ranks sent as a run."""
        ranks = {rank: _joined(self._sampled[rank], steps) for rank in sorted(self._sampled)}
        return Run(Path(), ranks, list(self._names))

    def durations(self) -> StepDurations:
        """Return how long all steps took that are kept; none before every rank has sent some."""
        common = self._common_steps()
        ns = [_durations(self._sampled[rank], common) for rank in sorted(self._sampled)]
        first = min((windows[-1].trace.first_step for windows in self._sampled.values()), default=0)
        return StepDurations(common, np.array(ns, np.int64).reshape(len(ns), len(common)), first)

    def _common_steps(self) -> Int64:
        if len(self._sampled) < self._world_size:
            return np.zeros(0, np.int64)
        common: Int64 | None = None
        for windows in self._sampled.values():
            own = np.unique(np.concatenate([one.steps for one in windows]))
            common = own if common is None else np.intersect1d(common, own, assume_unique=True)
        return np.zeros(0, np.int64) if common is None else common

    def _forget_oldest(self, windows: deque[_RankSteps]) -> None:
        most_rows = _MOST_KEPT * most_rows_of_rank(self._world_size)
        rows = sum(len(one.trace.spans) for one in windows)
        steps = sum(len(one.steps) for one in windows)
        while rows > most_rows and steps - len(windows[0].steps) >= FEWEST_STEPS:
            rows, steps = rows - len(windows[0].trace.spans), steps - len(windows[0].steps)
            windows.popleft()

    def _spans_of(self, sample: StepSample) -> Spans:
        width = len(DTYPE_OF_COLUMN) * 8
        most = most_rows_of_rank(self._world_size) * width
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(sample.rows, most)
        except zlib.error as error:
            raise SampleError(f"its rows cannot be read: {error}") from error
        if inflate.unconsumed_tail or not inflate.eof or len(raw) % width:
            raise SampleError("it has more rows than allowed, or torn ones")
        columns = dict(
            zip(DTYPE_OF_COLUMN, np.frombuffer(raw, np.int64).reshape(len(DTYPE_OF_COLUMN), -1), strict=True)
        )
        for name, dtype in DTYPE_OF_COLUMN.items():
            most_code = _CODES.get(name, len(sample.words) if name in ("name", "dtype") else None)
            limits = np.iinfo(np.int8 if issubclass(dtype, np.bool_) else dtype)
            low, high = int(columns[name].min(initial=0)), int(columns[name].max(initial=0))
            lowest = limits.min if most_code is None else schema.NOT_APPLICABLE
            if low < lowest or high > limits.max or (most_code is not None and high >= max(most_code, 1)):
                raise SampleError(f"a row has a {name} that no row can have")
        codes = self._codes(sample.words)  # the last entry, which −1 selects, stands for no name
        for name in ("name", "dtype"):
            columns[name] = codes[columns[name]]
        spans = Spans(*(columns[name].astype(dtype) for name, dtype in DTYPE_OF_COLUMN.items()))
        if not possible_rows(spans, np.full(len(spans), self._world_size, np.int64)).all():
            raise SampleError("it has an impossible row")
        return spans.take(np.lexsort((-spans.end, spans.start)))

    def _codes(self, words: Sequence[str]) -> Int64:
        known = {word: code for code, word in enumerate(self._names)}
        for word in words:
            if word not in known:
                if len(self._names) >= _MOST_WORDS_OF_JOB:
                    raise SampleError("the ranks of the job name too many operations")
                known[word] = len(self._names)
                self._names.append(word)
        return np.array([*(known[word] for word in words), schema.NOT_APPLICABLE], np.int64)

    def _group(self, sent: WireGroup) -> Group:
        ranks = sent.ranks
        if not ranks or min(ranks) < 0 or max(ranks) >= self._world_size:
            raise SampleError("it has a group with ranks that the job does not have")
        key = sent.regular or sent.members  # every member sends the group; its members are kept once
        if key not in self._members:
            if len(ranks) > self._members_left:
                raise SampleError("the groups of the job have too many members")
            self._members_left -= len(ranks)
            self._members[key] = tuple(ranks)
        return Group(sent.id, self._members[key], sent.ordinal, sent.role)


def _durations(windows: Iterable[_RankSteps], steps: Int64) -> Int64:
    """Return those of ``steps``, all of which the windows hold."""
    parts = list(windows)
    numbers, ns = (np.concatenate(column) for column in zip(*((one.steps, one.step_ns) for one in parts), strict=True))
    order = np.argsort(numbers, kind="stable")
    return np.asarray(ns[order][np.searchsorted(numbers[order], steps, side="right") - 1])


def _joined(windows: Iterable[_RankSteps], steps: Int64) -> RankTrace:
    parts = list(windows)
    newest = parts[-1].trace
    spans = Spans.concatenate([one.trace.spans for one in parts])
    spans = spans.take(np.isin(spans.step, steps))
    spans = spans.take(np.lexsort((-spans.end, spans.start)))
    return RankTrace(
        metadata=newest.metadata,
        spans=spans,
        groups=_all_groups(parts),
        coordinates=newest.coordinates,
        parallel=newest.parallel,
        topology=newest.topology,
    )


def _all_groups(parts: Iterable[_RankSteps]) -> Mapping[int, Group]:
    return {number: group for one in parts for number, group in one.trace.groups.items()}


def _metadata(rank: int, host: str, world_size: int, sample: StepSample) -> RankMetadata:
    return RankMetadata(
        run_id="",
        attempt=0,
        session=0,
        rank=rank,
        local_rank=0,
        world_size=world_size,
        host=host,
        node=host,
        boot_id=sample.boot_id,
        pid=0,
        backend="",
        device="",
        device_uuid="",
        anchor=ClockAnchor(sample.monotonic_ns, sample.realtime_ns),
    )
