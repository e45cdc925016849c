"""The states of a rank's lane: the columns of the partition."""

from __future__ import annotations

from typing import Final, NamedTuple

from commtrace.trace import schema

COMPUTE: Final = "compute"
WAIT: Final = "exposed wait"
TRANSFER: Final = "exposed transfer"
BUBBLE: Final = "bubble"
DATA: Final = "data"
CHECKPOINT: Final = "checkpoint"
GC: Final = "gc"
MEMORY: Final = "exposed memory"
IDLE: Final = "idle"
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
)
"""The states of every run; those of its roles follow. Unclaimed time is ``other``, or ``idle`` if kernels were traced,
as nothing is missing then.
"""


class StatePriority(NamedTuple):
    """The state of a kind of span; where spans overlap, the highest priority counts."""

    state: State
    priority: int


STATE_OF_KIND: Final = {
    schema.MODULE: StatePriority(State(COMPUTE, "other"), 0),
    schema.USER: StatePriority(State(COMPUTE, "other"), 1),
    schema.PHASE: StatePriority(State(COMPUTE, "other"), 1),
    schema.FORWARD: StatePriority(State(COMPUTE, "forward"), 2),
    schema.BACKWARD: StatePriority(State(COMPUTE, "backward"), 2),
    schema.RECOMPUTE: StatePriority(State(COMPUTE, "recompute"), 2),
    schema.OPTIMIZER: StatePriority(State(COMPUTE, "optimizer"), 2),
    schema.EVALUATION: StatePriority(State(COMPUTE, "evaluation"), 3),
    schema.DATA: StatePriority(State(DATA), 4),
    schema.CHECKPOINT: StatePriority(State(CHECKPOINT), 5),
    schema.GC: StatePriority(State(GC), 7),
}
"""Without stalls (priority 6): their state depends on their role. At equal priority the innermost span wins."""

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
