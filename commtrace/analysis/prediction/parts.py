"""The parts of a recorded step that make up a pipeline: forwards, backwards, what lies between them, messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import pack
from commtrace.analysis.matching.roles import PIPELINE
from commtrace.analysis.prediction.durations import Durations, overlapping
from commtrace.analysis.prediction.pipeline_graph import places_in_a_loop
from commtrace.analysis.prediction.recorded_steps import LaneTimes, RecordedSteps, lane_times
from commtrace.analysis.replay.edges import worked_before
from commtrace.analysis.replay.program import stage_of
from commtrace.analysis.statistics import exact_of_each
from commtrace.errors import ConfigurationError
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schedule import BACKWARD, FORWARD, INPUT, WEIGHTS, Action
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class LaneParts:
    """One rank's step, taken apart; ns, without waits for other stages."""

    actions: tuple[Action, ...]  # in order
    begin: Int64  # of each action, as recorded, from the start of the step
    end: Int64
    busy_ns: Int64  # of each action in the replay
    waited_ns: Int64  # of these, waits for communication that is not between stages
    gap_ns: Int64  # before each action; the first one is the head of the step
    recompute_ns: Int64  # of each action
    transfer_ns: float  # median of the messages that it receives; NaN without any
    lane: LaneTimes

    @property
    def microbatches(self) -> tuple[int, ...]:
        return tuple(sorted({action.microbatch for action in self.actions if action.letter == FORWARD}))

    @property
    def chunks(self) -> int:
        return 1 + max(action.chunk for action in self.actions)

    def busy_of(self) -> Mapping[Action, int]:
        """Return the time of each action."""
        return dict(zip(self.actions, self.busy_ns.tolist(), strict=True))

    def mean_gaps(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Return the mean time between actions of these letters; of two that never followed each other, of any two."""
        letters = [_plain(action.letter) for action in self.actions]
        gaps: dict[tuple[str, str], list[int]] = defaultdict(list)
        for pair, gap in zip(pairwise(letters), self.gap_ns[1:].tolist(), strict=True):
            gaps[pair].append(gap)
        of_any = [gap for between in gaps.values() for gap in between] or [0]
        return {
            (before, after): float(np.mean(gaps.get((_plain(before), _plain(after)), of_any)))
            for before, after in pairs
        }


class PipelineParts(NamedTuple):
    """All lanes, taken apart, and how their messages pass."""

    lanes: tuple[tuple[LaneParts, ...], ...]  # by index of the rank, then of the step
    pipelines: tuple[tuple[int, ...], ...]  # indices of the ranks of each pipeline, by stage
    places: Mapping[tuple[int, int], int]  # position along the model, by stage and chunk
    send_delay_ns: Int64  # from the end of an action to its message, of each rank
    receives_early: bool  # messages are received while the lane works
    mean_transfer_ns: float

    @property
    def stages(self) -> int:
        return len(self.pipelines[0])

    @property
    def chunks(self) -> int:
        return self.lanes[0][0].chunks

    @property
    def microbatches(self) -> int:
        return len(self.lanes[0][0].microbatches)


def take_apart(recorded: RecordedSteps, durations: Durations, times: Int64) -> PipelineParts:
    """Take the replayed steps apart.

    Raises:
        ConfigurationError: a rank recorded no forwards and backwards, or the stages of its pipeline are not known.
    """
    run = recorded.run
    steps = range(len(recorded.steps))
    transfers = _usual_transfers(recorded, durations)
    lanes = tuple(
        tuple(_lane(recorded, durations, times, index, step, transfers.get((rank, step), np.nan)) for step in steps)
        for index, rank in enumerate(recorded.ranks.tolist())
    )
    delays, early = _messages(recorded, lanes)
    means = [parts.transfer_ns for rank in lanes for parts in rank if not np.isnan(parts.transfer_ns)]
    pipelines = _pipelines(run, recorded.ranks.tolist())
    chunks = lanes[0][0].chunks
    return PipelineParts(
        lanes=lanes,
        pipelines=pipelines,
        places=_places(run, recorded.ranks.tolist(), pipelines, chunks),
        send_delay_ns=delays,
        receives_early=early,
        mean_transfer_ns=float(np.mean(means)) if means else 0.0,
    )


_LETTERS = {schema.FORWARD: FORWARD, schema.BACKWARD: BACKWARD}


def _lane(
    recorded: RecordedSteps, durations: Durations, times: Int64, index: int, step: int, usual_transfer_ns: float
) -> LaneParts:
    run, rank = recorded.run, int(recorded.ranks[index])
    spans, number = run.ranks[rank].spans, int(recorded.steps[step])
    origin = int(recorded.lanes.step_start[index, step])
    rows = np.flatnonzero(np.isin(spans.kind, list(_LETTERS)) & (spans.lane == schema.COMPUTE) & (spans.step == number))
    rows = rows[np.lexsort((-spans.end[rows], spans.start[rows]))]
    if len(rows):
        rows = rows[np.append(True, spans.start[rows][1:] >= np.maximum.accumulate(spans.end[rows])[:-1])]
    actions = _actions(run, rank, number, rows)
    begin, end = spans.start[rows] - origin, spans.end[rows] - origin
    lane = lane_times(recorded, durations.piece_ns, times, index, step)
    begins, ends = lane.at(begin), lane.at(end, before=True)
    # Waits lie in their order, so that those of an interval follow one another.
    waits = lane.new_end - lane.new_begin
    waited_before = worked_before(np.where(lane.is_between_stages, waits, 0))
    at_begin = np.searchsorted(lane.wait_begin, begin, side="left")
    first_inside = np.maximum(at_begin, np.searchsorted(lane.wait_end, begin, side="right"))
    end_inside = np.searchsorted(lane.wait_begin, end, side="left")
    inside = _sum_between(waited_before, first_inside, end_inside)
    waited_ns = _sum_between(worked_before(np.where(lane.is_between_stages, 0, waits)), first_inside, end_inside)
    first_between = np.searchsorted(lane.wait_begin, np.append(0, end[:-1]), side="left")
    between = _sum_between(waited_before, first_between, np.searchsorted(lane.wait_end, begin, side="right"))
    return LaneParts(
        actions=actions,
        begin=begin,
        end=end,
        busy_ns=ends - begins - inside,
        waited_ns=waited_ns,
        gap_ns=begins - np.concatenate([[lane.replayed[0]], ends[:-1]]) - between,
        recompute_ns=_recomputed(recorded, lane, rank, number, origin, begin, end),
        transfer_ns=usual_transfer_ns,
        lane=lane,
    )


def _sum_between(before: Int64, first: Int64, end: Int64) -> Int64:
    """Return sums from one place to another; ``before`` has those of everything before each place."""
    return before[np.maximum(end, first)] - before[first]


def _actions(run: Run, rank: int, step: int, rows: Int64) -> tuple[Action, ...]:
    """Return the forwards and backwards in these rows. Raise ConfigurationError if they cannot be put in order."""
    spans = run.ranks[rank].spans
    names = [run.names[code] if code >= 0 else "" for code in spans.name[rows].tolist()]
    actions = tuple(
        Action(_letter(kind, name), microbatch, max(chunk, 0))
        for kind, name, microbatch, chunk in zip(
            spans.kind[rows].tolist(), names, spans.microbatch[rows].tolist(), spans.chunk[rows].tolist(), strict=True
        )
    )
    if not {FORWARD, BACKWARD} <= {_plain(action.letter) for action in actions}:
        raise ConfigurationError(
            f"rank {rank} recorded no forwards and backwards in step {step}, so its schedule cannot be changed. "
            "Record the run in a framework whose microbatches commtrace knows: Megatron, DeepSpeed, "
            "torch.distributed.pipelining."
        )
    if any(action.microbatch < 0 for action in actions):
        if sum(action.letter == FORWARD for action in actions) > 1:
            raise ConfigurationError(
                f"rank {rank} recorded forwards without the numbers of their microbatches in step {step}, so the "
                "schedule cannot be changed"
            )
        actions = tuple(action._replace(microbatch=0) for action in actions)
    if len(set(actions)) < len(actions):
        raise ConfigurationError(
            f"rank {rank} recorded a forward or backward of one microbatch twice in step {step}, so the schedule "
            "cannot be changed"
        )
    return actions


def _recomputed(
    recorded: RecordedSteps, lane: LaneTimes, rank: int, number: int, origin: int, begin: Int64, end: Int64
) -> Int64:
    spans = recorded.run.ranks[rank].spans
    rows = np.flatnonzero((spans.kind == schema.RECOMPUTE) & (spans.step == number))
    recomputed_ns = np.zeros(len(begin), np.int64)
    for row in rows.tolist():
        first, last = int(spans.start[row]) - origin, int(spans.end[row]) - origin
        holder = int(np.searchsorted(begin, first, side="right")) - 1
        if holder >= 0 and last <= int(end[holder]):
            recomputed_ns[holder] += int(lane.at(last, before=True)[0] - lane.at(first)[0])
    return recomputed_ns


def _usual_transfers(recorded: RecordedSteps, durations: Durations) -> dict[tuple[int, int], float]:
    """Return the median of the messages that each rank receives, ns, by rank and step.

    A median: where nobody waited, the end is seen only when somebody asks for it.
    """
    transfers, received = recorded.joins.transfers, np.flatnonzero(_received(recorded))
    received = received[exact_of_each(transfers.exact[received], pack((transfers.rank, transfers.step))[received])]
    times: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, step, time in zip(
        transfers.rank[received].tolist(),
        transfers.step[received].tolist(),
        durations.transfer_ns[received].tolist(),
        strict=True,
    ):
        times[rank, step].append(time)
    return {key: median(received_ns) for key, received_ns in times.items()}


def _received(recorded: RecordedSteps) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    transfers = recorded.joins.transfers
    received = transfers.name == recorded.run.name_code("recv")
    return np.asarray(received & (recorded.transfer_role == recorded.roles.code(PIPELINE)))


def _messages(recorded: RecordedSteps, lanes: Sequence[Sequence[LaneParts]]) -> tuple[Int64, bool]:
    """Return the delay of each rank's sends behind its actions, and whether receives start early."""
    transfers = recorded.joins.transfers
    sent = (transfers.name == recorded.run.name_code("send")) & (
        recorded.transfer_role == recorded.roles.code(PIPELINE)
    )
    delays = np.zeros(len(recorded.ranks), np.int64)
    for index, rank in enumerate(recorded.ranks.tolist()):
        sends = np.flatnonzero(sent & (transfers.rank == rank))
        spans = recorded.run.ranks[rank].spans
        late = []
        for transfer in sends.tolist():
            step = int(transfers.step[transfer])
            start = int(spans.start[transfers.row[transfer]] - recorded.lanes.step_start[index, step])
            parts = lanes[index][step]
            last = int(np.searchsorted(parts.end, start, side="right")) - 1
            if last >= 0 and (last + 1 == len(parts.begin) or start <= parts.begin[last + 1]):
                late.append(start - int(parts.end[last]))
        delays[index] = int(np.median(late)) if late else 0
    received = _received(recorded)
    early = bool(overlapping(recorded)[received].mean() > 0.5) if received.any() else False
    return delays, early


def _pipelines(run: Run, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the ranks of each pipeline, by stage. Raise ConfigurationError if stages are missing."""
    index = {rank: at for at, rank in enumerate(ranks)}
    stages: dict[tuple[tuple[str, int], ...] | tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for rank in ranks:
        trace = run.ranks[rank]
        stages[_replica(trace)][stage_of(trace)] = index[rank]
    pipelines = [tuple(by_stage[stage] for stage in sorted(by_stage)) for by_stage in stages.values()]
    lengths = {len(pipeline) for pipeline in pipelines}
    numbers = {tuple(sorted(by_stage)) for by_stage in stages.values()}
    length = max(lengths)
    if lengths != {length} or numbers != {tuple(range(length))} or sum(map(len, pipelines)) != len(ranks):
        raise ConfigurationError(
            "the stages of this run's pipelines are not all known: ranks are missing, or their place was not recorded. "
            "commtrace pipeline RUN says what is known."
        )
    return tuple(sorted(pipelines))


def _replica(trace: RankTrace) -> tuple[tuple[str, int], ...] | tuple[int, ...]:
    """Return a key that is equal for the ranks of one pipeline."""
    for group in trace.groups.values():
        if group.role == PIPELINE and trace.rank in group.ranks:
            return group.ranks
    return tuple(
        sorted((name, coordinate) for name, coordinate in trace.coordinates.items() if name not in ("pp", "ep"))
    )


def _places(
    run: Run, ranks: Sequence[int], pipelines: Sequence[Sequence[int]], chunks: int
) -> dict[tuple[int, int], int]:
    """Return the position along the model of each chunk: as the framework says, else in a loop over the stages."""
    places = places_in_a_loop(len(pipelines[0]), chunks)
    for stage, index in enumerate(pipelines[0]):
        named = run.ranks[ranks[index]].topology.get("stage_indices", [])
        if len(named) == chunks:
            places |= {(stage, chunk): int(position) for chunk, position in enumerate(named)}
    return places


def _letter(kind: int, name: str) -> str:
    if kind == schema.FORWARD:
        return FORWARD
    if "weight" in name or "wgrad" in name:
        return WEIGHTS
    return INPUT if "input" in name or "dgrad" in name else BACKWARD


def _plain(letter: str) -> str:
    return BACKWARD if letter == INPUT else letter
