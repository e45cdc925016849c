"""Turns the rows of a step into its summary, with the arithmetic of the analysis on a run of one rank and one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from commtrace.analysis.bandwidth import WITHOUT_BANDWIDTH, bus_factors, moved_bytes
from commtrace.analysis.calls import Calls, calls_of_rank
from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.match import Matches, unmatched
from commtrace.analysis.operations import communication_rows
from commtrace.analysis.partition import partition
from commtrace.analysis.roles import RankRoles, Roles, find_roles
from commtrace.analysis.states import (
    BUBBLE,
    CHECKPOINT,
    COMPUTE,
    DATA,
    GC,
    PHASES,
    TRANSFER,
    WAIT,
)
from commtrace.live.rank import LiveRank
from commtrace.live.summary import ENDING_TOGETHER, GroupSummary, OperationSummary, StepSummary
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64, Spans

_LARGE_PRIME: Final = 7_919


@dataclass(frozen=True, slots=True)
class StepWindow:
    """What a step's summary is made of.

    Attributes:
        names: what the codes in ``spans`` stand for.
        spans: the step's own row, everything that overlaps it, and the communications that it counts.
        own: which communications it counts.
        details: JSON extras of communications, by id.
    """

    names: list[str]
    spans: Spans
    own: Bool
    details: Mapping[int, str]


def summarise(window: StepWindow, step: int, start_ns: int, end_ns: int, rank: LiveRank, **told: Any) -> StepSummary:
    """The summary of one step.

    Args:
        window: around the step.
        step: its number.
        start_ns, end_ns: of its row.
        rank: whose it is.
        told: fields of :class:`StepSummary` that spans do not tell.
    """
    spans = window.spans.take(_relevant(window, start_ns, end_ns))
    trace = RankTrace(rank.metadata, spans, dict(rank.marks.groups), details=window.details)
    run = Run(Path(), {rank.rank: trace}, window.names)
    matches = unmatched(spans)
    roles = find_roles(run)
    times = partition(run, Matches({rank.rank: matches}), roles)
    ns = times.ns[0]
    total = {state: int(time) for state, time in zip(times.states, ns, strict=True)}

    def of(kind: str) -> int:
        return sum(time for state, time in total.items() if state.kind == kind)

    calls = Calls.concatenate(calls_of_rank(trace, matches, times.stalled_ns[rank.rank], roles.ranks[rank.rank]))
    operations = _operations(calls, window.names, roles)
    bubble = of(BUBBLE) + sum(one.stalled_ns for one in operations if one.is_pipeline_transfer)
    exposed = _exposed_by_role(operations)
    compute = {state.detail: time for state, time in total.items() if state.kind == COMPUTE}
    named = sum(compute.values()) + sum(exposed.values()) + bubble + of(DATA) + of(CHECKPOINT) + of(GC)
    assert of(WAIT) + of(TRANSFER) + of(BUBBLE) == bubble + sum(exposed.values()), "every stall has one operation"
    return StepSummary(
        run_id=rank.run_id,
        rank=rank.rank,
        step=step,
        start_ns=int(times.start[0]),
        duration_ns=int(times.wall_ns[0]),
        compute_ns={phase: compute[phase] for phase in PHASES},
        exposed_ns=exposed,
        bubble_ns=bubble,
        data_ns=of(DATA),
        checkpoint_ns=of(CHECKPOINT),
        gc_ns=of(GC),
        other_ns=int(times.wall_ns[0]) - named,
        operations=operations,
        collectives=tuple(
            _collectives(
                window, spans, step, times.stalled_ns[rank.rank].sum(axis=1), roles.ranks[rank.rank], roles.words
            )
        ),
        **told,
    )


def _relevant(window: StepWindow, start_ns: int, end_ns: int) -> Bool:
    """The one step row; what overlaps the step or a communication that it counts; of communications, only those."""
    spans = window.spans
    is_step = spans.kind == schema.STEP
    communication = communication_rows(spans)
    last_end = max(int(spans.end[window.own & communication].max(initial=end_ns)), end_ns)
    first_start = min(int(spans.start[window.own & communication].min(initial=start_ns)), start_ns)
    near = (spans.start < last_end) & (spans.end > first_start)
    this_step = is_step & (spans.start == start_ns) & (spans.end == end_ns)
    return np.asarray(np.where(is_step, this_step, np.where(communication, window.own, near)))


def _operations(calls: Calls, names: Sequence[str], roles: Roles) -> tuple[OperationSummary, ...]:
    if not len(calls):
        return ()
    order, begins = sort_groups(pack((calls.role, calls.name)))
    found = [_operation(calls.take(rows), names, roles) for rows in np.split(order, begins[1:])]
    return tuple(sorted(found, key=lambda one: (one.operation, one.role)))


def _operation(calls: Calls, names: Sequence[str], roles: Roles) -> OperationSummary:
    operation = names[calls.name[0]]
    made = calls.calls > 0
    finished = made & calls.finished
    bus_bytes, bus_ns = 0.0, 0
    if operation not in WITHOUT_BANDWIDTH:
        for size in np.unique(calls.group_size[finished]):
            if size < 2:
                continue
            rows = finished & (calls.group_size == size) & (calls.num_bytes > 0) & (calls.duration > 0)
            moved = moved_bytes(operation, calls.num_bytes[rows], calls.self_bytes[rows])
            bus_bytes += float((moved * bus_factors(operation, int(size), calls.self_bytes[rows])).sum())
            bus_ns += int(calls.duration[rows].sum())
    return OperationSummary(
        operation=operation,
        role=roles.words[calls.role[0]],
        count=int(calls.calls.sum()),
        num_bytes=int(calls.num_bytes.sum()),
        duration_ns=int(calls.duration[finished].sum()),
        stalled_ns=int(calls.exposed.sum()),
        hidden_ns=int(calls.hidden[finished].sum()),
        bus_bytes=bus_bytes,
        bus_ns=bus_ns,
        unfinished=int((made & ~calls.finished).sum()),
    )


def _collectives(
    window: StepWindow, spans: Spans, step: int, stalled_ns: Int64, roles: RankRoles, words: Sequence[str]
) -> Iterator[GroupSummary]:
    """Of each group and collective that ends on all members at once, one call: another one in every step."""
    codes = [code for code, name in enumerate(window.names) if name in ENDING_TOGETHER]
    wanted = (spans.kind == schema.COLLECTIVE) & (spans.group >= 0) & (spans.seq >= 0) & (roles.group_size > 1)
    rows = np.flatnonzero(wanted & np.isin(spans.name, codes))
    if not len(rows):
        return
    order, begins = sort_groups(pack((spans.group[rows], spans.name[rows])))
    for own in np.split(rows[order], begins[1:]):
        seqs = np.unique(spans.seq[own])
        seq = seqs[step * _LARGE_PRIME % len(seqs)]
        call = own[spans.seq[own] == seq]  # several rows where it is a bracket of several operations
        ids, first = spans.id[call], call[0]
        finished = not any("unfinished" in window.details.get(number, "") for number in ids.tolist())
        stalls = (spans.kind == schema.STALL) & np.isin(spans.stalled_on, ids)
        name = window.names[spans.name[first]]
        yield GroupSummary(
            group=int(spans.group[first]),
            operation=ENDING_TOGETHER.index(name),
            name=name,
            role=words[roles.role[first]],
            size=int(roles.group_size[first]),
            seq=int(seq),
            duration_ns=max(int(spans.end[first] - spans.start[first]), 0) if finished else -1,
            stalled_ns=int(stalled_ns[stalls].sum()),
            num_bytes=int(np.maximum(spans.bytes[own], 0).sum()),
        )


def _exposed_by_role(operations: Sequence[OperationSummary]) -> dict[str, int]:
    exposed: dict[str, int] = {}
    for one in operations:
        if one.exposed_ns:
            exposed[one.role] = exposed.get(one.role, 0) + one.exposed_ns
    return exposed
