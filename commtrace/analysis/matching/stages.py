"""Find which ranks do the same work in a pipeline whose stages no framework tells.

A stage works on what another rank sent it before it sends its own first message of a step: the rank that sent it is one
stage nearer to the input. Where ranks pass something on in a ring, as in context parallelism, every rank sends before
anything has arrived, or passes on at once what has: nobody works on another's message, and all do the same work. Ranks
that are equally far from the input do the same work if they share a group, of gradients or of tensor parallelism, whose
members are all equally far.

>>> classes_of({0: Flow(-1, (7,)), 1: Flow(0, (8,)), 2: Flow(-1, (7,)), 3: Flow(2, (8,))})
{0: 0, 1: 1, 2: 0, 3: 1}
>>> classes_of({0: Flow(-1, (7,)), 1: Flow(-1, (7,))})
{}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.findings.formatting import format_ranks
from commtrace.trace import schema
from commtrace.trace.run import PIPELINE, RankTrace, Run, stage_in_groups, told_stage
from commtrace.trace.spans import Spans

STEPS: Final = 8
"""The first steps with messages, which say where a rank is: it does not move."""

_WORKS: Final = 0.25
"""A rank works on a message if it does so for this share of its usual time between messages before it sends its own.
What goes round a ring is passed on at once."""

_AT_ONCE: Final = 0.02
"""And at least for this share of the whole step by the number of messages: of a single one in a step, the work between
messages is only what it takes to pass it on."""

MOST_GROUPS: Final = 64
"""Limit of the groups of a flow."""

_MOST_NAMED: Final = 8
"""Limit of the sets of ranks in a sentence."""

_LATE: Final = 2
"""Later steps after which no row of an earlier one comes: a communication is recorded when it has ended."""

_SENT, _RECEIVED, _NO_CODE = 1, 2, -2

_LOOKED_AT: Final = (schema.STEP, schema.P2P, schema.COLLECTIVE, schema.STALL)


class Flow(NamedTuple):
    """What a rank's messages and groups say of its place in a pipeline."""

    sender: int = -1  # the rank on whose message it works before it sends its first one of a step; −1: none
    groups: tuple[int, ...] = ()  # whose collectives it takes part in, by id, ascending

    @property
    def is_fed(self) -> bool:
        """Return whether the rank works on messages: it is a stage of a pipeline, and not the first one."""
        return self.sender >= 0


class FlowFinder:
    """Finds the flow of a rank from its rows, in the order in which they were recorded."""

    def __init__(self) -> None:
        self._rows: list[Spans] = []
        self._steps: set[int] = set()  # with messages
        self._found: Flow | None = None

    def add(self, spans: Spans, names: Sequence[str]) -> None:
        """Take rows; ``names`` are the strings for their codes."""
        if self._found is not None or not len(spans):
            return
        if ((spans.kind == schema.FORWARD) & (spans.stage >= 0)).any():
            self._found = Flow()  # the framework tells the stage of each forward
            return
        chosen = spans.take(np.isin(spans.kind, _LOOKED_AT) & (spans.step >= 0))
        direction = _direction(chosen, names)
        if not self._steps and not direction.any():
            return
        self._rows.append(chosen.replace(name=direction))
        self._steps.update(np.unique(chosen.step[direction > 0]).tolist())
        if len(self._steps) >= STEPS + _LATE:
            self._found = self._flow()
            self._rows.clear()

    @property
    def found(self) -> Flow:
        """Return the flow in the rows so far."""
        return self._flow() if self._found is None else self._found

    def _flow(self) -> Flow:
        if not self._rows:
            return Flow()
        spans = Spans.concatenate(self._rows)
        steps = sorted(self._steps)[:STEPS]
        senders = Counter(_sender(spans.take(spans.step == step)) for step in steps)
        groups = np.unique(spans.group[(spans.kind == schema.COLLECTIVE) & (spans.group >= 0)])[:MOST_GROUPS]
        return Flow(max(senders, key=lambda sender: (senders[sender], -sender)), tuple(groups.tolist()))


def _direction(spans: Spans, names: Sequence[str]) -> npt.NDArray[np.int32]:
    code = {name: number for number, name in enumerate(names)}
    is_message = (spans.kind == schema.P2P) & (spans.peer >= 0)
    sent, received = (is_message & (spans.name == code.get(name, _NO_CODE)) for name in ("send", "recv"))
    return np.where(sent, _SENT, np.where(received, _RECEIVED, 0)).astype(np.int32)


def _sender(step: Spans) -> int:
    """Return the rank on whose message this one works in a step before it sends its own first; −1 without."""
    sent, received = np.flatnonzero(step.name == _SENT), np.flatnonzero(step.name == _RECEIVED)
    if not len(sent) or not len(received):
        return -1
    first = received[np.argmin(step.end[received])]
    arrived, sends = int(step.end[first]), int(step.start[sent].min())
    if arrived > sends:
        return -1
    messages = step.start[(step.name == _SENT) | (step.name == _RECEIVED)]
    # What comes before the first message and behind the last one (the optimizer, input) says nothing of the messages.
    from_first_to_last = _worked_ns(step, int(messages.min()), int(messages.max()))
    of_step = _worked_ns(step, int(step.start.min()), int(step.end.max()))
    least = max(_WORKS * from_first_to_last, _AT_ONCE * of_step) / len(messages)
    return int(step.peer[first]) if _worked_ns(step, arrived, sends) >= least else -1


