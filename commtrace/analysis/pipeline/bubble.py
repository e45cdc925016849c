"""The bubble of each pipeline stage, by phase of the schedule and by cause.

Measured is each stall on pipeline P2P before its last participant arrived. For the causes, the step is replayed with
ever more ideal durations: ``p2p`` is the bubble that zero transfers remove (at least 0), ``variation`` that of mean
forwards and backwards per stage, ``imbalance`` that of equal stages. ``schedule`` is the rest, which only another
schedule or more microbatches can remove. They add up to the measured bubble.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.keys import find_rows, grouped, numbered, pack
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.roles import PIPELINE, Roles, between_stages_of
from commtrace.analysis.replay.ideal import Ideal
from commtrace.analysis.replay.observed_steps import ObservedSteps
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run, told_stage
from commtrace.trace.spans import Int32, Int64


@dataclass(frozen=True, slots=True)
class StageBubble:
    """One pipeline stage, ns per step: means over its ranks and the steps."""

    stage: int
    ranks: tuple[int, ...]
    forward_ns: int  # a single one, without stalls on other stages
    backward_ns: int  # likewise; that of inputs and that of weights count as one
    work_ns: int
    wall_ns: int
    bubble_ns: int  # stalls on other stages; both the phases and the causes add up to it
    warm_up_ns: int  # before the first backward
    steady_ns: int  # until the end of the last forward
    cool_down_ns: int  # after it
    schedule_ns: int | None  # the causes are None if the run cannot be replayed
    imbalance_ns: int | None
    variation_ns: int | None
    p2p_ns: int | None
    transfer_ns: int  # stalls on pipeline P2P after the last participant arrived
    drain_ns: int  # other stalls after its own last backward, until that of the whole pipeline
    unmatched_ns: int = 0  # stalls on P2P with an unrecorded side: transfer, but part may be bubble
    left_out: tuple[int, ...] = ()  # other ranks of the stage, with too much unmatched
    phase_ns: int = 0  # first forward to last backward of any stage

    def to_json(self) -> JsonObject:
        """Return the fields, without unknown causes."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {**known, "ranks": list(self.ranks), "left_out": list(self.left_out)}


_FEW: Final = 0.05
"""Largest unmatched share of a rank's waits for other stages."""


_NEVER: Final = -(2**62)
"""Before every reading of a clock; differences with it still fit in 64 bits."""


@dataclass(frozen=True, slots=True)
class RankWaits:
    """Sums over steps of one rank of a pipeline, ns; those of several windows add up."""

    stage: int | None  # None if neither the framework nor a forward says
    num_steps: int
    chunks: int  # of its forwards; 0 without any
    forwards: int
    backwards: int  # that of inputs and that of weights count as one
    forward_ns: int
    backward_ns: int
    work_ns: int
    wall_ns: int
    phase_ns: int
    warm_up_ns: int
    steady_ns: int
    cool_down_ns: int
    transfer_ns: int
    drain_ns: int
    unmatched_ns: int

    def __add__(self, later: RankWaits) -> RankWaits:
        sums = {field.name: getattr(self, field.name) + getattr(later, field.name) for field in fields(self)[3:]}
        return RankWaits(
            stage=later.stage if self.stage is None else self.stage,
            num_steps=self.num_steps + later.num_steps,
            chunks=max(self.chunks, later.chunks),
            **sums,
        )

    @property
    def is_known(self) -> bool:
        """Return whether the other sides of nearly all of its waits for other stages were seen."""
        return self.unmatched_ns <= _FEW * (self.warm_up_ns + self.steady_ns + self.cool_down_ns + self.transfer_ns)

    def per_step(self, name: str) -> float:
        """Return one of its times per step."""
        return float(getattr(self, name) / max(self.num_steps, 1))


def measure_waits(run: Run, matches: Matches, roles: Roles) -> dict[int, RankWaits]:
    """Return the work of each rank of a pipeline, and its waits for other stages."""
    replicas = {rank: _replica(trace) for rank, trace in run.ranks.items()}
    phases = _PhasesOfPipelines.of(run, replicas)
    measured: dict[int, RankWaits] = {}
    for block in run.blocks:
        measured.update(_measure(run, block, matches, roles, replicas, phases))
    return measured


