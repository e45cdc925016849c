"""The communications of a program: which launches belong together, and how much of each was not waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.matching.operations import codes_named
from commtrace.analysis.replay.lanes import Launches
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64

_ROOT_FIRST: Final = ("broadcast", "scatter")
"""Collectives whose members need the root only, not one another."""

_NEVER: Final = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Transfers:
    """The part of every communication, per participant, that is not waiting. Columns of equal length.

    Attributes:
        rank: the participant.
        row: its row of the communication.
        step: index into the steps of the program.
        join: number shared by the participants of one communication.
        participants: how many of them were found.
        name, bytes: of its row.
        ns: measured end minus latest start; its own duration where ``eager``.
    """

    rank: Int32
    row: Int32
    step: Int32
    join: Int64
    participants: Int64
    name: Int32
    bytes: Int64
    eager: Bool
    ns: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Joins:
    """All communications. Columns are aligned with the launches.

    Attributes:
        count: how many joins there are, brackets included.
        step: of each join, index into the steps of the program.
        helps: the join that the launch helps to start; −1 where others do not wait for it.
        waits_for: the join that it ends after.
        members: from the join of one communication to that of a bracket that it is part of.
    """

    count: int
    step: Int64
    helps: Int64
    waits_for: Int64
    members: tuple[Int64, Int64]
    transfers: Transfers


def join_launches(run: Run, launches: Launches, *, clocks_agree: bool) -> Joins:
    """Return which launches of different ranks are one communication, and how long each took after its last start."""
    _, join = grouped(_communication_keys(launches, clocks_agree=clocks_agree))
    count = int(join.max()) + 1 if len(join) else 0
    latest, helps = _latest_start(run, launches, join, count)
    if not clocks_agree:
        latest = launches.last_start

    bracket, sources = _brackets(launches)
    waits_for = join
    if len(sources):
        waits_for = np.where(bracket >= 0, count + bracket, join)
        shared = np.full(int(bracket.max()) + 1, _NEVER)
        np.maximum.at(shared, bracket[sources], latest[sources])
        latest = np.where(bracket >= 0, shared[bracket], latest)
    eager = launches.end < latest
    transfers = Transfers(
        rank=launches.rank,
        row=launches.row,
        step=launches.step,
        join=join,
        participants=np.bincount(join, minlength=count)[join],
        name=launches.name,
        bytes=launches.bytes,
        eager=eager,
        ns=launches.end - np.where(eager, launches.start, latest),
    )
    step = np.empty(count + int(bracket.max(initial=-1)) + 1, np.int64)
    step[join] = step[waits_for] = launches.step
    return Joins(len(step), step, helps, waits_for, (join[sources], waits_for[sources]), transfers)


def _latest_start(run: Run, launches: Launches, join: Int64, count: int) -> tuple[Int64, Int64]:
    """Of each launch: when the last one had started that it needs, and the join that it itself helps to start."""
    last_start = np.full(count, _NEVER)
    needs_root = codes_named(run, launches.name, _ROOT_FIRST) & (launches.kind == schema.COLLECTIVE)
    if not needs_root.any():
        np.maximum.at(last_start, join, launches.start)
        return last_start[join], join
    supplies = ~needs_root | (launches.peer == launches.rank) | (launches.peer < 0)
    np.maximum.at(last_start, join[supplies], launches.start[supplies])
    latest = np.where(needs_root, np.maximum(last_start[join], launches.start), last_start[join])
    return latest, np.where(supplies, join, -1)


def _communication_keys(launches: Launches, *, clocks_agree: bool) -> Int64:
    """Return numbers that are equal for the participants, in one step, of one communication."""
    bucket = launches.bucket
    alone = (bucket < 0) | (~launches.complete & (not clocks_agree))
    if not alone.any():
        return pack([bucket, launches.step])
    return pack([np.where(alone, -1, bucket), launches.step, np.where(alone, np.arange(len(bucket)), -1)])


def _brackets(launches: Launches) -> tuple[Int64, Int64]:
    """Return the bracket of each point-to-point row that shares its times with others, else −1; and the rows that have
    one.

    Members of a bracket have consecutive ids on their rank, and ``op_in_seq`` counts them from 0.
    """
    p2p = np.flatnonzero(launches.kind == schema.P2P)
    bracket = np.full(len(launches), -1, np.int64)
    if not len(p2p) or not launches.op_in_seq[p2p].any():
        return bracket, np.zeros(0, np.int64)
    rank, step = launches.rank, launches.step
    ordered = p2p[np.lexsort((launches.id[p2p], step[p2p], rank[p2p]))]
    begins = (launches.op_in_seq[ordered] == 0) | (np.diff(pack([rank[ordered], step[ordered]]), prepend=-1) != 0)
    number = np.cumsum(begins) - 1
    several = np.bincount(number)[number] > 1
    members = ordered[several]
    _, bracket[members] = np.unique(number[several], return_inverse=True)
    return bracket, members
