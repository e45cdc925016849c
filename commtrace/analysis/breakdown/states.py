"""The states of a rank's lane, which are the columns of the partition, and the intervals in which spans claim them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.operations import communication_rows, is_kernel_trace
from commtrace.analysis.matching.roles import PIPELINE, Roles, is_p2p
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.graphs import knows_its_communication
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

COMPUTE: Final = "compute"
WAIT: Final = "exposed wait"
TRANSFER: Final = "exposed transfer"
BUBBLE: Final = "bubble"
DATA: Final = "data"
CHECKPOINT: Final = "checkpoint"
GC: Final = "gc"
MEMORY: Final = "exposed memory"
IDLE: Final = "idle"
REPLAY: Final = "replay"
"""Within a replay of a CUDA graph that communicates: how it divides into compute and communication is not known."""
BETWEEN_STEPS: Final = "between"
"""From the end of the step before to the begin of the step's own work, where nothing else is known."""
OTHER: Final = "other"

PHASES: Final = ("forward", "backward", "recompute", "optimizer", "evaluation", "other")
"""Phases of compute; ``other`` is named work (a module, a user's span) of no other phase."""


class State(NamedTuple):
    """One column of the partition; ``detail`` is the phase of compute or the role of exposed time, else empty."""

    kind: str
    detail: str = ""


FIXED: Final = (
    State(OTHER),
    *(State(COMPUTE, phase) for phase in PHASES),
    State(DATA),
    State(CHECKPOINT),
    State(GC),
    State(BUBBLE),
    State(MEMORY),
    State(IDLE),
    State(REPLAY),
    State(BETWEEN_STEPS),
)
"""The states of every run; those of its roles follow. Unclaimed time is ``other``, or ``idle`` if kernels were traced,
as nothing is missing then.
"""


LAUNCHING: Final = FIXED[: 1 + len(PHASES)]
"""The states in which a device may wait for its host to launch: the first of every run. Others have a reason."""

IN_NO_SPAN: Final = "in_no_span"
LAUNCH_BOUND_PHASES: Final = tuple(state.detail or IN_NO_SPAN for state in LAUNCHING)
"""What results call these states."""

UNKNOWN_TIME: Final = -1


class StatePriority(NamedTuple):
    """The state of a kind of span; where spans overlap, the highest priority counts."""

    state: State
    priority: int


STATE_OF_KIND: Final = {
    schema.BETWEEN: StatePriority(State(BETWEEN_STEPS), -1),
    schema.MODULE: StatePriority(State(COMPUTE, "other"), 0),
    schema.USER: StatePriority(State(COMPUTE, "other"), 1),
    schema.PHASE: StatePriority(State(COMPUTE, "other"), 1),
    schema.FORWARD: StatePriority(State(COMPUTE, "forward"), 2),
    schema.BACKWARD: StatePriority(State(COMPUTE, "backward"), 2),
    schema.RECOMPUTE: StatePriority(State(COMPUTE, "recompute"), 2),
    schema.OPTIMIZER: StatePriority(State(COMPUTE, "optimizer"), 2),
    schema.EVALUATION: StatePriority(State(COMPUTE, "evaluation"), 3),
    schema.REPLAY: StatePriority(State(REPLAY), 3),
    schema.DATA: StatePriority(State(DATA), 4),
    schema.CHECKPOINT: StatePriority(State(CHECKPOINT), 5),
    schema.GC: StatePriority(State(GC), 7),
}
"""Without stalls (priority 6): their state depends on their role. At equal priority the innermost span wins. Replays
without communication are compute of their phase.
"""

STALL_PRIORITY: Final = 6

STATE_OF_TRACED_KIND: Final = {
    schema.KERNEL: StatePriority(State(COMPUTE, "other"), 2),
    schema.MEMORY: StatePriority(State(MEMORY), 0),
}
"""The same for traced kernels: communication (priority 1) is exposed where no kernel computes, a copy where there is
neither.
"""

TRACED_COMMUNICATION_PRIORITY: Final = 1


def states_of(roles: tuple[str, ...]) -> tuple[State, ...]:
    """Return the columns for a run with these roles: the fixed ones, then wait and transfer of each role in turn."""
    return (*FIXED, *(State(kind, role) for role in roles for kind in (WAIT, TRANSFER)))


class LaneIntervals(NamedTuple):
    """Intervals on one axis, ns, never empty."""

    start: Int64
    end: Int64
    state: Int32  # position in the run's states
    priority: Int32  # where intervals overlap, the highest wins
    row: Int64  # the span

    def precedence(self) -> Int64:
        """Return a number from 0 to n − 1 per interval; where intervals overlap, the highest number wins.

        Order: priority, then innermost (later start, earlier end), then state, so that the input order never matters.
        """
        order = np.lexsort((self.state, -self.end, self.start, self.priority))
        precedence = np.empty(len(order), np.int64)
        precedence[order] = np.arange(len(order))
        return precedence

    def filled(self) -> LaneIntervals:
        """Return the intervals that are not empty."""
        rows = np.flatnonzero(self.end > self.start)
        return LaneIntervals._make(column[rows] for column in self)


class ReadyTimes(NamedTuple):
    """The ready time and role of a block's stalls, aligned with its rows."""

    ready: Int64  # arrival of the last participant of a communication
    stall_ready: Int64  # the same, of the communication that a stall is on
    role: Int32

    @classmethod
    def of(cls, block: Block, matches: Matches, roles: Roles) -> ReadyTimes:
        return cls(
            block.together({rank: matches.ranks[rank].ready for rank in block.ranks}),
            block.together({rank: matches.ranks[rank].stall_ready for rank in block.ranks}),
            block.together({rank: roles.ranks[rank].role for rank in block.ranks}),
        )


