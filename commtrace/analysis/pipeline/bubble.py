"""The bubble of each pipeline stage, by phase of the schedule and by cause.

Measured: the part of every stall on a point-to-point operation of the pipeline before its last participant arrived.
Why: the step is replayed with ever more ideal durations, and what each step of that takes away has its cause's name:

* ``p2p``: what goes when the transfers between stages take no time, at least 0;
* ``variation``: what goes when every forward and backward of a stage takes the stage's mean (microbatches differ, a
  rank is slow, something else intervened);
* ``imbalance``: what goes when all stages take the same;
* ``schedule``: what is left, and what only another schedule or more microbatches can take away.

They add up to the measured bubble.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.roles import PIPELINE, Roles, find_roles, is_p2p
from commtrace.analysis.replay.ideal import equal_stages, mean_segments, median_transfers
from commtrace.analysis.replay.program import Program, by_rank, stage_of
from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans


@dataclass(frozen=True, slots=True)
class StageBubble:
    """One pipeline stage. All times are ns per step: means over its ranks and the steps.

    Attributes:
        forward_ns, backward_ns: the mean of a single one, without stalls on other stages; a backward of inputs
            and the one of weights that completes it are one.
        work_ns: all forwards and backwards of a step.
        wall_ns: the step.
        phase_ns: of it, from the first forward of any stage to the last backward of any stage.
        bubble_ns: waiting for other stages on pipeline P2P; the phases add up to it, and so do the causes.
        warm_up_ns, steady_ns, cool_down_ns: before the first backward; until the end of the last forward; after it.
        schedule_ns, imbalance_ns, variation_ns, p2p_ns: the causes; None where the run could not be replayed.
        transfer_ns: stalled on pipeline P2P after its last participant had arrived.
        drain_ns: waiting, after its own last backward and until that of the whole pipeline, on anything else.
        unmatched_ns: stood still on pipeline P2P whose other side was not recorded: it counts as transfer, and what of
            it is bubble nobody knows.
        left_out: other ranks of the stage, of which too much is unmatched.
    """

    stage: int
    ranks: tuple[int, ...]
    forward_ns: int
    backward_ns: int
    work_ns: int
    wall_ns: int
    bubble_ns: int
    warm_up_ns: int
    steady_ns: int
    cool_down_ns: int
    schedule_ns: int | None
    imbalance_ns: int | None
    variation_ns: int | None
    p2p_ns: int | None
    transfer_ns: int
    drain_ns: int
    unmatched_ns: int = 0
    left_out: tuple[int, ...] = ()
    phase_ns: int = 0

    def to_json(self) -> JsonObject:
        """Return the fields; causes that are not known are left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {**known, "ranks": list(self.ranks), "left_out": list(self.left_out)}


_FEW: Final = 0.05
"""Share of a rank's waits for other stages that may be unmatched."""


_NEVER: Final = -(2**62)
"""Before every reading of a clock, and so far from the ends of 64 bits that differences do not leave them."""


class _Measured(NamedTuple):
    """Of one rank, ns summed over its steps; forward and backward are means of single ones."""

    forward: float
    backward: float
    work: float
    wall: float
    phase: float
    warm_up: float
    steady: float
    cool_down: float
    transfer: float
    drain: float
    unmatched: float

    @property
    def is_known(self) -> bool:
        """Return whether the other sides of nearly all of its waits for other stages were seen."""
        return self.unmatched <= _FEW * (self.warm_up + self.steady + self.cool_down + self.transfer)


class MeasuredWaits(NamedTuple):
    """The measured waits of a pipeline, which need no replay.

    Attributes:
        between: by rank, which of its rows wait for other stages.
        measured: by rank.
    """

    between: Mapping[int, Bool]
    measured: Mapping[int, _Measured]


def measure_waits(run: Run, matches: Matches, roles: Roles | None = None) -> MeasuredWaits:
    """Return how long the ranks of a pipeline worked, and waited for one another."""
    roles = roles or find_roles(run)
    bounds = _pipeline_bounds(run)
    between = {rank: _between_stages(run, trace, roles) for rank, trace in run.ranks.items()}
    measured = {rank: _measure(run, trace, matches, between[rank], bounds) for rank, trace in run.ranks.items()}
    return MeasuredWaits(between, measured)


