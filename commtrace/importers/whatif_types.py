"""The types of operations in traces of the what-if study, in the words of the schema."""

from __future__ import annotations

from typing import Final, NamedTuple

from commtrace.trace import schema

_WORK: Final = {
    "forward-compute": schema.FORWARD,
    "backward-compute": schema.BACKWARD,
    "optimizer": schema.OPTIMIZER,
    "optimizer-clip-main-grad": schema.OPTIMIZER,
    "gc": schema.GC,
}
_MESSAGES: Final = {
    "forward-send": ("send", "forward", 1),
    "forward-recv": ("recv", "forward", -1),
    "backward-send": ("send", "backward", -1),
    "backward-recv": ("recv", "backward", 1),
}
"""By type: operation, name of the group, and the other side's stage relative to the own one."""

_COLLECTIVES: Final = {
    "-reduce-scatter": "reduce_scatter",
    "-all-gather": "all_gather",
    "-all-reduce": "all_reduce",
}


class OperationType(NamedTuple):
    """A type of operation.

    Attributes:
        name: of the spans.
        group: name of the group that a type of communication has to itself, both sides of a message together; empty
            for work of the compute lane.
        distance: to the stage at the other end of a message; 0 for all others.
    """

    kind: int
    name: str
    group: str = ""
    distance: int = 0


def operation_type(optype: str) -> OperationType:
    """Return what operations of this type are; those of no known type are phases of the compute lane."""
    if optype in _MESSAGES:
        return OperationType(schema.P2P, *_MESSAGES[optype])
    for ending, name in _COLLECTIVES.items():
        if optype.endswith(ending):
            return OperationType(schema.COLLECTIVE, name, optype)
    return OperationType(_WORK.get(optype, schema.PHASE), optype)
