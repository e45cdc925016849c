"""A few whole steps of every rank, row by row, so that the monitor can replay them as a recording is replayed.

Means over a window tell which rank works for too long. What that costs, whether a stage has too much to do, or whether
a link is slow, follows from how ranks wait for each other, and that is in the rows. All ranks choose the same steps by
their numbers, without asking each other: those that a power of two divides, the smallest one that makes them few.

>>> sampler = StepSampler(rank)                                 # doctest: +SKIP
>>> sampler.add(summary.step, rows); sampler.take()             # doctest: +SKIP
>>> steps = SampledSteps(world_size=8); steps.take(reports)     # doctest: +SKIP
>>> steps.newest_run()                                          # doctest: +SKIP
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta

from commtrace.live.monitoring.wire_types import GroupMembers, Instant, Number, Text, group_members
from commtrace.live.rank import LiveRank
from commtrace.trace import schema
from commtrace.trace.files.decoding import possible_rows
from commtrace.trace.metadata import ClockAnchor, Group, RankMetadata
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN, Int64, RowBatch, Spans

MOST_STEPS: Final = 16
"""Of a window: of a job whose steps take half a second all of them are told."""

FEWEST_STEPS: Final = 8
"""Of fewer, nothing can be told that has to stand out of the noise between steps: then older ones are looked at too."""

_MOST_ROWS_OF_RANK: Final = 4_000
_MOST_ROWS_OF_JOB: Final = 200_000
"""Of a window. The monitor keeps them, 160 bytes each, and has to replay them beside training."""

_MOST_BYTES: Final = 128 * 1024
_MOST_GROUPS: Final = 64
_MOST_WORDS: Final = 256
_MOST_DIMENSIONS: Final = 32
_MOST_WORDS_OF_JOB: Final = 10_000
_MEMBERS_PER_RANK: Final = 64
_MEMBERS_OF_ANY_JOB: Final = 4_096
"""So many members of different groups are kept: every member tells its groups, and each is kept once."""

_MOST_WINDOWS: Final = 16
_LARGEST_STRIDE: Final = 1 << 20

_REPLAYED: Final = frozenset(
    {
        schema.STEP, schema.FORWARD, schema.BACKWARD, schema.RECOMPUTE, schema.OPTIMIZER, schema.COLLECTIVE, schema.P2P,
        schema.STALL, schema.DATA, schema.CHECKPOINT, schema.GC, schema.EVALUATION,
    }
)  # fmt: skip
"""The kinds of rows that a replay looks at: modules and what the user marks are left out."""

_CODES: Final = {"kind": len(schema.KINDS), "lane": len(schema.LANES), "timing": len(schema.TIMINGS)}

Dimensions = Annotated[dict[Text, Number], Meta(max_length=_MOST_DIMENSIONS)]


class SampleError(ValueError):
    """What a rank tells of its steps cannot be."""


class StepSample(NamedTuple):
    """Some whole steps of a rank.

    Attributes:
        boot_id: ranks of one host with the same one read the same clock.
        monotonic_ns, realtime_ns: the same instant on the clock of the rows and on the wall clock.
        coordinates, parallel: as in :class:`commtrace.trace.run.RankTrace`.
        first_step: with which the process began to train.
        groups: process groups that the rows name.
        words: what the codes of names in the rows stand for.
        rows: the columns of :class:`commtrace.trace.spans.Spans` one behind the other, 64 bits each, deflated.
    """

    boot_id: Text
    monotonic_ns: Instant
    realtime_ns: Instant
    coordinates: Dimensions
    parallel: Dimensions
    first_step: Number
    groups: Annotated[tuple[GroupMembers, ...], Meta(max_length=_MOST_GROUPS)]
    words: Annotated[tuple[Text, ...], Meta(max_length=_MOST_WORDS)]
    rows: Annotated[bytes, Meta(max_length=_MOST_BYTES)]


class StepSampler:
    """Gathers the steps of one rank that are told of a window. Not for several threads at a time.

    Args:
        rank: whose steps they are.
    """

    def __init__(self, rank: LiveRank) -> None:
        self._rank = rank
        self._most_rows = most_rows_of_rank(rank.metadata.world_size)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._stride = 1
        self._steps: list[tuple[int, list[Row]]] = []

    def add(self, step: int, rows: Sequence[Row]) -> None:
        """Take the rows of a step that has ended."""
        if step % self._stride:
            return
        self._steps.append((step, [row for row in rows if row.kind in _REPLAYED]))
        while len(self._steps) > MOST_STEPS or sum(len(own) for _, own in self._steps) > self._most_rows:
            self._stride *= 2
            self._steps = [(step, own) for step, own in self._steps if step % self._stride == 0]
            if self._stride > _LARGEST_STRIDE:
                self._steps.clear()  # a single step has too many rows

    def take(self) -> StepSample | None:
        """Return what is told of the steps so far, if anything, and begin anew."""
        steps, rank = self._steps, self._rank
        self._begin_anew()
        batch = RowBatch(row for _, own in steps for row in own)
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
    """Return how many rows each rank of a job may tell of a window."""
    return min(_MOST_ROWS_OF_RANK, _MOST_ROWS_OF_JOB // world_size)


class _Told(NamedTuple):
    """What a rank has told of one window; the names in the rows are coded alike for all ranks."""

    trace: RankTrace
    steps: Int64


class SampledSteps:
    """The newest sampled steps of all ranks.

    Args:
        world_size: ranks of the job.

    Attributes:
        windows: in how many the new ones were of those that were returned last.
    """

    def __init__(self, world_size: int) -> None:
        self.windows = 0
        self._world_size = world_size
        self._told: dict[int, deque[_Told]] = {}
        self._names: list[str] = []
        self._members: dict[object, tuple[int, ...]] = {}
        self._members_left = _MEMBERS_OF_ANY_JOB + _MEMBERS_PER_RANK * world_size
        self._newest_judged = -1

    def take(self, rank: int, host: str, sample: StepSample) -> None:
        """Take what a rank tells of a window.

        Raises:
            SampleError: it cannot be.
        """
        spans = self._spans_of(sample)
        trace = RankTrace(
            metadata=_metadata(rank, host, self._world_size, sample),
            spans=spans,
            groups={told.id: self._group(told) for told in sample.groups},
            coordinates=sample.coordinates,
            parallel=sample.parallel,
            topology={"first_step": sample.first_step},
        )
        steps = np.unique(spans.step[spans.kind == schema.STEP]).astype(np.int64)
        self._told.setdefault(rank, deque(maxlen=_MOST_WINDOWS)).append(_Told(trace, steps))

    def newest_run(self) -> Run | None:
        """Return the steps that are new since the last call, or the newest few; None where not all ranks tell any.

        There are ``FEWEST_STEPS`` to twice ``MOST_STEPS``, all of which every rank has told, and one of them is new.
        """
        if len(self._told) < self._world_size:
            return None
        common = self._common_steps()
        new = common[common > self._newest_judged][-2 * MOST_STEPS :]
        if not len(new) or len(common) < FEWEST_STEPS:
            return None
        chosen = new if len(new) >= FEWEST_STEPS else common[-FEWEST_STEPS:]
        self._newest_judged = int(new[-1])
        self.windows = sum(bool(np.isin(told.steps, new).any()) for told in next(iter(self._told.values())))
        ranks = {rank: _joined(self._told[rank], chosen) for rank in sorted(self._told)}
        self._forget_before(int(common[-FEWEST_STEPS]))
        return Run(Path(), ranks, list(self._names))

    def _common_steps(self) -> Int64:
        common: Int64 | None = None
        for told in self._told.values():
            own = np.unique(np.concatenate([one.steps for one in told]))
            common = own if common is None else np.intersect1d(common, own, assume_unique=True)
        return np.zeros(0, np.int64) if common is None else common

    def _forget_before(self, step: int) -> None:
        for told in self._told.values():
            while len(told) > 1 and int(told[0].steps.max(initial=-1)) < step:
                told.popleft()

    def _spans_of(self, sample: StepSample) -> Spans:
        width = len(DTYPE_OF_COLUMN) * 8
        most = most_rows_of_rank(self._world_size) * width
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(sample.rows, most)
        except zlib.error as error:
            raise SampleError(f"its rows cannot be read: {error}") from error
        if inflate.unconsumed_tail or not inflate.eof or len(raw) % width:
            raise SampleError("it has more rows than a rank may tell, or torn ones")
        columns = dict(
            zip(DTYPE_OF_COLUMN, np.frombuffer(raw, np.int64).reshape(len(DTYPE_OF_COLUMN), -1), strict=True)
        )
        for name, dtype in DTYPE_OF_COLUMN.items():
            most_code = _CODES.get(name, len(sample.words) if name in ("name", "dtype") else None)
            limits = np.iinfo(np.int8 if dtype is np.bool_ else dtype)
            low, high = int(columns[name].min(initial=0)), int(columns[name].max(initial=0))
            lowest = limits.min if most_code is None else schema.NOT_APPLICABLE
            if low < lowest or high > limits.max or (most_code is not None and high >= max(most_code, 1)):
                raise SampleError(f"a row has a {name} that no row can have")
        codes = self._codes(sample.words)
        for name in ("name", "dtype"):
            columns[name] = codes[columns[name]]
        spans = Spans(*(columns[name].astype(dtype) for name, dtype in DTYPE_OF_COLUMN.items()))
        if not possible_rows(spans, np.full(len(spans), self._world_size, np.int64)).all():
            raise SampleError("it has a row that cannot be")
        return spans.take(np.lexsort((-spans.end, spans.start)))

    def _codes(self, words: Sequence[str]) -> Int64:
        """The code in this job of each word; the last entry, which −1 reads, is that of no word."""
        known = {word: code for code, word in enumerate(self._names)}
        for word in words:
            if word not in known:
                if len(self._names) >= _MOST_WORDS_OF_JOB:
                    raise SampleError("the ranks of the job name too many operations")
                known[word] = len(self._names)
                self._names.append(word)
        return np.array([*(known[word] for word in words), schema.NOT_APPLICABLE], np.int64)

    def _group(self, told: GroupMembers) -> Group:
        """The group; its members are kept once, as every one of them tells it."""
        ranks = told.ranks
        if not ranks or min(ranks[0], ranks[-1]) < 0 or max(ranks[0], ranks[-1]) >= self._world_size:
            raise SampleError("it has a group with ranks that the job does not have")
        key = told.regular or told.members
        if key not in self._members:
            if len(ranks) > self._members_left:
                raise SampleError("the groups of the job have too many members")
            self._members_left -= len(ranks)
            self._members[key] = tuple(ranks)
        return Group(told.id, self._members[key], told.ordinal, told.role)


def _joined(told: Iterable[_Told], steps: Int64) -> RankTrace:
    """What a rank has told of these steps."""
    parts = list(told)
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


def _all_groups(parts: Iterable[_Told]) -> Mapping[int, Group]:
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