def bubbles_of_stages(run: Run, waits: MeasuredWaits, program: Program | None) -> list[StageBubble]:
    """Return the stages of a pipeline, ascending; without a program only what was measured."""
    causes = _causes(program, waits.between) if program else {}
    steps = {rank: max(int((trace.spans.kind == schema.STEP).sum()), 1) for rank, trace in run.ranks.items()}
    stages: dict[int, list[int]] = {}
    for rank, trace in run.ranks.items():
        stages.setdefault(stage_of(trace), []).append(rank)
    return [_stage(stage, stages[stage], waits.measured, steps, causes) for stage in sorted(stages)]


class _Cause(NamedTuple):
    """Bubble of one rank, ns summed over the replayed steps, with ever more ideal durations."""

    steps: int
    without_transfers: float
    with_means: float
    with_equal_stages: float
    as_replayed: float


def _causes(program: Program, between: Mapping[int, Bool]) -> dict[int, _Cause]:
    """Replayed bubbles by rank; ``between`` tells the rows of each rank that wait for other stages."""
    stalls, transfers = program.stalls, program.transfers
    between_stages = np.flatnonzero(by_rank(program, stalls.rank, stalls.row, between.__getitem__))
    pipeline_transfers = by_rank(program, transfers.rank, transfers.row, between.__getitem__) > 0
    no_p2p = np.where(pipeline_transfers, 0, transfers.ns)
    typical = np.where(pipeline_transfers, 0, median_transfers(program))
    means = mean_segments(program)
    rank = np.searchsorted(program.ranks, stalls.rank[between_stages])

    def bubbles(segment_ns: Int64 | None, transfer_ns: Int64 | None) -> npt.NDArray[np.float64]:
        waits = program.stall_waits(between_stages, segment_ns, transfer_ns)
        return np.asarray(np.bincount(rank, waits, minlength=len(program.ranks)), np.float64)

    scenarios = [(None, no_p2p), (means, typical), (equal_stages(program, means), typical), (None, None)]
    replays = [bubbles(*scenario) for scenario in scenarios]
    return {
        rank: _Cause(len(program.steps), *(float(replay[index]) for replay in replays))
        for index, rank in enumerate(program.ranks.tolist())
    }


def _between_stages(run: Run, trace: RankTrace, roles: Roles) -> Bool:
    """Point-to-point rows of the pipeline, and stalls on them."""
    return np.asarray(is_p2p(run, trace.spans) & (roles.ranks[trace.rank].role == roles.code(PIPELINE)))


def _measure(
    run: Run,
    trace: RankTrace,
    matches: Matches,
    between_stages: Bool,
    pipeline_bounds: Mapping[tuple[int, int], _Bounds],
) -> _Measured:
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
    return _Measured(
        forward=float(forward.mean()) if len(forward) else 0.0,
        backward=float(backward.sum()) / max(_whole_backwards(run, trace), 1),
        work=float(work),
        wall=float((step_end - step_start).sum()),
        phase=float(_phase_ns(pipeline_bounds, replica, spans.step[spans.kind == schema.STEP])),
        warm_up=float(wait[warm_up].sum()),
        steady=float(wait[steady].sum()),
        cool_down=float(wait[cool_down].sum()),
        transfer=float((end - start - wait)[between].sum()),
        drain=float(np.maximum(drain, 0).sum()),
        unmatched=float((end - start)[between & ~matches.ranks[trace.rank].stall_complete[stalls]].sum()),
    )


def _in_recorded_step(spans: Spans, rows: Int64) -> Bool:
    """Return which of these rows are of steps that are there themselves."""
    numbers = spans.step[spans.kind == schema.STEP]
    recorded = np.zeros(max(int(spans.step.max(initial=-1)), -1) + 2, np.bool_)  # the last entry: outside of any step
    recorded[numbers] = True
    return recorded[spans.step[rows]]


def _whole_backwards(run: Run, trace: RankTrace) -> int:
    """Backwards, without those of weights alone, each of which completes one of inputs alone."""
    spans = trace.spans
    of_weights = spans.name == run.name_code("backward_weight")
    return int(((spans.kind == schema.BACKWARD) & ~of_weights).sum())


def _turning_points(trace: RankTrace) -> tuple[Int64, Int64, Int64]:
    """By step number: start of the first backward, end of the last forward, end of the last backward."""
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
    """Return a number that ranks of one pipeline share: the rank of its first stage, as far as it is known."""
    pipelines = [
        group.ranks[0] for group in trace.groups.values() if group.role == PIPELINE and trace.rank in group.ranks
    ]
    return min(pipelines) if pipelines else -1


class _Bounds(NamedTuple):
    """From the first forward of all stages of a pipeline to their last backward, in one step."""

    start: int
    end: int


