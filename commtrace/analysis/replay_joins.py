"""The communications of a program: which launches belong together, and how much of each was not waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.match import Matches
from commtrace.analysis.operations import named
from commtrace.analysis.replay_lane import Lane, Launches
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64, Spans

_ROOT_FIRST: Final = ("broadcast", "scatter")
"""Collectives whose members need the root only, not one another."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """The part of every communication, per participant, that is not waiting. Columns of equal length.

    Attributes:
        rank: the participant.
        row: its row of the communication.
        step: index into the steps of the program.
        join: number shared by the participants of one communication.
        participants: how many of them were found.
        ns: measured end minus latest start; its own duration where ``eager``.
    """

    rank: Int64
    row: Int64
    step: Int64
    join: Int64
    participants: Int64
    eager: Bool
    ns: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class RankJoins:
    """The communications of one rank: its launches, and what they are part of. Columns aligned with the launches.

    ``join`` is what the launch helps to start (−1: others do not wait for it), ``waits_for`` what it ends after.
    """

    launches: Launches
    transfer: Int64
    join: Int64
    waits_for: Int64
    eager: Bool
    end: Int64


@dataclass(frozen=True, slots=True)
class Joins:
    """All communications: ``members`` leads from the join of one to that of a bracket that it is part of."""

    count: int
    members: tuple[Int64, Int64]
    transfers: Transfers
    per_rank: list[RankJoins]


def join_launches(run: Run, matches: Matches, traces: Sequence[RankTrace], lanes: Sequence[Lane]) -> Joins:
    """Which launches of different ranks are one communication, and how long each took after its last start."""
    rows = [lane.launches.row for lane in lanes]
    bounds = offsets([len(part) for part in rows])
    spans = Spans.concatenate([trace.spans.take(part) for trace, part in zip(traces, rows, strict=True)])
    rank = np.repeat([trace.rank for trace in traces], np.diff(bounds)).astype(np.int64)
    step = np.concatenate([lane.launches.step for lane in lanes])
    _, join = grouped(_communication_keys(matches, traces, rows, step))
    count = int(join.max()) + 1 if len(join) else 0

    needs_root = named(run, spans, _ROOT_FIRST) & (spans.kind == schema.COLLECTIVE)
    supplies = ~needs_root | (spans.peer == rank) | (spans.peer < 0)
    last_start = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(last_start, join[supplies], spans.start[supplies])
    latest = np.where(needs_root, np.maximum(last_start[join], spans.start), last_start[join])
    if not matches.clocks_agree:
        latest = np.concatenate([matches.ranks[t.rank].last_start[part] for t, part in zip(traces, rows, strict=True)])

    bracket, sources = _brackets(spans, rank, step)
    waits_for = np.where(bracket >= 0, count + bracket, join)
    if len(sources):
        shared = np.full(int(bracket.max()) + 1, np.iinfo(np.int64).min)
        np.maximum.at(shared, bracket[sources], latest[sources])
        latest = np.where(bracket >= 0, shared[bracket], latest)
    eager = spans.end < latest
    transfers = Transfers(
        rank=rank,
        row=np.concatenate(rows),
        step=step,
        join=join,
        participants=np.bincount(join, minlength=count)[join],
        eager=eager,
        ns=spans.end - np.where(eager, spans.start, latest),
    )
    helps = np.where(supplies, join, -1)
    per_rank = [
        RankJoins(
            launches=lane.launches,
            transfer=np.arange(first, end),
            join=helps[first:end],
            waits_for=waits_for[first:end],
            eager=eager[first:end],
            end=spans.end[first:end],
        )
        for lane, first, end in zip(lanes, bounds[:-1], bounds[1:], strict=True)
    ]
    number_of_brackets = int(bracket.max(initial=-1)) + 1
    return Joins(count + number_of_brackets, (join[sources], waits_for[sources]), transfers, per_rank)


def _communication_keys(matches: Matches, traces: Sequence[RankTrace], rows: Sequence[Int64], step: Int64) -> Int64:
    """Numbers that are equal for the participants, in one step, of one communication."""
    own = [matches.ranks[trace.rank] for trace in traces]
    bucket = np.concatenate([match.bucket[part] for match, part in zip(own, rows, strict=True)])
    comparable = np.concatenate([match.complete[part] for match, part in zip(own, rows, strict=True)])
    alone = (bucket < 0) | (~comparable & (not matches.clocks_agree))
    return pack([np.where(alone, -1, bucket), step, np.where(alone, np.arange(len(bucket)), -1)])


def _brackets(spans: Spans, rank: Int64, step: Int64) -> tuple[Int64, Int64]:
    """The bracket of each point-to-point row that shares its times with others, else −1; and the rows that have one.

    Members of a bracket have consecutive ids on their rank, and ``op_in_seq`` counts them from 0.
    """
    bracket = np.full(len(spans), -1, np.int64)
    p2p = np.flatnonzero(spans.kind == schema.P2P)
    if not len(p2p) or not spans.op_in_seq[p2p].any():
        return bracket, np.zeros(0, np.int64)
    ordered = p2p[np.lexsort((spans.id[p2p], step[p2p], rank[p2p]))]
    begins = (spans.op_in_seq[ordered] == 0) | (np.diff(pack([rank[ordered], step[ordered]]), prepend=-1) != 0)
    number = np.cumsum(begins) - 1
    several = np.bincount(number)[number] > 1
    members = ordered[several]
    _, bracket[members] = np.unique(number[several], return_inverse=True)
    return bracket, members


def offsets(sizes: Sequence[int]) -> Int64:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