def bubbles_of_stages(ranks: Mapping[int, RankWaits], causes: Mapping[int, BubbleCause]) -> list[StageBubble]:
    """Return the stages of a pipeline, ascending; without causes, only the measured fields."""
    stages: dict[int, list[int]] = {}
    for rank, waits in ranks.items():
        stages.setdefault(waits.stage or 0, []).append(rank)
    return [_stage(stage, stages[stage], ranks, causes) for stage in sorted(stages)]


class BubbleCause(NamedTuple):
    """Bubble of one rank, ns summed over the replayed steps, with ever more ideal durations."""

    steps: int
    without_transfers: float
    with_means: float
    with_equal_stages: float
    as_replayed: float


@dataclass(frozen=True, slots=True)
class BubbleCauses:
    """The replayed bubble of each rank. Those of several windows of a run add up."""

    ranks: Mapping[int, BubbleCause]

    def __add__(self, later: BubbleCauses) -> BubbleCauses:
        pairs = {rank: zip(cause, later.ranks[rank], strict=True) for rank, cause in self.ranks.items()}
        return BubbleCauses(
            {rank: BubbleCause._make(earlier + more for earlier, more in pair) for rank, pair in pairs.items()}
        )


def replayed_bubbles(observed: ObservedSteps, ideal: Ideal) -> BubbleCauses:
    """Replay the steps with ever more ideal durations."""
    waits_ns = np.zeros((len(BubbleCause._fields) - 1, len(observed.ranks)), np.int64)
    for part in observed.parts:
        mean_ns, equal_ns = ideal.of_work(observed.entries, part.entry, part.total_ns)
        measured_ns, of_pipeline = part.transfer_ns, part.is_of_pipeline
        no_p2p = np.where(of_pipeline, 0, measured_ns)
        typical = np.where(of_pipeline, 0, ideal.of_transfers(observed.kinds, part.kind, measured_ns))
        scenarios = ((None, no_p2p), (mean_ns, typical), (equal_ns, typical), (None, measured_ns))
        for row, (work_ns, transfer_ns) in zip(waits_ns, scenarios, strict=True):
            waits = part.waits_between_stages(work_ns, transfer_ns).sum(axis=1)
            np.add.at(row, part.stalls.rank, waits)
    return BubbleCauses(
        {
            rank: BubbleCause(len(observed.steps), *map(float, waits_ns[:, index].tolist()))
            for index, rank in enumerate(observed.ranks.tolist())
        }
    )


def _measure(
    run: Run,
    block: Block,
    matches: Matches,
    roles: Roles,
    replicas: Mapping[int, int],
    phases: _PhasesOfPipelines,
) -> dict[int, RankWaits]:
    """Return the work and the waits of the ranks of a block."""
    spans, kind, rank = block.spans, block.spans.kind, block.per_row(np.arange(len(block.ranks)))
    replica = np.array([replicas[member] for member in block.ranks], np.int64)
    stall_ready, stall_complete = (
        block.together({member: getattr(matches.ranks[member], column) for member in block.ranks})
        for column in ("stall_ready", "stall_complete")
    )
    steps = np.flatnonzero(kind == schema.STEP)
    turns = _TurningPoints.of(block)
    stalls = np.flatnonzero(kind == schema.STALL)
    stalls = stalls[np.isin(turns.cell[stalls], turns.cell[steps])]
    start, end, ready, cell = spans.start[stalls], spans.end[stalls], stall_ready[stalls], turns.cell[stalls]
    wait = np.clip(ready, start, end) - start
    between = between_stages_of(run, block, roles)[stalls]
    warm_up = between & (start < turns.first_backward[cell])
    cool_down = between & ~warm_up & (start >= turns.last_forward[cell])
    steady = between & ~warm_up & ~cool_down
    unmatched = between & ~stall_complete[stalls]

    draining = ~between & (start >= turns.last_backward[cell])
    _, until = phases.find(replica[rank[stalls[draining]]], spans.step[stalls[draining]])
    drain = np.minimum(ready[draining], until) - start[draining]
    phase_start, phase_end = phases.find(replica[rank[steps]], spans.step[steps])

    is_forward = kind == schema.FORWARD
    worked = np.flatnonzero(is_forward | (kind == schema.BACKWARD))
    is_forward = is_forward[worked]
    forward, backward = worked[is_forward], worked[~is_forward]
    own_ns, work_ns = _without_waits(block, worked, stalls[between])
    whole = backward[spans.name[backward] != run.name_code("backward_weight")]  # each completes one of inputs
    chunks = np.zeros(len(block.ranks), np.int64)
    np.maximum.at(chunks, rank[forward], np.maximum(spans.chunk[forward] + 1, 1))

    def total(rows: Int64, ns: Int64) -> list[int]:
        sums = np.zeros(len(block.ranks), np.int64)
        np.add.at(sums, rank[rows], ns)
        return [*map(int, sums)]

    def count(rows: Int64) -> list[int]:
        return [*map(int, np.bincount(rank[rows], minlength=len(block.ranks)))]

    columns = zip(  # in the order of the fields of RankWaits
        [told_stage(run.ranks[member]) for member in block.ranks],
        count(steps),
        chunks.tolist(),
        count(forward),
        count(whole),
        total(forward, own_ns[is_forward]),
        total(backward, own_ns[~is_forward]),
        total(worked, work_ns),
        total(steps, spans.end[steps] - spans.start[steps]),
        total(steps, phase_end - phase_start),
        total(stalls[warm_up], wait[warm_up]),
        total(stalls[steady], wait[steady]),
        total(stalls[cool_down], wait[cool_down]),
        total(stalls[between], (end - start - wait)[between]),
        total(stalls[draining], np.maximum(drain, 0)),
        total(stalls[unmatched], (end - start)[unmatched]),
        strict=True,
    )
    return {member: RankWaits(*values) for member, values in zip(block.ranks, columns, strict=True)}