_NO_PIPELINE: Final = _Bounds(_NEVER, _NEVER)


def _pipeline_bounds(run: Run) -> dict[tuple[int, int], _Bounds]:
    """By pipeline and step."""
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
    """By step, of one rank; where it has both forwards and backwards."""
    forward, backward = (np.flatnonzero(spans.kind == kind) for kind in (schema.FORWARD, schema.BACKWARD))
    begun = forward[np.lexsort((spans.start[forward], spans.step[forward]))]
    first = begun[np.diff(spans.step[begun], prepend=np.iinfo(np.int32).min) != 0]
    ended = backward[np.lexsort((spans.end[backward], spans.step[backward]))]
    last = ended[np.diff(spans.step[ended], append=np.iinfo(np.int32).max) != 0]
    ends = dict(zip(spans.step[last].tolist(), spans.end[last].tolist(), strict=True))
    starts = zip(spans.step[first].tolist(), spans.start[first].tolist(), strict=True)
    return {step: _Bounds(start, ends[step]) for step, start in starts if step in ends}


def _phase_ns(bounds: Mapping[tuple[int, int], _Bounds], replica: int, steps: Int32) -> int:
    """Return the length of the pipeline's work in these steps, in all."""
    found = (bounds.get((replica, step), _NO_PIPELINE) for step in steps.tolist())
    return sum(end - start for start, end in found)


def _phases_ns(spans: Spans, waits: Int64) -> tuple[Int64, Int64, int]:
    """Durations of each forward and backward, and of all work, without these stalls on other stages inside them.

    Where phases overlap, the time counts as work once.
    """
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
    """Lengths of these intervals, without the stalls inside them, which do not overlap."""
    if not len(waits):
        return np.asarray(end - start)
    begins, ends = spans.start[waits], spans.end[waits]
    total = np.concatenate([[0], np.cumsum(ends - begins)])

    def stalled_before(times: Int64) -> Int64:
        begun = np.searchsorted(begins, times)
        return np.asarray(total[begun] - np.where(begun > 0, np.maximum(ends[begun - 1] - times, 0), 0))

    return np.asarray(end - start - (stalled_before(end) - stalled_before(start)))


def _stage(
    stage: int,
    recorded: list[int],
    measured: Mapping[int, _Measured],
    steps: Mapping[int, int],
    causes: Mapping[int, _Cause],
) -> StageBubble:
    """Return the mean over the ranks of which it is known what they waited for; over all of them, if it is of none."""
    ranks = [rank for rank in recorded if measured[rank].is_known] or recorded

    def mean(name: str) -> float:
        return float(np.mean([getattr(measured[rank], name) / steps[rank] for rank in ranks]))

    phases = {name: round(mean(name)) for name in ("warm_up", "steady", "cool_down")}
    bubble = sum(phases.values())
    p2p, imbalance, schedule = _parts([causes[rank] for rank in ranks if rank in causes])
    variation = None if schedule is None else bubble - schedule - (imbalance or 0) - (p2p or 0)
    return StageBubble(
        stage=stage,
        ranks=tuple(ranks),
        forward_ns=round(float(np.mean([measured[rank].forward for rank in ranks]))),
        backward_ns=round(float(np.mean([measured[rank].backward for rank in ranks]))),
        work_ns=round(mean("work")),
        wall_ns=round(mean("wall")),
        phase_ns=round(mean("phase")),
        bubble_ns=bubble,
        warm_up_ns=phases["warm_up"],
        steady_ns=phases["steady"],
        cool_down_ns=phases["cool_down"],
        schedule_ns=schedule,
        imbalance_ns=imbalance,
        variation_ns=variation,
        p2p_ns=p2p,
        transfer_ns=round(mean("transfer")),
        drain_ns=round(mean("drain")),
        unmatched_ns=round(mean("unmatched")),
        left_out=tuple(rank for rank in recorded if rank not in ranks),
    )


def _parts(causes: list[_Cause]) -> tuple[int, int, int] | tuple[None, None, None]:
    """Return what transfers, imbalance and the schedule make of the bubble, ns per step."""
    if not causes:
        return None, None, None

    def mean(name: str) -> float:
        return float(np.mean([getattr(cause, name) / cause.steps for cause in causes]))

    # Without transfers a stage can come to wait for another one: that is no negative share of the transfers, but part
    # of what is left over, the variation.
    return (
        max(round(mean("as_replayed") - mean("without_transfers")), 0),
        round(mean("with_means") - mean("with_equal_stages")),
        round(mean("with_equal_stages")),
    )
