"""The model of recorded steps: a few shapes, and for each step a column of durations. It is kept while a run is read.

Nearly all steps of a job have the same work, transfers and order, which are held once. So the model has a tenth of the
size of the program that it is made of, and replays all steps of a shape at once.

>>> ObservedSteps.of(run, program).step_ns()  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import find_rows, pack
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.replay.graph import Levels, ReplayGraph
from commtrace.analysis.replay.program import Program, build_program
from commtrace.analysis.replay.segments import BACKWARD, FORWARD
from commtrace.analysis.replay.step_statistics import (
    Entries,
    LinkTraffic,
    StepStatistics,
    TransferKind,
    TransferTable,
    WorkTable,
    pause_ns,
)
from commtrace.findings.causes import PAUSES
from commtrace.trace.blocks import bounds_of
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64

Integers = npt.NDArray[np.integer]


class WaitsBetweenStages(NamedTuple):
    """What of a program belongs to the messages of a pipeline."""

    stalls: Bool
    transfers: Bool

    @classmethod
    def none(cls, program: Program) -> WaitsBetweenStages:
        return cls(np.zeros(len(program.stalls), np.bool_), np.zeros(len(program.transfers), np.bool_))


class Places(NamedTuple):
    """Ranks, steps and kinds of work and transfers, by their indices in a model or in the statistics of a run."""

    ranks: Int64
    steps: Int64
    entries: Entries
    traffic: tuple[LinkTraffic, ...]
    kinds: tuple[TransferKind, ...]

    @classmethod
    def of(cls, statistics: StepStatistics) -> Places:
        transfers = statistics.transfers
        return cls(statistics.ranks, statistics.steps, statistics.table.entries, transfers.traffic, transfers.kinds)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Work of some steps, by row and column, with indices into the statistics of the run.

    What is alike in all columns has only one; what is alike in all rows, only one row.
    """

    rank: Integers  # number
    row: Int32  # of the rank
    step: Int32
    entry: Int32  # −1 for none, as for all that follows
    stage: Int32
    chunk: Int32
    microbatch: Int32
    kind: Int32
    total_ns: Int64
    pauses_ns: Mapping[str, Integers]  # without causes that took no time
    launch_bound_ns: Integers

    @property
    def is_in_phase(self) -> Bool:
        return np.isin(self.kind, (FORWARD, BACKWARD))

    @property
    def work_ns(self) -> Int64:
        """Return the durations without pauses."""
        work = self.total_ns
        for ns in self.pauses_ns.values():
            work = work - ns
        return work

    def pause_ns(self, cause: str) -> Integers | int:
        """Return the time of the pauses of this cause in each work."""
        return self.pauses_ns.get(cause, 0)


@dataclass(frozen=True, slots=True)
class ModelTransfers:
    """Transfers of some steps, by row and column, with indices into the statistics; see :class:`ModelWork`."""

    row: Int32  # of the traffic; −1 for none
    kind: Int32  # −1 for none
    rank: Int32
    step: Int32
    ns: Integers
    is_of_pipeline: Bool


class _StallNodesOfPipeline(NamedTuple):
    """Stalls on the messages of a pipeline, by the nodes that bound them in a replay."""

    rank: Int32  # index
    node: Int32  # end of the stall
    before: Int32  # node before the work behind which it begins
    first_piece: Int32  # of this work
    end_piece: Int32
    join: Int32  # start of the last participant; −1 if the stall did not depend on others


