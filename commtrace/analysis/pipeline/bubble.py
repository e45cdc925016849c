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
import numpy.typing as npt

from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.roles import PIPELINE, Roles, is_p2p
from commtrace.analysis.replay.ideal import Ideal
from commtrace.analysis.replay.program import Program, by_rank, stage_of
from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans


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
        sums = {own.name: getattr(self, own.name) + getattr(later, own.name) for own in fields(self)[3:]}
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
    bounds = _pipeline_bounds(run)
    return {
        rank: _measure(run, trace, matches, _between_stages(run, trace, roles), bounds)
        for rank, trace in run.ranks.items()
    }


def bubbles_of_stages(ranks: Mapping[int, RankWaits], causes: Mapping[int, Cause]) -> list[StageBubble]:
    """Return the stages of a pipeline, ascending; without causes, only the measured fields."""
    stages: dict[int, list[int]] = {}
    for rank, own in ranks.items():
        stages.setdefault(own.stage or 0, []).append(rank)
    return [_stage(stage, stages[stage], ranks, causes) for stage in sorted(stages)]


class Cause(NamedTuple):
    """Bubble of one rank, ns summed over the replayed steps, with ever more ideal durations."""

    steps: int
    without_transfers: float
    with_means: float
    with_equal_stages: float
    as_replayed: float


@dataclass(frozen=True, slots=True)
class BubbleCauses:
    """The replayed bubble of each rank. Those of several windows of a run add up."""

    ranks: Mapping[int, Cause]

    def __add__(self, later: BubbleCauses) -> BubbleCauses:
        pairs = {rank: zip(own, later.ranks[rank], strict=True) for rank, own in self.ranks.items()}
        return BubbleCauses({rank: Cause._make(one + more for one, more in pair) for rank, pair in pairs.items()})


def replayed_bubbles(run: Run, program: Program, roles: Roles, ideal: Ideal) -> BubbleCauses:
    """Replay the steps with ever more ideal durations; ``ideal`` holds those of the whole run."""
    between = {rank: _between_stages(run, trace, roles) for rank, trace in run.ranks.items()}
    stalls, transfers = program.stalls, program.transfers
    chosen = np.flatnonzero(by_rank(program, stalls.rank, stalls.row, between.__getitem__))
    pipeline_transfers = by_rank(program, transfers.rank, transfers.row, between.__getitem__) > 0
    no_p2p = np.where(pipeline_transfers, 0, transfers.ns)
    typical = np.where(pipeline_transfers, 0, ideal.transfers(run, transfers))
    means, equal = ideal.segments(program.segments)
    rank = np.searchsorted(program.ranks, stalls.rank[chosen])

    def bubbles(segment_ns: Int64 | None, transfer_ns: Int64 | None) -> npt.NDArray[np.float64]:
        waits = program.stall_waits(chosen, segment_ns, transfer_ns)
        return np.asarray(np.bincount(rank, waits, minlength=len(program.ranks)), np.float64)

    scenarios = [(None, no_p2p), (means, typical), (equal, typical), (None, None)]
    replays = [bubbles(*scenario) for scenario in scenarios]
    return BubbleCauses(
        {
            rank: Cause(len(program.steps), *(float(replay[index]) for replay in replays))
            for index, rank in enumerate(program.ranks.tolist())
        }
    )


def _between_stages(run: Run, trace: RankTrace, roles: Roles) -> Bool:
    """Return a mask of the pipeline's point-to-point rows and stalls on them."""
    return np.asarray(is_p2p(run, trace.spans) & (roles.ranks[trace.rank].role == roles.code(PIPELINE)))


