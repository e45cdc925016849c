"""Statistics of work, pauses and transfers in some steps; those of consecutive parts of a run can be added.

>>> whole = (StatisticsParts.of(run, first) + StatisticsParts.of(run, second)).joined()  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

import numpy as np

from commtrace.analysis.keys import find_rows, grouped, pack
from commtrace.analysis.replay.between_steps import BetweenSteps
from commtrace.analysis.replay.edges import ReplayTransfers
from commtrace.analysis.replay.program import Program, class_of
from commtrace.analysis.replay.segments import BACKWARD, FORWARD, WorkSegments, first_of_phase
from commtrace.analysis.statistics import Float64
from commtrace.findings.causes import CHECKPOINT, DATA, EVALUATION, GC, PAUSES
from commtrace.trace.blocks import pick
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64

MOST_ROWS: Final = 3_000_000
"""Rows of work and transfers that are kept, about 30 bytes each. Of a longer run, steps are drawn with half as many."""

FEWEST_STEPS: Final = 64
"""Steps that are always kept."""

_GOLDEN: Final = 2_654_435_769
"""2^32 divided by the golden ratio: multiples modulo 2^32 are evenly spread, whichever the steps are."""


_COLUMNS: Final = ("microbatch", "begins_phase", "work_ns", "total_ns", "launch_bound_ns")
"""Columns of a table of work beside entry and step."""


class Entries(NamedTuple):
    """Kinds of work of every rank. Entries that differ only in the rank are the same work."""

    stage: Int32
    chunk: Int32
    kind: Int32
    stalls: Int32
    ordinal: Int32
    rank: Int32

    @property
    def work(self) -> Int64:
        """Return numbers from 0 that are equal for the same work on different ranks."""
        return grouped(pack(self[:-1]))[1]

    @property
    def is_in_phase(self) -> Bool:
        return np.isin(self.kind, (FORWARD, BACKWARD))

    def find(self, table: WorkTable) -> Int32:
        """Return the entry of each row of a table; −1 for none."""
        return find_rows(self, table.entries).astype(np.int32)[table.entry]


@dataclass(frozen=True, slots=True)
class WorkTable:
    """Work of ranks between two stalls. Columns of equal length."""

    entries: Entries  # ascending
    entry: Int32  # index into ``entries``
    step: Int32  # index
    microbatch: Int32
    begins_phase: Bool  # first row of a phase, or of the time between two
    work_ns: Int64
    total_ns: Int64  # with pauses
    launch_bound_ns: Int64  # of ``work_ns``, the device waited for its host; −1 if not known

    @classmethod
    def of(cls, segments: WorkSegments) -> WorkTable:
        columns = [getattr(segments, name) for name in Entries._fields]
        first, entry = grouped(pack(columns))
        return cls(
            Entries(*(column[first] for column in columns)),
            entry.astype(np.int32),
            segments.step,
            segments.microbatch,
            first_of_phase(segments),
            segments.work_ns,
            segments.total_ns,
            segments.launch_bound_ns,
        )

    def __len__(self) -> int:
        return len(self.entry)

    @property
    def rank(self) -> Int32:
        return self.entries.rank[self.entry]

    @property
    def chunk(self) -> Int32:
        return self.entries.chunk[self.entry]

    @property
    def kind(self) -> Int32:
        return self.entries.kind[self.entry]

    @property
    def is_in_phase(self) -> Bool:
        return self.entries.is_in_phase[self.entry]

    @property
    def count(self) -> Int64:
        """Return the number of rows of each entry."""
        return np.bincount(self.entry, minlength=len(self.entries.rank))

    def by_entry(self, values: Int64 | Bool) -> Int64:
        """Return the sum of a column by entry."""
        # float64 sums are exact here: they stay far below 2⁵³ ns, which is 104 days.
        return np.bincount(self.entry, values, minlength=len(self.entries.rank)).astype(np.int64)

    def of_steps(self, chosen: Bool) -> WorkTable:
        """Return the rows of these steps, which are numbered from 0 again."""
        rows = chosen[self.step]
        kept, entry = _kept(self.entry[rows], len(self.entries.rank))
        return WorkTable(
            Entries(*(column[kept] for column in self.entries)),
            entry,
            _numbers(chosen)[self.step[rows]],
            *(getattr(self, name)[rows] for name in _COLUMNS),
        )

    @classmethod
    def joined(cls, parts: Sequence[WorkTable], first_step: Sequence[int]) -> WorkTable:
        """Return the rows of all parts; ``first_step`` is the index of the first step of each."""
        columns = [np.concatenate(column) for column in zip(*(part.entries for part in parts), strict=True)]
        first, number = grouped(pack(columns))
        numbers = np.split(number.astype(np.int32), np.cumsum([len(part.entries.rank) for part in parts])[:-1])
        return cls(
            Entries(*(column[first] for column in columns)),
            np.concatenate([number_of[part.entry] for part, number_of in zip(parts, numbers, strict=True)]),
            np.concatenate([part.step + np.int32(step) for part, step in zip(parts, first_step, strict=True)]),
            *(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS),
        )


def _numbers(chosen: Bool) -> Int32:
    """Return the index of each among the chosen."""
    return (np.cumsum(chosen) - 1).astype(np.int32)


def _kept(number: Int32, count: int) -> tuple[Int64, Int32]:
    """Return the numbers below ``count`` that occur, and each number as its index among them; −1 stays −1."""
    occurs = np.bincount(number[number >= 0], minlength=count) > 0
    return np.flatnonzero(occurs), np.append(_numbers(occurs), np.int32(-1))[number]


_SEND, _RECEIVE = "send", "recv"


class TransferLink(NamedTuple):
    """Ranks of communications: sender and receiver of messages, members of collectives in ascending order."""

    ranks: tuple[int, ...]
    is_directed: bool


class LinkTraffic(NamedTuple):
    """Similar transfers over a link; the operation of messages is ``send`` on either side."""

    operation: str
    num_bytes: int
    participants: int
    link: TransferLink


class TransferKind(NamedTuple):
    """Similar transfers over any link."""

    operation: str
    num_bytes: int
    participants: int


@dataclass(frozen=True, slots=True)
class TransferTable:
    """Transfers of some steps, one row per participant."""

    traffic: tuple[LinkTraffic, ...]
    kinds: tuple[TransferKind, ...]
    row: Int32  # index into ``traffic``; −1 without other participants
    kind: Int32  # index into ``kinds``
    join: Int32  # equal for the participants of one communication
    rank: Int32
    step: Int32  # index
    ns: Int64
    exact: Bool  # False: ``ns`` is an upper bound

    @classmethod
    def of(cls, run: Run, transfers: ReplayTransfers) -> TransferTable:
        """Return the transfers of a program."""
        traffic, row = traffic_of(run, transfers)
        kinds, kind = kinds_of(run, transfers)
        return cls(
            traffic,
            kinds,
            row.astype(np.int32),
            kind.astype(np.int32),
            transfers.join,
            transfers.rank,
            transfers.step,
            transfers.ns,
            transfers.exact,
        )

    def __len__(self) -> int:
        return len(self.row)

    def of_steps(self, chosen: Bool) -> TransferTable:
        """Return the rows of these steps, which are numbered from 0 again."""
        rows = chosen[self.step]
        traffic, row = _kept(self.row[rows], len(self.traffic))
        kinds, kind = _kept(self.kind[rows], len(self.kinds))
        return TransferTable(
            tuple(self.traffic[at] for at in traffic.tolist()),
            tuple(self.kinds[at] for at in kinds.tolist()),
            row,
            kind,
            self.join[rows],
            self.rank[rows],
            _numbers(chosen)[self.step[rows]],
            self.ns[rows],
            self.exact[rows],
        )

    @classmethod
    def joined(cls, parts: Sequence[TransferTable], first_step: Sequence[int]) -> TransferTable:
        """Return the rows of all parts; ``first_step`` is the index of the first step of each."""
        traffic, rows = _together([part.traffic for part in parts])
        kinds, kind = _together([part.kinds for part in parts])
        joins = np.cumsum([0, *(part.join.max(initial=-1) + 1 for part in parts)]).astype(np.int32)
        return cls(
            traffic,
            kinds,
            np.concatenate([number_of[part.row] for part, number_of in zip(parts, rows, strict=True)]),
            np.concatenate([number_of[part.kind] for part, number_of in zip(parts, kind, strict=True)]),
            np.concatenate([part.join + before for part, before in zip(parts, joins[:-1], strict=True)]),
            np.concatenate([part.rank for part in parts]),
            np.concatenate([part.step + np.int32(step) for part, step in zip(parts, first_step, strict=True)]),
            np.concatenate([part.ns for part in parts]),
            np.concatenate([part.exact for part in parts]),
        )


_Key = TypeVar("_Key", LinkTraffic, TransferKind)


def _together(parts: Sequence[tuple[_Key, ...]]) -> tuple[tuple[_Key, ...], list[Int32]]:
    """Return the keys of all parts, and the index of each part's own among them; −1 stays −1."""
    number: dict[_Key, int] = {}
    numbers: list[Int32] = []
    for keys in parts:
        numbers_of_part: list[int] = [number.setdefault(key, len(number)) for key in keys]
        numbers.append(np.array([*numbers_of_part, -1], np.int32))
    return tuple(number), numbers