class _TurningPoints(NamedTuple):
    """The turns of a schedule, ns, in every *cell*: a step of a rank."""

    cell: Int64  # of each row; rows outside of any step of a rank have one too
    first_forward: Int64  # start; the largest number without one, as for the others
    last_forward: Int64  # end
    first_backward: Int64  # start
    last_backward: Int64  # end

    @classmethod
    def of(cls, block: Block) -> _TurningPoints:
        spans = block.spans
        number = numbered(spans.step)
        num_steps = int(number.max(initial=0)) + 1
        cell = block.per_row(np.arange(len(block.ranks)) * num_steps) + number
        forward, backward = (np.flatnonzero(spans.kind == kind) for kind in (schema.FORWARD, schema.BACKWARD))
        most = np.iinfo(np.int64)

        def first(rows: Int64) -> Int64:
            starts = np.full(len(block.ranks) * num_steps, most.max)
            np.minimum.at(starts, cell[rows], spans.start[rows])
            return starts

        def last(rows: Int64) -> Int64:
            ends = np.full(len(block.ranks) * num_steps, most.max)
            ends[cell[rows]] = most.min
            np.maximum.at(ends, cell[rows], spans.end[rows])
            return ends

        return cls(cell, first(forward), last(forward), first(backward), last(backward))


def _replica(trace: RankTrace) -> int:
    """Return a number that ranks of one pipeline share: the rank of its first stage if known."""
    pipelines = [
        group.ranks[0] for group in trace.groups.values() if group.role == PIPELINE and trace.rank in group.ranks
    ]
    return min(pipelines) if pipelines else -1


class _PhasesOfPipelines(NamedTuple):
    """The first forward to the last backward of each pipeline in each step, ns."""

    replica: Int64
    step: Int64
    start: Int64
    end: Int64

    @classmethod
    def of(cls, run: Run, replicas: Mapping[int, int]) -> _PhasesOfPipelines:
        """Return the steps in which a rank has both forwards and backwards; ``replicas`` is by rank."""
        replica, step, start, end = np.concatenate([_phases_of_block(block, replicas) for block in run.blocks], axis=1)
        first, which = grouped(pack((replica, step)))
        starts, ends = np.full(len(first), np.iinfo(np.int64).max), np.full(len(first), _NEVER)
        np.minimum.at(starts, which, start)
        np.maximum.at(ends, which, end)
        return cls(replica[first], step[first], starts, ends)

    def find(self, replica: Int64, step: Int32) -> tuple[Int64, Int64]:
        """Return start and end of each; the same instant, before all others, for an unknown one."""
        row = find_rows((self.replica, self.step), (replica, step))
        return np.append(self.start, _NEVER)[row], np.append(self.end, _NEVER)[row]