def _measure(
    run: Run,
    trace: RankTrace,
    matches: Matches,
    between_stages: Bool,
    pipeline_bounds: Mapping[tuple[int, int], _Bounds],
) -> RankWaits:
    spans = trace.spans
    step_start, step_end = (values[spans.kind == schema.STEP] for values in (spans.start, spans.end))
    stalls = np.flatnonzero(spans.kind == schema.STALL)
    stalls = stalls[_in_recorded_step(spans, stalls)]
    start, end, step = spans.start[stalls], spans.end[stalls], spans.step[stalls]
    ready = matches.ranks[trace.rank].stall_ready[stalls]
    wait = np.clip(ready, start, end) - start
    between = between_stages[stalls]
    first_backward, last_forward, last_backward = _turning_points(trace)
    warm_up = between & (start < first_backward[step])
    cool_down = between & ~warm_up & (start >= last_forward[step])
    steady = between & ~warm_up & ~cool_down

    draining = ~between & (start >= last_backward[step])
    replica = _replica(trace)
    numbers, number = np.unique(step[draining], return_inverse=True)
    ends_of_steps = [pipeline_bounds.get((replica, one), _NO_PIPELINE).end for one in numbers.tolist()]
    ends = np.array(ends_of_steps, np.int64)[number.reshape(-1)]
    drain = np.minimum(ready[draining], ends) - start[draining]
    forward, backward, work = _phases_ns(spans, stalls[between])
    is_forward = spans.kind == schema.FORWARD
    chunks = spans.chunk[is_forward]
    knows_stage = "pp" in trace.coordinates or (spans.stage[is_forward] >= 0).any()
    return RankWaits(
        stage=stage_of(trace) if knows_stage else None,
        num_steps=len(step_start),
        chunks=max(int(chunks.max()) + 1, 1) if len(chunks) else 0,
        forwards=len(forward),
        backwards=_whole_backwards(run, trace),
        forward_ns=int(forward.sum()),
        backward_ns=int(backward.sum()),
        work_ns=work,
        wall_ns=int((step_end - step_start).sum()),
        phase_ns=_phase_ns(pipeline_bounds, replica, spans.step[spans.kind == schema.STEP]),
        warm_up_ns=int(wait[warm_up].sum()),
        steady_ns=int(wait[steady].sum()),
        cool_down_ns=int(wait[cool_down].sum()),
        transfer_ns=int((end - start - wait)[between].sum()),
        drain_ns=int(np.maximum(drain, 0).sum()),
        unmatched_ns=int((end - start)[between & ~matches.ranks[trace.rank].stall_complete[stalls]].sum()),
    )


def _in_recorded_step(spans: Spans, rows: Int64) -> Bool:
    numbers = spans.step[spans.kind == schema.STEP]
    recorded = np.zeros(max(int(spans.step.max(initial=-1)), -1) + 2, np.bool_)  # the last entry: outside of any step
    recorded[numbers] = True
    return recorded[spans.step[rows]]


def _whole_backwards(run: Run, trace: RankTrace) -> int:
    """Count backwards, without those of weights alone: each of these completes one of inputs."""
    spans = trace.spans
    of_weights = spans.name == run.name_code("backward_weight")
    return int(((spans.kind == schema.BACKWARD) & ~of_weights).sum())


def _turning_points(trace: RankTrace) -> tuple[Int64, Int64, Int64]:
    """Return, by step number: start of the first backward, end of the last forward, end of the last backward."""
    spans = trace.spans
    most = np.iinfo(np.int64)
    count = int(spans.step.max(initial=0)) + 2  # the last entry stands for rows outside of any step
    first_backward, last_forward, last_backward = (np.full(count, value) for value in (most.max, most.max, most.max))
    forward, backward = spans.kind == schema.FORWARD, spans.kind == schema.BACKWARD
    np.minimum.at(first_backward, spans.step[backward], spans.start[backward])
    last_forward[spans.step[forward]] = most.min
    np.maximum.at(last_forward, spans.step[forward], spans.end[forward])
    last_backward[spans.step[backward]] = most.min
    np.maximum.at(last_backward, spans.step[backward], spans.end[backward])
    return first_backward, last_forward, last_backward


def _replica(trace: RankTrace) -> int:
    """Return a number that ranks of one pipeline share: the rank of its first stage if known."""
    pipelines = [
        group.ranks[0] for group in trace.groups.values() if group.role == PIPELINE and trace.rank in group.ranks
    ]
    return min(pipelines) if pipelines else -1


class _Bounds(NamedTuple):
    """The first forward to the last backward of a pipeline in one step."""

    start: int
    end: int


_NO_PIPELINE: Final = _Bounds(_NEVER, _NEVER)