def kinds_of(run: Run, transfers: ReplayTransfers) -> tuple[tuple[TransferKind, ...], Int64]:
    """Return the kinds of transfers, and the index of each transfer's kind."""
    first, kind = grouped(pack([transfers.name, transfers.bytes, transfers.participants]))
    columns = (column[first].tolist() for column in (transfers.name, transfers.bytes, transfers.participants))
    return tuple(TransferKind(run.names[name], *sizes) for name, *sizes in zip(*columns, strict=True)), kind


def traffic_of(run: Run, transfers: ReplayTransfers) -> tuple[tuple[LinkTraffic, ...], Int64]:
    """Return the traffic, and the index into it of each transfer; −1 without other participants."""
    rows = np.flatnonzero(transfers.participants > 1)
    number = np.full(len(transfers), -1, np.int64)
    if not len(rows):
        return (), number
    links, link_of_row = _links_of(run, transfers, rows)
    node = {rank: trace.metadata.node for rank, trace in run.ranks.items()}
    crosses = np.array([len({node.get(rank) for rank in link.ranks}) > 1 for link in links])
    first, join = grouped(transfers.join[rows])
    link, name = link_of_row[first], _operation(run, transfers.name[rows][first])
    num_bytes, participants = (column[rows][first] for column in (transfers.bytes, transfers.participants))
    first_row, row = grouped(pack([name, num_bytes, participants, crosses[link].astype(np.int64), link]))
    # Groups with the same members are one link.
    traffic: dict[LinkTraffic, int] = {}
    same = [
        traffic.setdefault(
            LinkTraffic(run.names[int(name[at])], int(num_bytes[at]), int(participants[at]), links[int(link[at])]),
            len(traffic),
        )
        for at in first_row.tolist()
    ]
    number[rows] = np.array(same, np.int64)[row[join]]
    return tuple(traffic), number


