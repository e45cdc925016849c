"""The communication of a recorded run as a program for each rank: what it issues, waits for, and the gaps between.

A gap is the time of the lane between two of these events, whatever the rank did in it. Calls that not all members made
in the chosen steps are left out, because they would never end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.matching.operations import communication_rows
from commtrace.benchmarks.operations import OPERATIONS
from commtrace.errors import ConfigurationError
from commtrace.trace import schema
from commtrace.trace.run import RankTrace

_ISSUED: Final = (*OPERATIONS, "recv", "barrier")
MESSAGES: Final = ("send", "recv")

_Key = tuple[int, ...]


class ReplayedCall(NamedTuple):
    """A communication of a rank."""

    operation: str
    role: str
    ranks: tuple[int, ...]  # of the group
    num_bytes: int  # of the full tensor
    dtype: str  # empty if unknown
    peer: int  # global rank: the other side, or the root; −1 without
    is_async: bool


class CallEvent(NamedTuple):
    """The issue of a call, or the wait for one that was issued before."""

    gap_ns: int  # before it
    call: int  # number of the call in the program
    is_wait: bool
    recorded_ns: int  # how long the rank stood still in it


class Step(NamedTuple):
    """A step of a rank."""

    number: int
    events: tuple[CallEvent, ...]
    rest_ns: int  # gap behind the last event
    recorded_ns: int


class CallProgram(NamedTuple):
    """What one rank does."""

    calls: tuple[ReplayedCall, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of all ranks."""

    ranks: tuple[CallProgram, ...]
    groups: tuple[tuple[int, ...], ...]  # all that are needed, in the order in which every rank makes them
    notes: tuple[str, ...]  # what was left out, in sentences


def programs_of(analysis: Analysis, most_steps: int) -> Programs:
    """Return the programs of the first ``most_steps`` of the steps that count.

    Raises:
        ConfigurationError: a rank is missing, no step counts, or nothing was sent in them.
    """
    run = analysis.run
    if len(run.ranks) != run.world_size:
        missing = sorted(set(range(run.world_size)) - set(run.ranks))
        raise ConfigurationError(
            f"a replay needs all {run.world_size} ranks, and {len(missing)} are missing, rank {missing[0]} first"
        )
    steps = analysis.steps.used[:most_steps]
    if not steps:
        raise ConfigurationError("no step of the run counts, so there is nothing to replay")
    left_out: Counter[str] = Counter()
    rows = {rank: _rows(trace, steps) for rank, trace in run.ranks.items()}
    seen = Counter(key for rank, rows_of_rank in rows.items() for key in _keys(analysis, run.ranks[rank], rows_of_rank))
    programs = tuple(
        _program(analysis, run.ranks[rank], rows_of_rank, steps, seen, left_out) for rank, rows_of_rank in rows.items()
    )
    groups = {call.ranks for program in programs for call in program.calls}
    if not groups:
        raise ConfigurationError("nothing was sent between ranks in these steps, so there is nothing to replay")
    notes = tuple(f"{count} calls are left out: {reason}." for reason, count in sorted(left_out.items()))
    return Programs(programs, tuple(sorted(groups)), notes)


def _rows(trace: RankTrace, steps: Sequence[int]) -> list[int]:
    spans = trace.spans
    rows = np.flatnonzero(communication_rows(spans) & np.isin(spans.step, steps))
    return [int(row) for row in rows]


def _keys(analysis: Analysis, trace: RankTrace, rows: Sequence[int]) -> Iterator[_Key]:
    return (_key(analysis, trace, row) for row in rows)


def _key(analysis: Analysis, trace: RankTrace, row: int) -> _Key:
    """Return what is equal on all ranks that take part in a call."""
    spans = trace.spans
    where = (int(spans.group[row]), int(spans.seq[row]), int(spans.op_in_seq[row]))
    if spans.kind[row] != schema.P2P:
        return where
    name, peer = analysis.run.names[spans.name[row]], int(spans.peer[row])
    return (*where, *((trace.rank, peer) if name == "send" else (peer, trace.rank)))