@dataclass(frozen=True, slots=True)
class StepsOfOneShape:
    """Steps of one shape, one column each; or all steps that are like no other one, side by side in a single column.

    Nodes and edges are in the order of the replay.
    """

    levels: Levels
    first_piece: Int32  # of the work on each edge
    end_piece: Int32
    transfer_edge: Int32  # edges with a transfer
    fixed_edge: Int32  # edges that take time besides in any column
    first_node: Int32  # of each rank, shape (ranks, steps side by side)
    last_node: Int32
    stalls: _StallNodesOfPipeline
    first_of_work: Int32  # the first piece of each work
    step_of_work: Int32  # among those side by side; a single number if there is only one
    step_of_transfer: Int32

    steps: Int32  # indices, shape (steps side by side, columns), as of all that follows
    fixed_ns: Integers
    piece_ns: Integers
    rank: Int32  # index, of work
    entry: Int32
    microbatch: Int32
    pauses_ns: Mapping[str, Integers]
    launch_bound_ns: Integers
    traffic: Int32  # of the transfer on each such edge
    kind: Int32
    transfer_rank: Int32
    is_of_pipeline: Bool
    transfer_ns: Integers
    start_ns: Int64  # as recorded, shape (ranks, steps side by side, columns)
    between_ns: Int64  # from the end of the step before, mean over the ranks, shape like ``steps``

    @property
    def num_bytes(self) -> int:
        arrays = [getattr(self, field.name) for field in fields(self)]
        columns = [
            column for column in (*arrays, *self.stalls, *self.pauses_ns.values()) if isinstance(column, np.ndarray)
        ]
        return sum(int(column.nbytes) for column in columns) + self.levels.num_bytes

    @property
    def total_ns(self) -> Int64:
        """Return the duration of work with its pauses."""
        if len(self.first_of_work) == len(self.piece_ns):
            return self.piece_ns.astype(np.int64)
        return np.add.reduceat(self.piece_ns, self.first_of_work, axis=0, dtype=np.int64)

    def work(self, index: ObservedIndex) -> ModelWork:
        """Return the measured work, placed in the statistics of the run."""
        entry = index.entry[self.entry]
        stage, chunk, kind = (column[self.entry] for column in (index.own.stage, index.own.chunk, index.own.kind))
        return ModelWork(
            rank=index.ranks[self.rank],
            row=index.rank[self.rank],
            step=index.step[self.steps][self.step_of_work],
            entry=entry,
            stage=stage,
            chunk=chunk,
            microbatch=self.microbatch,
            kind=kind,
            total_ns=self.total_ns,
            pauses_ns=self.pauses_ns,
            launch_bound_ns=self.launch_bound_ns,
        )

    def transfers(self, index: ObservedIndex) -> ModelTransfers:
        """Return the measured transfers, placed in the statistics of the run."""
        return ModelTransfers(
            row=index.traffic[self.traffic],
            kind=index.kind[self.kind],
            rank=index.rank[self.transfer_rank],
            step=index.step[self.steps][self.step_of_transfer],
            ns=self.transfer_ns,
            is_of_pipeline=self.is_of_pipeline,
        )

    def sums_of_work(self, ns: Int64) -> Int64:
        """Return the sum of the work of each step, shape like ``steps``."""
        if len(self.steps) == 1:
            return np.asarray(ns.sum(axis=0, keepdims=True))
        # float64 sums are exact here: they stay far below 2⁵³ ns, which is 104 days.
        return np.bincount(self.step_of_work, ns[:, 0], len(self.steps)).astype(np.int64)[:, np.newaxis]

    @property
    def num_weights(self) -> int:
        return len(self.first_piece) * int(self.steps.shape[1])

    def weights(self, pieces_before: Int64, transfer_ns: Integers, *, fixed: bool = True) -> Int64:
        """Return the weight of each edge, shape (edges, columns); without ``fixed``, of work and transfers only.

        ``pieces_before`` is of :meth:`worked_before`.
        """
        weights = pieces_before[self.end_piece]
        weights -= pieces_before[self.first_piece]
        weights[self.transfer_edge] += transfer_ns
        if fixed:
            weights[self.fixed_edge] += self.fixed_ns
        return weights

    def worked_before(self, work_ns: Int64 | None) -> Int64:
        """Return the working time before each piece, and in all, with these durations of work (None: as measured)."""
        pieces: npt.NDArray[np.integer] = self.piece_ns
        if work_ns is not None:
            length = np.diff(np.append(self.first_of_work, len(self.piece_ns)))
            scaled = np.repeat(work_ns / np.maximum(self.total_ns, 1), length, axis=0)
            scaled *= self.piece_ns
            pieces = np.rint(scaled, out=scaled).astype(np.int64)
        before = np.zeros((len(pieces) + 1, pieces.shape[1]), np.int64)
        np.cumsum(pieces, axis=0, dtype=np.int64, out=before[1:])
        return before

    def step_ns(self, times: Int64) -> Int64:
        """Return the length of the steps, up to the latest end of all ranks; shape like ``steps``."""
        ns = times[self.last_node].max(axis=0)
        return np.asarray(ns + np.tile(self.between_ns, ns.shape[1] // self.steps.shape[1]))

    def waits_between_stages(self, work_ns: Int64 | None, transfer_ns: Integers) -> Int64:
        """Return how long each stall on a message of a pipeline lasted before the last participant started.

        Steps start as measured; ``work_ns`` is None for the measured work.
        """
        stalls, before = self.stalls, self.worked_before(work_ns)
        origins = np.zeros((self.levels.num_nodes, self.steps.shape[1]), np.int64)
        origins[self.first_node] = self.start_ns
        times = self.levels.times(self.weights(before, transfer_ns), origins)
        begin = times[stalls.before] + (before[stalls.end_piece] - before[stalls.first_piece])
        ready = np.where((stalls.join >= 0)[:, np.newaxis], times[stalls.join], begin)
        return np.asarray(np.maximum(np.minimum(ready, times[stalls.node]) - begin, 0))


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """Some steps of a run, ready to be replayed with other durations."""

    ranks: Int64  # numbers, ascending
    steps: Int64  # numbers, ascending
    measured_ns: Int64  # of each step, mean over the ranks
    entries: Entries
    traffic: tuple[LinkTraffic, ...]
    kinds: tuple[TransferKind, ...]
    parts: tuple[StepsOfOneShape, ...]

    @classmethod
    def of(
        cls,
        run: Run,
        program: Program,
        work: WorkTable | None = None,
        transfers: TransferTable | None = None,
        between: WaitsBetweenStages | None = None,
    ) -> ObservedSteps:
        """Return the model of a program that was read from ``run``; ``work`` and ``transfers`` are its own, if known.

        Without ``between``, nothing is known of waits for other stages.
        """
        work = WorkTable.of(program.segments) if work is None else work
        transfers = TransferTable.of(run, program.transfers) if transfers is None else transfers
        between = WaitsBetweenStages.none(program) if between is None else between
        return cls(
            ranks=program.ranks,
            steps=program.steps,
            measured_ns=program.measured_step_times(),
            entries=work.entries,
            traffic=transfers.traffic,
            kinds=transfers.kinds,
            parts=tuple(_ProgramBySteps.of(program, work, transfers, between).parts()),
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) + sum(column.nbytes for column in self.entries)

    def index_in(self, places: Places) -> ObservedIndex:
        """Return where its ranks, steps and kinds of work and transfers are in the statistics of the run."""
        return ObservedIndex.of(Places(self.ranks, self.steps, self.entries, self.traffic, self.kinds), places)

    @property
    def between_ns(self) -> int:
        """Return the time between the steps, which no replay changes: the mean over ranks, summed over steps."""
        return sum(int(part.between_ns.sum()) for part in self.parts)

    def step_ns(self) -> Int64:
        """Return the duration of each step with the measured durations: the latest end after a common start."""
        step_ns = np.zeros(len(self.steps), np.int64)
        for part in self.parts:
            weights = part.weights(part.worked_before(None), part.transfer_ns)
            step_ns[part.steps] = part.step_ns(part.levels.times(weights))
        return step_ns


class ObservedProgram(NamedTuple):
    """All steps of a run that is in memory: their program, their model, and their statistics."""

    program: Program
    steps: ObservedSteps
    statistics: StepStatistics

    @classmethod
    def of(cls, run: Run, matches: Matches, around: Run | None = None) -> ObservedProgram:
        """Read the steps that every rank recorded; ``around`` also has the rows between them.

        Raises:
            ReplayError: there are none, or they cannot be replayed.
        """
        program = build_program(run, matches)
        work, transfers = WorkTable.of(program.segments), TransferTable.of(run, program.transfers)
        steps = ObservedSteps.of(run, program, work, transfers)
        return cls(program, steps, StepStatistics.of(run, program, work, transfers, around, steps.step_ns()))


class ObservedIndex(NamedTuple):
    """Where the ranks, steps, entries, traffic and kinds of a model are in the statistics; −1 for none."""

    ranks: Int64  # numbers of those of the model
    rank: Int32
    step: Int32
    entry: Int32
    traffic: Int32
    kind: Int32
    own: Entries  # of the model

    @classmethod
    def of(cls, model: Places, statistics: Places) -> ObservedIndex:
        step = np.minimum(np.searchsorted(statistics.steps, model.steps), len(statistics.steps) - 1)
        return cls(
            model.ranks,
            np.searchsorted(statistics.ranks, model.ranks).astype(np.int32),
            step.astype(np.int32),
            find_rows(statistics.entries, model.entries).astype(np.int32),
            _numbers_in(statistics.traffic, model.traffic),
            _numbers_in(statistics.kinds, model.kinds),
            model.entries,
        )


def _numbers_in(known: tuple[NamedTuple, ...], keys: tuple[NamedTuple, ...]) -> Int32:
    """Return the index of each key among the known, −1 for none, and −1 at the end for index −1."""
    number = {key: at for at, key in enumerate(known)}
    return np.array([*(number.get(key, -1) for key in keys), -1], np.int32)


class _ItemsByStep(NamedTuple):
    """Items of a program by step."""

    order: Int32  # numbers of the items, by step
    bounds: list[int]  # of the steps
    within: Int32  # the number of each item within its step

    @classmethod
    def of(cls, step: Integers, num_steps: int, key: Sequence[Integers] = ()) -> _ItemsByStep:
        """Return the items of each step in the order of ``key``, else as they are."""
        order = np.argsort(pack((step, *key)), kind="stable").astype(np.int32)
        bounds = bounds_of(np.bincount(step, minlength=num_steps))
        within = np.empty(len(step), np.int32)
        within[order] = np.arange(len(step)) - np.repeat(bounds[:-1], np.diff(bounds))
        return cls(order, bounds.tolist(), within)

    def of_steps(self, steps: Sequence[int]) -> Int32:
        return np.concatenate([self.order[self.bounds[step] : self.bounds[step + 1]] for step in steps])

    def columns(self, columns: Sequence[Sequence[int]]) -> Int32:
        """Return the items, shape (items, columns); each column has these steps side by side."""
        return np.stack([self.of_steps(steps) for steps in columns], axis=1)

    def local(self, column: Sequence[int]) -> Int32:
        """Return the number of each item among those of these steps; of other items, any."""
        items = self.of_steps(column)
        number = np.zeros(len(self.order) + 1, np.int32)
        number[items] = np.arange(len(items))
        number[-1] = -1
        return number


@dataclass(frozen=True, slots=True)
class _ProgramBySteps:
    """A program divided into its steps."""

    program: Program
    work: WorkTable
    table: TransferTable
    between: WaitsBetweenStages
    nodes: _ItemsByStep
    edges: _ItemsByStep
    pieces: _ItemsByStep
    segments: _ItemsByStep
    stalls: _ItemsByStep  # on messages of a pipeline
    stall: Int64  # the number of each of these in the program
    first_piece: Int32  # of the work on each edge; 0, as the end, without any
    end_piece: Int32
    transfer: Int32  # on each edge; −1 for none

    @classmethod
    def of(
        cls, program: Program, work: WorkTable, table: TransferTable, between: WaitsBetweenStages
    ) -> _ProgramBySteps:
        steps, edges, stalls = len(program.steps), program.edges, program.stalls
        first, end = np.zeros((2, len(edges)), np.int32)
        works = np.flatnonzero(edges.end_piece > edges.first_piece)
        first[works], end[works] = edges.first_piece[works], edges.end_piece[works]
        transfer = np.full(len(edges), -1, np.int32)
        transfer[len(edges) - len(edges.transfer) :] = edges.transfer
        step_of_node = program.step_of_node
        nodes = _ItemsByStep.of(step_of_node, steps)
        stall = np.flatnonzero(between.stalls)
        return cls(
            program=program,
            work=work,
            table=table,
            between=between,
            nodes=nodes,
            edges=_ItemsByStep.of(
                step_of_node[edges.source], steps, (nodes.within[edges.source], nodes.within[edges.target])
            ),
            pieces=_ItemsByStep.of(program.segments.step[program.piece_segment], steps),
            segments=_ItemsByStep.of(program.segments.step, steps),
            stalls=_ItemsByStep.of(stalls.step[stall], steps),
            stall=stall,
            first_piece=first,
            end_piece=end,
            transfer=transfer,
        )

    def parts(self) -> Iterator[StepsOfOneShape]:
        """Yield the steps of each shape, and at last those that are like no other one."""
        alike: dict[bytes, list[int]] = {}
        for step, digest in enumerate(self._digests()):
            alike.setdefault(digest, []).append(step)
        for steps in alike.values():
            if len(steps) > 1:
                yield self._part([[step] for step in steps])
        others = [steps[0] for steps in alike.values() if len(steps) == 1]
        if others:
            yield self._part([others])

    def _digests(self) -> Iterator[bytes]:
        """Yield a digest of the shape of each step: equal ones can be columns of one part."""
        program, edges, stalls = self.program, self.program.edges, self.program.stalls
        node, piece = self.nodes.within, self.pieces.within
        edge, in_step, stall = self.edges.order, self.pieces.order, self.stall[self.stalls.order]
        lane_edge = stalls.lane_edge[stall]
        join = stalls.join_node[stall]
        columns: list[tuple[_ItemsByStep, tuple[npt.NDArray[Any], ...]]] = [
            (
                self.edges,
                (
                    node[edges.source[edge]],
                    node[edges.target[edge]],
                    np.where(self.end_piece > 0, np.append(piece, np.int32(0))[self.first_piece], 0)[edge],
                    (self.end_piece - self.first_piece)[edge],
                    (self.transfer >= 0)[edge],
                ),
            ),
            (self.pieces, (self.segments.within[program.piece_segment[in_step]],)),
            (
                self.stalls,
                (
                    node[stalls.node[stall]],
                    node[edges.source[lane_edge]],
                    np.where(join >= 0, node[join], -1),
                    stalls.rank[stall],
                ),
            ),
        ]
        for step in range(len(program.steps)):
            digest = hashlib.blake2b(digest_size=16)
            digest.update((self.nodes.bounds[step + 1] - self.nodes.bounds[step]).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(node[program.first_node[:, step]]).data)
            digest.update(np.ascontiguousarray(node[program.last_node[:, step]]).data)
            for items, of_items in columns:
                for column in of_items:
                    of_step = column[items.bounds[step] : items.bounds[step + 1]]
                    digest.update(len(of_step).to_bytes(8, "little"))
                    digest.update(np.ascontiguousarray(of_step, np.int32).data)
            yield digest.digest()

    def _part(self, columns: Sequence[Sequence[int]]) -> StepsOfOneShape:
        """Return the steps of some columns, which are alike."""
        program, edges, stalls, segments = self.program, self.program.edges, self.program.stalls, self.program.segments
        first_column = columns[0]
        node, piece = (items.local(first_column) for items in (self.nodes, self.pieces))
        first_edges, first_nodes = (items.of_steps(first_column) for items in (self.edges, self.nodes))
        graph = ReplayGraph.from_edges(
            len(first_nodes), node[edges.source[first_edges]], node[edges.target[first_edges]]
        )
        position = np.empty(len(first_nodes) + 1, np.int32)  # in the order of the replay
        position[graph.order.nodes] = np.arange(len(first_nodes))
        position[-1] = -1
        edge = first_edges[graph.order.edges]
        of_edges = self.edges.columns(columns)[graph.order.edges]
        fixed_ns = edges.fixed_ns[of_edges]
        fixed_edge = np.flatnonzero(fixed_ns.any(axis=1)).astype(np.int32)
        transfer_edge = np.flatnonzero(self.transfer[edge] >= 0).astype(np.int32)
        of_transfers = self.transfer[of_edges[transfer_edge]]
        stall = self.stall[self.stalls.of_steps(first_column)]
        lane_edge = stalls.lane_edge[stall]
        of_work, of_pieces = self.segments.columns(columns), self.pieces.columns(columns)
        steps = np.array(columns, np.int32).T
        piece_segment = program.piece_segment[of_pieces[:, 0]]
        number = np.zeros(int(program.steps.size), np.int32)
        number[steps[:, 0]] = np.arange(len(steps))
        is_single = len(steps) == 1

        def ends(first: Int32, end: Int32) -> tuple[Int32, Int32]:
            begin = np.where(end > first, piece[first], 0)
            return begin, begin + (end - first)

        first_piece, end_piece = ends(self.first_piece[edge], self.end_piece[edge])
        stall_first, stall_end = ends(self.first_piece[lane_edge], self.end_piece[lane_edge])
        ns = {cause: pause_ns(segments, cause)[of_work] for cause in PAUSES}
        rank_of_work, rank_of_transfer = (
            np.searchsorted(program.ranks, items.rank).astype(np.int32) for items in (segments, program.transfers)
        )
        return StepsOfOneShape(
            levels=graph.levels,
            first_piece=first_piece,
            end_piece=end_piece,
            transfer_edge=transfer_edge,
            fixed_edge=fixed_edge,
            first_node=position[node[program.first_node[:, first_column]]],
            last_node=position[node[program.last_node[:, first_column]]],
            stalls=_StallNodesOfPipeline(
                rank=np.searchsorted(program.ranks, stalls.rank[stall]).astype(np.int32),
                node=position[node[stalls.node[stall]]],
                before=position[node[edges.source[lane_edge]]],
                first_piece=stall_first,
                end_piece=stall_end,
                join=np.where(stalls.join_node[stall] >= 0, position[node[stalls.join_node[stall]]], np.int32(-1)),
            ),
            first_of_work=np.flatnonzero(np.diff(piece_segment, prepend=-1)).astype(np.int32),
            step_of_work=np.zeros(1, np.int32) if is_single else number[segments.step[of_work[:, 0]]],
            step_of_transfer=np.zeros(1, np.int32) if is_single else number[program.transfers.step[of_transfers[:, 0]]],
            steps=steps,
            fixed_ns=_compact(fixed_ns[fixed_edge]),
            piece_ns=_compact(program.piece_ns[of_pieces], keeps_columns=True),
            rank=_compact(rank_of_work[of_work]),
            entry=_compact(self.work.entry[of_work]),
            microbatch=_compact(segments.microbatch[of_work]),
            pauses_ns={cause: _compact(durations) for cause, durations in ns.items() if durations.any()},
            launch_bound_ns=_compact(segments.launch_bound_ns[of_work]),
            traffic=_compact(self.table.row[of_transfers]),
            kind=_compact(self.table.kind[of_transfers]),
            transfer_rank=_compact(rank_of_transfer[of_transfers]),
            is_of_pipeline=_compact(self.between.transfers[of_transfers]),
            transfer_ns=_compact(program.transfers.ns[of_transfers], keeps_columns=True),
            start_ns=program.start_ns[:, steps],
            between_ns=program.between_step_times()[steps],
        )


_NARROW = np.iinfo(np.int32)


def _compact(values: npt.NDArray[Any], *, keeps_columns: bool = False) -> npt.NDArray[Any]:
    """Return the same with less memory: a single column if all are alike, and 32 bits if these hold all numbers."""
    if not keeps_columns and values.shape[1] > 1 and (values == values[:, :1]).all():
        values = values[:, :1].copy()
    if values.dtype == np.int64 and values.size and _NARROW.min <= values.min() and values.max() <= _NARROW.max:
        return values.astype(np.int32)
    return values