def _links_of(run: Run, transfers: ReplayTransfers, rows: Int64) -> tuple[list[TransferLink], Int64]:
    rank = transfers.rank[rows]
    group, peer = (
        pick({number: getattr(trace.spans, name) for number, trace in run.ranks.items()}, rank, transfers.row[rows])
        for name in ("group", "peer")
    )
    code = {word: number for number, word in enumerate(run.names)}
    sends, receives = (transfers.name[rows] == code.get(word, -1) for word in (_SEND, _RECEIVE))
    is_message = (sends | receives) & (peer >= 0) & (peer < OUTSIDE)
    source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
    key = pack([np.where(is_message, -1, group), np.where(is_message, source, 0), np.where(is_message, target, 0)])
    first, link = grouped(key)
    join = transfers.join[rows]
    links = []
    for row in first.tolist():
        if is_message[row]:
            links.append(TransferLink((int(source[row]), int(target[row])), is_directed=True))
            continue
        known_group = run.ranks[int(rank[row])].groups.get(int(group[row]))
        # If the members are not recorded, take the ranks found in one of the group's communications.
        members = np.unique(rank[join == join[row]]).tolist() if known_group is None else known_group.ranks
        links.append(TransferLink(tuple(member for member in members if member in run.ranks), is_directed=False))
    return links, link


