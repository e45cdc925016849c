"""Summarise steps with the arithmetic of the analysis, on a run of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.partition import StepTimes, step_times
from commtrace.analysis.breakdown.states import (
    BETWEEN_STEPS,
    BUBBLE,
    CHECKPOINT,
    COMPUTE,
    DATA,
    GC,
    LAUNCH_BOUND_PHASES,
    PHASES,
    TRANSFER,
    UNKNOWN_TIME,
    WAIT,
    State,
    states_of,
)
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factor
from commtrace.analysis.communication.calls import CallRows, CallTable, calls_of_rows
from commtrace.analysis.keys import concatenated_ranges, grouped_rows, pack, sort_groups
from commtrace.analysis.matching.match import Matches, unmatched
from commtrace.analysis.matching.operations import communication_rows, unfinished_rows
from commtrace.analysis.matching.roles import RankRoles, Roles, find_roles
from commtrace.live.gil import GilYield
from commtrace.live.rank import LiveRank
from commtrace.live.summary import (
    BETWEEN,
    ENDING_TOGETHER,
    LARGER,
    SIZES,
    UNKNOWN,
    WITHIN,
    DeviceMemory,
    GroupSummary,
    MessageSummary,
    OperationSummary,
    StepSummary,
)
from commtrace.trace import schema
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

_LARGE_PRIME: Final = 7_919


@dataclass(frozen=True, slots=True)
class SummaryInput:
    """The input for the summaries of some steps."""

    names: list[str]
    spans: Spans  # the rows of the steps, everything that overlaps them, and the communications that they count
    steps: Int64  # the rows of the steps, in the order of their summaries
    owner: Int64  # the index of each row's step in steps, negative without: a communication counts only there
    details: Mapping[int, str]  # JSON extras of communications, by id


class StepExtras(NamedTuple):
    """The fields of a :class:`StepSummary` that are not in spans."""

    spans: int
    overhead_ns: int
    dropped: Mapping[str, int]
    counts: Mapping[str, float]
    device: DeviceMemory | None


@dataclass(frozen=True, slots=True)
class _RelevantRows:
    """The relevant rows; their ``step`` column has the index of the step."""

    names: list[str]
    spans: Spans
    roles: RankRoles
    words: Sequence[str]
    unfinished: Bool


@dataclass(frozen=True, slots=True)
class _Stalls:
    """The stalls of steps: index of the step, row and ns; each pair once."""

    step: Int64
    row: Int64
    ns: Int64


def summarise(
    source: SummaryInput, rank: LiveRank, extras: Sequence[StepExtras], gil_yield: GilYield
) -> list[StepSummary]:
    """Return the summaries of some steps, with ``extras`` by step."""
    chosen = _relevant(source)
    spans = source.spans.take(chosen)
    spans = spans.replace(step=source.owner[chosen].astype(np.int32))
    trace = RankTrace(rank.metadata, spans, dict(rank.marks.groups), details=source.details)
    run = Run(Path(), {rank.rank: trace}, source.names)
    (block,) = run.blocks
    matches = unmatched(spans)
    roles = find_roles(run)
    gil_yield.maybe_yield()
    times = step_times(run, block, Matches({rank.rank: matches}), roles)
    gil_yield.maybe_yield()
    known = _RelevantRows(source.names, spans, roles.ranks[rank.rank], roles.words, unfinished_rows(trace))
    position = spans.step[times.row].astype(np.int64)
    stalls = _Stalls(position[times.stall_step], times.stall_row, times.stall_ns)
    calls = calls_of_rows(CallRows(block, matches, known.roles, np.zeros((len(spans), 2), np.int64), known.unfinished))
    count = len(source.steps)
    bus = _on_the_bus(calls, known.names)
    places = _places(calls, known.spans, rank)
    operations: list[list[OperationSummary]] = [[] for _ in range(count)]
    for at, operation in _operations(calls, stalls, known, bus, _expected(calls, known, rank, bus, places)):
        operations[at].append(operation)
    messages: list[list[MessageSummary]] = [[] for _ in range(count)]
    for at, message in _messages(calls, known, bus, places):
        messages[at].append(message)
    gil_yield.maybe_yield()
    collectives: list[list[GroupSummary]] = [[] for _ in range(count)]
    for at, collective in _collectives(stalls, known, source.spans.step[source.steps]):
        collectives[at].append(collective)
    parts = _Parts.of(times, position, roles)
    start = source.spans.start[source.steps].tolist()
    wall = np.maximum(source.spans.end[source.steps] - source.spans.start[source.steps], 0).tolist()
    number = source.spans.step[source.steps].tolist()
    return [
        _summary(
            rank,
            number[at],
            start[at],
            wall[at],
            parts.of_step(at),
            tuple(sorted(operations[at], key=lambda one: (one.operation, one.role))),
            tuple(sorted(messages[at], key=lambda one: (one.operation, one.nodes, one.up_to))),
            tuple(collectives[at]),
            extras[at],
        )
        for at in range(count)
    ]


class _StepParts(NamedTuple):
    compute: list[int]
    data: int
    checkpoint: int
    gc: int
    between: int
    stalled: int
    launch_bound: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class _Parts:
    """The time of each step in its states, ns; ``compute`` by phase."""

    compute: list[list[int]]
    data: list[int]
    checkpoint: list[int]
    gc: list[int]
    between: list[int]
    stalled: list[int]
    launch_bound: list[dict[str, int] | None]

    @classmethod
    def of(cls, times: StepTimes, position: Int64, roles: Roles) -> _Parts:
        states = states_of(roles.words)
        ns = times.ns[np.argsort(position)]
        stalled = [column for column, state in enumerate(states) if state.kind in (WAIT, TRANSFER, BUBBLE)]
        phases = [states.index(State(COMPUTE, phase)) for phase in PHASES]
        data, checkpoint, gc, between = (
            ns[:, states.index(State(kind))].tolist() for kind in (DATA, CHECKPOINT, GC, BETWEEN_STEPS)
        )
        waited = [
            None if own[0] == UNKNOWN_TIME else dict(zip(LAUNCH_BOUND_PHASES, own, strict=True))
            for own in times.launch_bound_ns[np.argsort(position)].tolist()
        ]
        exposed = ns[:, stalled].sum(axis=1).tolist()
        return cls(ns[:, phases].tolist(), data, checkpoint, gc, between, exposed, waited)

    def of_step(self, at: int) -> _StepParts:
        columns = (self.compute, self.data, self.checkpoint, self.gc, self.between, self.stalled, self.launch_bound)
        return _StepParts._make(column[at] for column in columns)


def _summary(
    rank: LiveRank,
    step: int,
    start_ns: int,
    duration_ns: int,
    parts: _StepParts,
    operations: tuple[OperationSummary, ...],
    messages: tuple[MessageSummary, ...],
    collectives: tuple[GroupSummary, ...],
    extras: StepExtras,
) -> StepSummary:
    exposed = _exposed_by_role(operations)
    bubble = sum(one.stalled_ns for one in operations if one.is_pipeline_transfer)
    assert parts.stalled == sum(exposed.values()) + bubble, "every stall has one operation"
    known = sum(parts.compute) + parts.stalled + parts.data + parts.checkpoint + parts.gc + parts.between
    return StepSummary(
        run_id=rank.run_id,
        rank=rank.rank,
        step=step,
        start_ns=start_ns,
        duration_ns=duration_ns,
        compute_ns=dict(zip(PHASES, parts.compute, strict=True)),
        exposed_ns=exposed,
        bubble_ns=bubble,
        data_ns=parts.data,
        checkpoint_ns=parts.checkpoint,
        gc_ns=parts.gc,
        between_ns=parts.between,
        other_ns=duration_ns - known,
        operations=operations,
        messages=messages,
        collectives=collectives,
        spans=extras.spans,
        dropped=extras.dropped,
        overhead_ns=extras.overhead_ns,
        counts=extras.counts,
        device=extras.device,
        launch_bound_ns=parts.launch_bound,
    )


def _relevant(source: SummaryInput) -> Int64:
    """Return the rows of the steps, of the communications that they count, and of other work that overlaps them."""
    spans, steps = source.spans, source.steps
    communication = communication_rows(spans)
    own = communication & (source.owner >= 0)
    last_end = max(int(spans.end[own].max(initial=spans.end[steps].max())), int(spans.end[steps].max()))
    first_start = min(int(spans.start[own].min(initial=spans.start[steps].min())), int(spans.start[steps].min()))
    near = (spans.start < last_end) & (spans.end > first_start) & (spans.kind != schema.STEP)
    relevant = np.where(communication, own, near)
    relevant[steps] = True
    return np.flatnonzero(relevant)


def _operations(
    calls: CallTable, stalls: _Stalls, known: _RelevantRows, bus: _OnTheBus, expected: _Expected
) -> Iterator[tuple[int, OperationSummary]]:
    """Yield the calls and stalls of each operation and role, with the index of their step."""
    step = np.concatenate([calls.step, stalls.step])
    role = np.concatenate([calls.role, known.roles.role[stalls.row]])
    name = np.concatenate([calls.name, known.spans.name[stalls.row]])
    if not len(step):
        return
    order, begins = sort_groups(pack((step, role, name)))
    of_calls = np.array(
        [
            calls.calls,
            calls.num_bytes,
            calls.duration * calls.finished,
            calls.exposed,
            calls.hidden * calls.finished,
            calls.duration * bus.has_bandwidth,
            calls.duration * expected.is_known,
            ~calls.finished,
        ]
    )
    of_stalls = np.zeros((len(of_calls), len(stalls.ns)), np.int64)
    of_stalls[3] = stalls.ns
    sums = np.add.reduceat(np.concatenate([of_calls, of_stalls], axis=1)[:, order], begins, axis=1).tolist()
    floats = np.zeros((2, len(order)))
    floats[:, : len(calls)] = bus.num_bytes, expected.ns
    added = np.add.reduceat(floats[:, order], begins, axis=1).tolist()
    first = order[begins]
    columns = step[first].tolist(), role[first].tolist(), name[first].tolist(), *sums, *added
    for (
        at, role_code, name_code, count, num_bytes, duration, stalled, hidden, bus_ns, compared_ns, unfinished, moved,
        expected_ns,
    ) in zip(*columns, strict=True):  # fmt: skip
        yield (
            at,
            OperationSummary(
                operation=known.names[name_code],
                role=known.words[role_code],
                count=count,
                num_bytes=num_bytes,
                duration_ns=duration,
                stalled_ns=stalled,
                hidden_ns=hidden,
                bus_bytes=moved,
                bus_ns=bus_ns,
                unfinished=unfinished,
                expected_ns=expected_ns,
                compared_ns=compared_ns,
            ),
        )


_SIZES: Final = np.array(list(SIZES.values()))
_SIZE_WORDS: Final = (*SIZES, LARGER)
_PLACES: Final = (BETWEEN, UNKNOWN, WITHIN)


def _messages(
    calls: CallTable, known: _RelevantRows, bus: _OnTheBus, places: Int64
) -> Iterator[tuple[int, MessageSummary]]:
    """Yield the calls with a bandwidth by step, operation, place and size, with the index of their step."""
    chosen = np.flatnonzero(bus.has_bandwidth)
    if not len(chosen):
        return
    place = places[chosen]
    size = np.searchsorted(_SIZES, calls.num_bytes[chosen])
    step, name = calls.step[chosen], calls.name[chosen]
    order, begins = sort_groups(pack((step, name, place, size)))
    duration = np.add.reduceat(calls.duration[chosen][order], begins).tolist()
    moved = np.add.reduceat(bus.num_bytes[chosen][order], begins).tolist()
    count = np.diff(np.append(begins, len(order))).tolist()
    first = order[begins]
    for at, name_code, place_code, size_code, calls_, duration_ns, bytes_ in zip(
        *(column[first].tolist() for column in (step, name, place, size)), count, duration, moved, strict=True
    ):
        yield (
            at,
            MessageSummary(
                known.names[name_code], _PLACES[place_code], _SIZE_WORDS[size_code], calls_, duration_ns, bytes_
            ),
        )


def _places(calls: CallTable, spans: Spans, rank: LiveRank) -> Int64:
    """Return the index in ``_PLACES`` of each call."""
    own_node, groups = rank.ranks_of_node, rank.marks.groups
    if own_node is None:
        return np.full(len(calls), _PLACES.index(UNKNOWN))
    peers = _peers(calls, spans)
    example, which = grouped_rows((calls.group, peers))
    places = []
    for group, peer in zip(calls.group[example].tolist(), peers[example].tolist(), strict=True):
        members = (peer,) if 0 <= peer < OUTSIDE else groups[group].ranks if group in groups else ()
        is_within = all(member in own_node for member in members)
        places.append(_PLACES.index(UNKNOWN if not members else WITHIN if is_within else BETWEEN))
    return np.array(places, np.int64)[which]


def _peers(calls: CallTable, spans: Spans) -> npt.NDArray[np.integer]:
    """Return the peer of each call, -1 without one: with brackets, merged collectives come after all messages."""
    rows = np.flatnonzero(communication_rows(spans))
    is_collective = spans.kind[rows] == schema.COLLECTIVE
    if not spans.op_in_seq[rows[is_collective]].any():
        return spans.peer[rows]
    messages = spans.peer[rows[~is_collective]]
    return np.append(messages, np.full(len(calls) - len(messages), -1))


class _OnTheBus(NamedTuple):
    """Of each call: S, and that times the bus factor, which is 0 without a bandwidth; the mask of calls with one."""

    moved: Int64
    num_bytes: npt.NDArray[np.float64]
    has_bandwidth: Bool


def _on_the_bus(calls: CallTable, names: Sequence[str]) -> _OnTheBus:
    if not len(calls):
        return _OnTheBus(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.bool_))
    is_uneven = calls.self_bytes >= 0
    example, which = grouped_rows((calls.name, calls.group_size, is_uneven))
    factor, is_bus = np.zeros(len(example)), np.zeros(len(example), np.bool_)
    to_others = np.zeros(len(example), np.bool_)
    for at, (name, size, uneven) in enumerate(
        zip(*(column[example].tolist() for column in (calls.name, calls.group_size, is_uneven)), strict=True)
    ):
        operation = names[name]
        is_bus[at] = size >= 2 and operation not in WITHOUT_BANDWIDTH
        factor[at] = bus_factor(operation, size, uneven=uneven) if is_bus[at] else 0.0
        to_others[at] = uneven and operation == "all_to_all"
    moved = calls.num_bytes - calls.self_bytes * to_others[which]
    # A bandwidth of upper bounds would look like a slow network.
    is_timed = calls.finished & calls.duration_exact & (calls.duration > 0)
    has_bandwidth = is_bus[which] & is_timed & (calls.num_bytes > 0)
    return _OnTheBus(moved, moved * factor[which] * has_bandwidth, has_bandwidth)


class _Expected(NamedTuple):
    """The time of each call at the baseline, ns, 0 where it is not known; the mask of calls of which it is."""

    ns: npt.NDArray[np.float64]
    is_known: Bool


def _expected(calls: CallTable, known: _RelevantRows, rank: LiveRank, bus: _OnTheBus, places: Int64) -> _Expected:
    ns = np.zeros(len(calls))
    comparable = bus.has_bandwidth & (places != _PLACES.index(UNKNOWN))
    if rank.baseline is not None and comparable.any():
        from commtrace.analysis.communication.baseline import GroupKind  # here: few jobs have a baseline

        chosen = np.flatnonzero(comparable)
        example, which = grouped_rows((calls.name[chosen], calls.group_size[chosen], places[chosen], bus.moved[chosen]))
        columns = (one[chosen][example].tolist() for one in (calls.name, calls.group_size, places, bus.moved))
        times = [
            rank.baseline.duration_ns(GroupKind(known.names[name], size, _PLACES[place] == BETWEEN), num_bytes) or 0.0
            for name, size, place, num_bytes in zip(*columns, strict=True)
        ]
        ns[chosen] = np.array(times)[which]
    return _Expected(ns, ns > 0)


def _collectives(stalls: _Stalls, known: _RelevantRows, numbers: Int32) -> Iterator[tuple[int, GroupSummary]]:
    """Yield a call per step, group and collective of ``ENDING_TOGETHER``; ``numbers`` are those of the steps."""
    # Another call in every step, so that over time all calls are compared.
    spans, roles = known.spans, known.roles
    wanted = (spans.kind == schema.COLLECTIVE) & (spans.group >= 0) & (spans.seq >= 0) & (roles.group_size > 1)
    codes = [code for code, name in enumerate(known.names) if name in ENDING_TOGETHER]
    rows = np.flatnonzero(wanted & np.isin(spans.name, codes))
    if not len(rows):
        return
    kind = pack((spans.step[rows], spans.group[rows], spans.name[rows]))
    order, begins = sort_groups(pack((kind, spans.seq[rows])))  # rows of a seq: of a bracket of several operations
    rows, ends = rows[order], np.append(begins[1:], len(order))
    first_seq = np.flatnonzero(np.diff(kind[order][begins], prepend=-1))  # where a step, group and collective begins
    num_seqs = np.diff(np.append(first_seq, len(begins)))
    step = spans.step[rows[begins[first_seq]]]
    chosen = first_seq + numbers[step].astype(np.int64) * _LARGE_PRIME % num_seqs
    first = rows[begins[chosen]]
    call = rows[concatenated_ranges(begins[chosen], ends[chosen])]
    summary = np.repeat(np.arange(len(chosen)), (ends - begins)[chosen])
    finished = np.bincount(summary, known.unfinished[call], len(chosen)) == 0
    duration = np.where(finished, np.maximum(spans.end[first] - spans.start[first], 0), -1)
    num_bytes = np.add.reduceat(np.maximum(spans.bytes[rows], 0), begins[first_seq])
    stalled = _stalled_on(call, summary, len(chosen), stalls, spans)
    columns = (
        step, spans.group[first], spans.name[first], roles.role[first], roles.group_size[first], spans.seq[first],
        duration, stalled, num_bytes,
    )  # fmt: skip
    for at, group, name, role, size, seq, duration_ns, stalled_ns, bytes_ in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        operation = known.names[name]
        yield (
            at,
            GroupSummary(
                group=group,
                operation=ENDING_TOGETHER.index(operation),
                name=operation,
                role=known.words[role],
                size=size,
                seq=seq,
                duration_ns=duration_ns,
                stalled_ns=stalled_ns,
                num_bytes=bytes_,
            ),
        )


def _stalled_on(call: Int64, summary: Int64, count: int, stalls: _Stalls, spans: Spans) -> Int64:
    """Return the stall on each call in its step, ns, by summary."""
    total = np.zeros(count, np.int64)
    if not len(stalls.row):
        return total
    order = np.argsort(spans.id[call])
    ids = spans.id[call][order]
    at = np.minimum(np.searchsorted(ids, spans.stalled_on[stalls.row]), len(ids) - 1)
    of_call = order[at]
    same = (ids[at] == spans.stalled_on[stalls.row]) & (spans.step[call[of_call]] == stalls.step)
    np.add.at(total, summary[of_call[same]], stalls.ns[same])
    return total


def _exposed_by_role(operations: Sequence[OperationSummary]) -> dict[str, int]:
    exposed: dict[str, int] = {}
    for one in operations:
        if one.exposed_ns:
            exposed[one.role] = exposed.get(one.role, 0) + one.exposed_ns
    return exposed