def _phases_of_block(block: Block, replicas: Mapping[int, int]) -> Int64:
    """Return replica, step, first forward and last backward of each step of each rank that has both."""
    turns, spans = _TurningPoints.of(block), block.spans
    replica = block.per_row(np.array([replicas[rank] for rank in block.ranks], np.int64))
    cells = np.intersect1d(turns.cell[spans.kind == schema.FORWARD], turns.cell[spans.kind == schema.BACKWARD])
    example = np.empty(len(turns.first_forward), np.int64)
    example[turns.cell] = np.arange(len(spans))
    rows = example[cells]
    return np.stack([replica[rows], spans.step[rows], turns.first_forward[cells], turns.last_backward[cells]])


def _without_waits(block: Block, rows: Int64, waits: Int64) -> tuple[Int64, Int64]:
    """Return how long each forward or backward lasts without the waits inside, and what of this no earlier one covers.

    ``waits`` are rows of stalls, which must not overlap.
    """
    shift = block.per_row(block.end_to_end())  # the ranks follow each other on one axis
    start, end = block.spans.start[rows] + shift[rows], block.spans.end[rows] + shift[rows]
    begins, ends = block.spans.start[waits] + shift[waits], block.spans.end[waits] + shift[waits]
    total = np.concatenate([[0], np.cumsum(ends - begins)])

    def waited_before(times: Int64) -> Int64:
        begun = np.searchsorted(begins, times)
        return np.asarray(total[begun] - np.maximum(np.append(ends, _NEVER)[begun - 1] - times, 0))

    def without(start: Int64, end: Int64) -> Int64:
        return np.asarray(end - start - (waited_before(end) - waited_before(start)))

    durations = without(start, end)
    if not (start[1:] < end[:-1]).any():
        return durations, durations
    end = np.maximum.accumulate(end)
    return durations, without(np.minimum(np.maximum(start, np.append(_NEVER, end[:-1])), end), end)


def _stage(
    stage: int, recorded: list[int], measured: Mapping[int, RankWaits], causes: Mapping[int, BubbleCause]
) -> StageBubble:
    """Return the mean over the ranks with known waits, or over all ranks if there are none."""
    ranks = [rank for rank in recorded if measured[rank].is_known] or recorded

    def mean(name: str) -> int:
        return round(float(np.mean([measured[rank].per_step(name) for rank in ranks])))

    def mean_of_each(name: str, count: str) -> int:
        known = [measured[rank] for rank in ranks]
        return round(float(np.mean([getattr(waits, name) / max(getattr(waits, count), 1) for waits in known])))

    warm_up, steady, cool_down = mean("warm_up_ns"), mean("steady_ns"), mean("cool_down_ns")
    bubble = warm_up + steady + cool_down
    p2p, imbalance, schedule = _parts([causes[rank] for rank in ranks if rank in causes])
    variation = None if schedule is None else bubble - schedule - (imbalance or 0) - (p2p or 0)
    return StageBubble(
        stage=stage,
        ranks=tuple(ranks),
        forward_ns=mean_of_each("forward_ns", "forwards"),
        backward_ns=mean_of_each("backward_ns", "backwards"),
        work_ns=mean("work_ns"),
        wall_ns=mean("wall_ns"),
        phase_ns=mean("phase_ns"),
        bubble_ns=bubble,
        warm_up_ns=warm_up,
        steady_ns=steady,
        cool_down_ns=cool_down,
        schedule_ns=schedule,
        imbalance_ns=imbalance,
        variation_ns=variation,
        p2p_ns=p2p,
        transfer_ns=mean("transfer_ns"),
        drain_ns=mean("drain_ns"),
        unmatched_ns=mean("unmatched_ns"),
        left_out=tuple(rank for rank in recorded if rank not in ranks),
    )


def _parts(causes: list[BubbleCause]) -> tuple[int, int, int] | tuple[None, None, None]:
    """Return the bubble due to transfers, imbalance and the schedule, ns per step."""
    if not causes:
        return None, None, None

    def mean(name: str) -> float:
        return float(np.mean([getattr(cause, name) / cause.steps for cause in causes]))

    # Without transfers a stage can come to wait for another one: that is no negative share of the transfers, but part
    # of the rest, the variation.
    return (
        max(round(mean("as_replayed") - mean("without_transfers")), 0),
        round(mean("with_means") - mean("with_equal_stages")),
        round(mean("with_equal_stages")),
    )