def _worked_ns(step: Spans, begin: int, end: int) -> int:
    """Return the time between two instants in which the rank did not wait for communication, ns."""
    stalls = step.kind == schema.STALL
    waited = np.minimum(step.end[stalls], end) - np.maximum(step.start[stalls], begin)
    return end - begin - int(np.maximum(waited, 0).sum())


def classes_of(flows: Mapping[int, Flow]) -> dict[int, int]:
    """Return, by rank, numbers that are equal for ranks that do the same work, nearest to the input first.

    Empty if no rank works on the messages of another: then all do the same.
    """
    if not any(flow.is_fed for flow in flows.values()):
        return {}
    depths = {rank: _depth(flows, rank) for rank in flows}
    members: dict[int, list[int]] = {}
    for rank, flow in flows.items():
        for group in flow.groups:
            members.setdefault(group, []).append(rank)
    same = _JoinedRanks()
    for ranks in members.values():
        of_members = {depths[rank] for rank in ranks}
        if len(of_members) == 1 and None not in of_members:
            same.join(ranks)
    firsts = sorted({same.first(rank) for rank in flows}, key=lambda rank: (_order(depths[rank]), rank))
    number = {first: position for position, first in enumerate(firsts)}
    return {rank: number[same.first(rank)] for rank in sorted(flows)}


class _JoinedRanks:
    """Sets of ranks that grow together."""

    def __init__(self) -> None:
        self._lower: dict[int, int] = {}  # a lower rank of the same set, of all ranks but the lowest

    def first(self, rank: int) -> int:
        """Return the lowest rank of the set of a rank."""
        while rank in self._lower:
            lower = self._lower[rank]
            if lower in self._lower:
                self._lower[rank] = self._lower[lower]
            rank = lower
        return rank

    def join(self, ranks: Sequence[int]) -> None:
        firsts = {self.first(rank) for rank in ranks}
        self._lower.update({first: min(firsts) for first in firsts if first > min(firsts)})


def _depth(flows: Mapping[int, Flow], rank: int) -> int | None:
    """Return the number of ranks that work on something before this rank does; None if one of them is not known."""
    depth, at = 0, rank
    while flows[at].is_fed:
        at, depth = flows[at].sender, depth + 1
        if at not in flows or depth > len(flows):
            return None
    return depth


def _order(depth: int | None) -> float:
    return np.inf if depth is None else depth


def with_classes(run: Run, flows: Mapping[int, Flow] | None = None) -> Run:
    """Return the run with the classes of its ranks, unless a framework told the stages, or there are none.

    ``flows`` are those of its ranks, if they are known.
    """
    if any(told_stage(trace) is not None for trace in run.ranks.values()):
        return run
    if flows is None:
        flows = {rank: _flow_of_rank(trace, run.names) for rank, trace in run.ranks.items()}
    return run.with_classes(classes_of(flows))


def are_told(run: Run) -> bool:
    """Return whether a framework or the user told the stages, or there are none: then stages can be compared."""
    return all(
        trace.work_class is None
        and (PIPELINE in trace.coordinates or stage_in_groups(trace.rank, trace.groups.values()) is None)
        for trace in run.ranks.values()
    )


def not_told(classes: Mapping[int, int]) -> str:
    """Say which ranks were compared with each other, by the class of each, and how to tell stages."""
    members: dict[int, list[int]] = {}
    for rank, number in classes.items():
        members.setdefault(number, []).append(rank)
    if max(map(len, members.values())) == 1:
        compared = (
            "the messages between ranks show that no two of them do the same work, so none was compared with another: "
            "a slow rank looks the same as a larger share of the model."
        )
    else:
        named = [format_ranks(ranks) for _, ranks in sorted(members.items())]
        shown = "; ".join(named[:_MOST_NAMED]) + ("; …" if len(named) > _MOST_NAMED else "")
        compared = f"by the messages between ranks, these do the same work, and only they were compared: {shown}."
    return (
        f"No framework tells the stages of this pipeline: {compared} Stages were not compared with each other. "
        "COMMTRACE_LAYOUT tells a recording which ranks are one stage: the sizes of the parallel dimensions, that of "
        "neighbouring ranks first, whose product is the number of ranks of the job."
    )


def _flow_of_rank(trace: RankTrace, names: Sequence[str]) -> Flow:
    finder, spans = FlowFinder(), trace.spans
    messages = spans.step[(spans.kind == schema.P2P) & (spans.step >= 0)]
    if len(messages):
        last = np.unique(messages)[: STEPS + _LATE][-1]
        finder.add(spans.take(spans.step <= last), names)
    return finder.found