class Stalls(NamedTuple):
    """Stalls of lanes on one axis, ns, never empty: wait until ``ready``, then transfer."""

    start: Int64
    ready: Int64
    end: Int64
    wait: Int32  # position in the run's states
    transfer: Int32  # position in the run's states
    row: Int64  # the span

    def intervals(self, priority: int) -> tuple[LaneIntervals, LaneIntervals]:
        """Return the waits and the transfers as intervals of this priority."""
        priorities = np.full(len(self.row), priority, np.int32)
        return (
            LaneIntervals(self.start, self.ready, self.wait, priorities, self.row).filled(),
            LaneIntervals(self.ready, self.end, self.transfer, priorities, self.row).filled(),
        )


class LaneStates(NamedTuple):
    """The intervals of a block's spans on their lanes, the ranks end to end."""

    work: LaneIntervals
    stalls: Stalls
    priority: int


def together(parts: Sequence[LaneIntervals]) -> LaneIntervals:
    """Return the intervals of all parts."""
    return LaneIntervals._make(np.concatenate(column) for column in zip(*parts, strict=True))


def lane_states(run: Run, block: Block, ready_times: ReadyTimes, roles: Roles, axis: Int64) -> LaneStates:
    """Return the intervals of all spans of a block with all kernels traced, or none; ``axis`` shifts each row's times.

    A trace of kernels has no stalls: there, communication counts where no kernel computes.
    """
    spans = block.spans
    states = states_of(roles.words)
    if is_kernel_trace(spans):
        work = _work_intervals(run, spans, states, STATE_OF_TRACED_KIND, axis)
        rows, ready, priority = communication_rows(spans), ready_times.ready, TRACED_COMMUNICATION_PRIORITY
    else:
        work = _work_intervals(run, spans, states, STATE_OF_KIND, axis)
        rows, ready, priority = spans.kind == schema.STALL, ready_times.stall_ready, STALL_PRIORITY
    chosen = np.flatnonzero(rows & (spans.end > spans.start))
    return LaneStates(
        work=work,
        stalls=_stalls(run, spans, chosen, ready[chosen], roles, ready_times.role[chosen], states, axis),
        priority=priority,
    )


def communicates(replays: Spans) -> Bool:
    """Return of each of these rows, replays of CUDA graphs, whether it may contain communication without own times.

    What has them has rows of the stalls on it, too: the rest of the replay is compute.
    """
    has_any = (replays.op_in_seq > 0) | (replays.bytes < 0)
    return np.asarray(has_any & ~knows_its_communication(replays))


def _state_of_computing_replays(run: Run, replays: Spans, states: tuple[State, ...]) -> Int32:
    """Return the state of each of these rows, by the phase that it is named after."""
    of_name = {code: name for code, name in enumerate(run.names) if name in PHASES}
    phases = [of_name.get(code, "other") for code in replays.name.tolist()]
    return np.array([states.index(State(COMPUTE, phase)) for phase in phases], np.int32)


def _work_intervals(
    run: Run, spans: Spans, states: tuple[State, ...], priorities: Mapping[int, StatePriority], axis: Int64
) -> LaneIntervals:
    state_of_kind = np.full(len(schema.KINDS), -1, np.int32)
    priority_of_kind = np.zeros(len(schema.KINDS), np.int32)
    for kind, state_priority in priorities.items():
        state_of_kind[kind] = states.index(state_priority.state)
        priority_of_kind[kind] = state_priority.priority
    rows = np.flatnonzero((state_of_kind >= 0).take(spans.kind))
    kinds = spans.kind[rows]
    # Modules and users' spans on the host lane run beside the lane and say nothing about it.
    beside = (spans.lane[rows] != schema.COMPUTE) & np.isin(kinds, (schema.MODULE, schema.USER, schema.PHASE))
    rows, kinds = rows[~beside], kinds[~beside]
    state = state_of_kind.take(kinds)
    computing = np.flatnonzero(kinds == schema.REPLAY)
    if len(computing):
        computing = computing[~communicates(spans.take(rows[computing]))]
        state[computing] = _state_of_computing_replays(run, spans.take(rows[computing]), states)
    start, end, shift = spans.start[rows], spans.end[rows], axis[rows]
    return LaneIntervals(start + shift, end + shift, state, priority_of_kind.take(kinds), rows).filled()


def _stalls(
    run: Run,
    spans: Spans,
    rows: Int64,
    ready: Int64,
    roles: Roles,
    role: Int32,
    states: tuple[State, ...],
    axis: Int64,
) -> Stalls:
    wait_of_role = np.array([states.index(State(WAIT, word)) for word in roles.words], np.int32)
    transfer_of_role = np.array([states.index(State(TRANSFER, word)) for word in roles.words], np.int32)
    # A stage that waits for its neighbour, to give or to take, is in the pipeline's bubble.
    bubble = is_p2p(run, spans)[rows] & (role == roles.code(PIPELINE))
    wait = np.where(bubble, states.index(State(BUBBLE)), wait_of_role.take(role)).astype(np.int32)
    start, end, shift = spans.start[rows], spans.end[rows], axis[rows]
    ready = np.clip(ready, start, end)
    return Stalls(start + shift, ready + shift, end + shift, wait, transfer_of_role.take(role), rows)