def _operation(run: Run, name: Int32) -> Int64:
    """Return the codes of names, with ``send`` for either side of messages."""
    code = {word: number for number, word in enumerate(run.names)}
    return np.where(name == code.get(_RECEIVE, -1), code.get(_SEND, -1), name).astype(np.int64)


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Work, pauses and transfers of all ranks in some steps."""

    ranks: Int64  # numbers, ascending
    steps: Int64  # numbers, ascending
    stages: Int64  # pipeline stage of each rank, or what stands for it (program.class_of)
    measured_ns: Int64  # of each step, mean over the ranks
    replayed_ns: Int64  # of each step, with the measured durations
    table: WorkTable
    pauses_ns: Mapping[str, Int64]  # by cause (PAUSES), shape (ranks, steps)
    transfers: TransferTable
    between: BetweenSteps
    halvings: int = 0  # of the set of steps

    @classmethod
    def of(
        cls,
        run: Run,
        program: Program,
        work: WorkTable | None = None,
        transfers: TransferTable | None = None,
        around: Run | None = None,
        replayed_ns: Int64 | None = None,
    ) -> StepStatistics:
        """Return the statistics of a program read from ``run``.

        ``work``, ``transfers`` and ``replayed_ns`` are its own, if known; ``around`` also has the rows between its
        steps.
        """
        segments = program.segments
        shape = len(program.ranks), len(program.steps)
        cell = np.searchsorted(program.ranks, segments.rank) * shape[1] + segments.step

        def by_step(values_ns: Int64) -> Int64:
            return np.bincount(cell, values_ns, minlength=shape[0] * shape[1]).astype(np.int64).reshape(shape)

        return cls(
            ranks=program.ranks,
            steps=program.steps,
            stages=np.array([class_of(run.ranks[rank]) for rank in program.ranks.tolist()], np.int64),
            measured_ns=program.measured_step_times(),
            replayed_ns=program.step_times() if replayed_ns is None else replayed_ns,
            table=WorkTable.of(segments) if work is None else work,
            pauses_ns={cause: by_step(pause_ns(segments, cause)) for cause in PAUSES},
            transfers=TransferTable.of(run, program.transfers) if transfers is None else transfers,
            between=BetweenSteps.of(run if around is None else around, program),
        )

    @classmethod
    def joined(cls, parts: Sequence[StepStatistics]) -> StepStatistics:
        """Return the statistics of the steps of all parts, which are of the same ranks and drawn alike."""
        first, *others = parts
        if not others:
            return first
        first_step = np.cumsum([0, *(len(part.steps) for part in parts)])[:-1].tolist()
        return cls(
            ranks=first.ranks,
            steps=np.concatenate([part.steps for part in parts]),
            stages=first.stages,
            measured_ns=np.concatenate([part.measured_ns for part in parts]),
            replayed_ns=np.concatenate([part.replayed_ns for part in parts]),
            table=WorkTable.joined([part.table for part in parts], first_step),
            pauses_ns={cause: np.hstack([part.pauses_ns[cause] for part in parts]) for cause in PAUSES},
            transfers=TransferTable.joined([part.transfers for part in parts], first_step),
            between=BetweenSteps.joined([part.between for part in parts]),
            halvings=first.halvings,
        )

    @property
    def num_rows(self) -> int:
        return len(self.table) + len(self.transfers)

    def by_rank_and_step(self, values: Int64 | Float64) -> Float64:
        """Return sums of a column of the table, shape (ranks, steps)."""
        table, steps = self.table, len(self.steps)
        cell = (np.searchsorted(self.ranks, table.entries.rank) * steps)[table.entry] + table.step
        sums = np.bincount(cell, values, minlength=len(self.ranks) * len(self.steps))
        return np.asarray(sums.reshape(-1, len(self.steps)), np.float64)

    def typical_work_ns(self, work_ns: Float64, slow: Collection[int] = ()) -> Float64:
        """Return the median of the ranks of each rank's stage, in each step; NaN for a rank that is alone in it.

        ``work_ns`` and the result have the shape (ranks, steps). Ranks in ``slow`` are not typical, unless all of
        their stage are.
        """
        typical = np.full_like(work_ns, np.nan)
        is_slow = np.isin(self.ranks, list(slow))
        for stage in np.unique(self.stages):
            in_stage = self.stages == stage
            if np.count_nonzero(in_stage) > 1:
                normal = in_stage & ~is_slow
                typical[in_stage] = np.median(work_ns[normal if normal.any() else in_stage], axis=0)
        return typical

    def drawn(self, halvings: int) -> Bool:
        """Return a mask of the steps that are drawn with so many halvings of the set of steps."""
        # The upper bits of the product keep the same share of steps with a period (checkpoints, say) as of all.
        return np.asarray((self.steps * _GOLDEN) % 2**32 < 2 ** (32 - halvings))

    def halved(self, halvings: int) -> StepStatistics:
        """Return the steps that are drawn with so many halvings of the set of steps."""
        if halvings == self.halvings:
            return self
        chosen = self.drawn(halvings)
        return replace(
            self,
            steps=self.steps[chosen],
            measured_ns=self.measured_ns[chosen],
            replayed_ns=self.replayed_ns[chosen],
            table=self.table.of_steps(chosen),
            pauses_ns={cause: durations[:, chosen] for cause, durations in self.pauses_ns.items()},
            transfers=self.transfers.of_steps(chosen),
            between=self.between.of_steps(chosen),
            halvings=halvings,
        )


@dataclass(frozen=True, slots=True)
class StatisticsParts:
    """Statistics of consecutive parts of a run, joined only at the end: each join copies all of them.

    Of a long run, steps are drawn by their number so that memory does not grow: all, then about every second one, ….
    """

    parts: tuple[StepStatistics, ...]

    @classmethod
    def of(
        cls,
        run: Run,
        program: Program,
        work: WorkTable | None = None,
        transfers: TransferTable | None = None,
        around: Run | None = None,
        replayed_ns: Int64 | None = None,
    ) -> StatisticsParts:
        """Return the statistics of a program; arguments are those of :meth:`StepStatistics.of`."""
        return cls((StepStatistics.of(run, program, work, transfers, around, replayed_ns),))._drawn()

    def __add__(self, later: StatisticsParts) -> StatisticsParts:
        """Return the statistics of these steps and of later ones of the same ranks."""
        return StatisticsParts(self.parts + later.parts)._drawn()

    def joined(self) -> StepStatistics:
        return StepStatistics.joined(self.parts)

    def _drawn(self) -> StatisticsParts:
        """Return these with steps halved until they have few enough rows."""
        halvings = max(part.halvings for part in self.parts)
        parts = tuple(part.halved(halvings) for part in self.parts)
        # All are in memory twice when they are joined: what is drawn leaves room for what else grows with a run.
        while sum(part.num_rows for part in parts) > (MOST_ROWS // 2 if halvings else MOST_ROWS):
            halvings += 1
            if sum(np.count_nonzero(part.drawn(halvings)) for part in parts) < FEWEST_STEPS:
                break
            parts = tuple(part.halved(halvings) for part in parts)
        return StatisticsParts(parts)


def pause_ns(segments: WorkSegments, cause: str) -> Int64:
    return {
        DATA: segments.data_ns,
        GC: segments.gc_ns,
        CHECKPOINT: segments.checkpoint_ns,
        EVALUATION: segments.evaluation_ns,
    }[cause]