def _pipeline_bounds(run: Run) -> dict[tuple[int, int], _Bounds]:
    """Return the bounds by pipeline and step."""
    bounds: dict[tuple[int, int], _Bounds] = {}
    for trace in run.ranks.values():
        replica = _replica(trace)
        for step, (start, end) in _own_bounds(trace.spans).items():
            known = bounds.get((replica, step))
            bounds[replica, step] = (
                _Bounds(min(known.start, start), max(known.end, end)) if known else _Bounds(start, end)
            )
    return bounds


def _own_bounds(spans: Spans) -> dict[int, _Bounds]:
    """Return the bounds of one rank, by step with both forwards and backwards."""
    forward, backward = (np.flatnonzero(spans.kind == kind) for kind in (schema.FORWARD, schema.BACKWARD))
    begun = forward[np.lexsort((spans.start[forward], spans.step[forward]))]
    first = begun[np.diff(spans.step[begun], prepend=np.iinfo(np.int32).min) != 0]
    ended = backward[np.lexsort((spans.end[backward], spans.step[backward]))]
    last = ended[np.diff(spans.step[ended], append=np.iinfo(np.int32).max) != 0]
    ends = dict(zip(spans.step[last].tolist(), spans.end[last].tolist(), strict=True))
    starts = zip(spans.step[first].tolist(), spans.start[first].tolist(), strict=True)
    return {step: _Bounds(start, ends[step]) for step, start in starts if step in ends}


def _phase_ns(bounds: Mapping[tuple[int, int], _Bounds], replica: int, steps: Int32) -> int:
    found = (bounds.get((replica, step), _NO_PIPELINE) for step in steps.tolist())
    return sum(end - start for start, end in found)


def _phases_ns(spans: Spans, waits: Int64) -> tuple[Int64, Int64, int]:
    """Return the duration of each forward and backward, and of all work, without stalls on other stages inside."""
    is_forward = spans.kind == schema.FORWARD
    rows = np.flatnonzero(is_forward | (spans.kind == schema.BACKWARD))
    is_forward, start, end = is_forward[rows], spans.start[rows], spans.end[rows]
    durations = _without(spans, waits, start, end)
    work = durations
    if (start[1:] < end[:-1]).any():
        end = np.maximum.accumulate(end)
        work = _without(spans, waits, np.minimum(np.maximum(start, np.append(_NEVER, end[:-1])), end), end)
    return durations[is_forward], durations[~is_forward], int(work.sum())


def _without(spans: Spans, waits: Int64, start: Int64, end: Int64) -> Int64:
    """Return the lengths of these intervals without the stalls inside them; stalls must not overlap."""
    if not len(waits):
        return np.asarray(end - start)
    begins, ends = spans.start[waits], spans.end[waits]
    total = np.concatenate([[0], np.cumsum(ends - begins)])

    def stalled_before(times: Int64) -> Int64:
        begun = np.searchsorted(begins, times)
        return np.asarray(total[begun] - np.where(begun > 0, np.maximum(ends[begun - 1] - times, 0), 0))

    return np.asarray(end - start - (stalled_before(end) - stalled_before(start)))


def _stage(
    stage: int, recorded: list[int], measured: Mapping[int, RankWaits], causes: Mapping[int, Cause]
) -> StageBubble:
    """Return the mean over the ranks with known waits, or over all ranks if there are none."""
    ranks = [rank for rank in recorded if measured[rank].is_known] or recorded

    def mean(name: str) -> int:
        return round(float(np.mean([measured[rank].per_step(name) for rank in ranks])))

    def mean_of_one(name: str, count: str) -> int:
        known = [measured[rank] for rank in ranks]
        return round(float(np.mean([getattr(own, name) / max(getattr(own, count), 1) for own in known])))

    warm_up, steady, cool_down = mean("warm_up_ns"), mean("steady_ns"), mean("cool_down_ns")
    bubble = warm_up + steady + cool_down
    p2p, imbalance, schedule = _parts([causes[rank] for rank in ranks if rank in causes])
    variation = None if schedule is None else bubble - schedule - (imbalance or 0) - (p2p or 0)
    return StageBubble(
        stage=stage,
        ranks=tuple(ranks),
        forward_ns=mean_of_one("forward_ns", "forwards"),
        backward_ns=mean_of_one("backward_ns", "backwards"),
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


def _parts(causes: list[Cause]) -> tuple[int, int, int] | tuple[None, None, None]:
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