def _program(
    analysis: Analysis,
    trace: RankTrace,
    rows: Sequence[int],
    steps: Sequence[int],
    seen: Mapping[_Key, int],
    left_out: Counter[str],
) -> CallProgram:
    spans = trace.spans
    calls: list[ReplayedCall] = []
    number_of_row: dict[int, int] = {}
    for row in rows:
        reason = _reason_to_leave_out(analysis, trace, row, seen)
        if reason:
            left_out[reason] += 1
            continue
        number_of_row[row] = len(calls)
        role = analysis.roles.ranks[trace.rank].role[row]
        calls.append(
            ReplayedCall(
                analysis.run.names[spans.name[row]],
                analysis.roles.words[role],
                trace.groups[int(spans.group[row])].ranks,
                max(int(spans.bytes[row]), 0),
                analysis.run.names[spans.dtype[row]] if spans.dtype[row] >= 0 else "",
                int(spans.peer[row]),
                bool(spans.is_async[row]),
            )
        )
    return CallProgram(tuple(calls), tuple(_steps(trace, number_of_row, calls, steps)))


def _reason_to_leave_out(analysis: Analysis, trace: RankTrace, row: int, seen: Mapping[_Key, int]) -> str:
    spans = trace.spans
    name = analysis.run.names[spans.name[row]] if spans.name[row] >= 0 else "an unknown operation"
    group = trace.groups.get(int(spans.group[row]))
    if name not in _ISSUED:
        return f"{name} cannot be issued"
    if group is not None and group.is_over_worlds:
        return "their group has members of other worlds"
    if group is None or spans.seq[row] < 0:
        return "their group or number is unknown"
    if group.size == 1:
        return "their group has one rank"
    if spans.bytes[row] < 0 and name != "barrier":
        return "their bytes are unknown"
    expected = 2 if spans.kind[row] == schema.P2P else group.size
    if seen[_key(analysis, trace, row)] != expected:
        return "not all members made them in these steps"
    return ""


class _TimedCall(NamedTuple):
    start: int
    end: int  # when the rank went on
    call: int
    is_wait: bool


def _steps(
    trace: RankTrace, number_of_row: Mapping[int, int], calls: Sequence[ReplayedCall], steps: Sequence[int]
) -> Iterator[Step]:
    spans = trace.spans
    call_of_id = {int(spans.id[row]): number for row, number in number_of_row.items() if spans.id[row] >= 0}
    timed = []
    for row, number in number_of_row.items():
        start, end = int(spans.start[row]), int(spans.end[row])
        timed.append((int(spans.step[row]), _TimedCall(start, start if calls[number].is_async else end, number, False)))
    for row in np.flatnonzero(spans.kind == schema.STALL).tolist():
        waited = call_of_id.get(int(spans.stalled_on[row]))
        if waited is not None and calls[waited].is_async:
            wait = _TimedCall(int(spans.start[row]), int(spans.end[row]), waited, True)
            timed.append((int(spans.step[row]), wait))
    for step in steps:
        at = np.flatnonzero((spans.kind == schema.STEP) & (spans.step == step))
        if not len(at):
            continue
        begin, end = int(spans.start[at[0]]), int(spans.end[at[-1]])
        # a wait follows the issue of its call, also where both have the same time
        calls_of_step = sorted(
            (timed_call for number, timed_call in timed if number == step),
            key=lambda timed_call: (timed_call.start, timed_call.is_wait),
        )
        now, events = begin, []
        for timed_call in calls_of_step:
            events.append(
                CallEvent(
                    max(timed_call.start - now, 0),
                    timed_call.call,
                    timed_call.is_wait,
                    max(timed_call.end - max(timed_call.start, now), 0),
                )
            )
            now = max(now, timed_call.end)
        yield Step(step, tuple(events), max(end - now, 0), end - begin)
