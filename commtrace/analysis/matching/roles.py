"""The role of each communication: tp, pp, dp, … from the group tables.

A message has the role of the narrowest pipeline group with both peers: Megatron sends some over the world group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped_rows
from commtrace.analysis.matching.operations import codes_named, communication_rows
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.metadata import Group
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Spans

UNKNOWN: Final = "unknown"
"""Role of an operation on a group without a record."""

PIPELINE: Final = "pp"


@dataclass(frozen=True, slots=True)
class RankRoles:
    """The roles of a rank's span rows; −1 for rows that are neither communication nor stall."""

    role: Int32  # position in Roles.words
    group_size: Int32  # members of the group that gave the role; −1 if unknown
    nodes: Int32  # of its members, or of a message's two ends; −1 if one was not recorded

    def take(self, rows: Bool | slice) -> RankRoles:
        return RankRoles(self.role[rows], self.group_size[rows], self.nodes[rows])


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a run: the words, ascending, and the roles of each rank's rows."""

    words: tuple[str, ...]
    ranks: Mapping[int, RankRoles]

    def code(self, word: str) -> int:
        """Return the position of a word, or −2 (which no row has) if the run does not hold it."""
        return self.words.index(word) if word in self.words else -2


def select_roles(roles: Roles, rows: Mapping[int, Bool | slice]) -> Roles:
    """Return only these rows of these ranks."""
    return Roles(roles.words, {rank: roles.ranks[rank].take(rows_of_rank) for rank, rows_of_rank in rows.items()})


def find_roles(run: Run) -> Roles:
    """Return the role of every communication and stall row."""
    groups = {number: group for trace in run.ranks.values() for number, group in trace.groups.items()}
    words = tuple(sorted({group.role for group in groups.values()} | {PIPELINE, UNKNOWN}))
    of_blocks = [_roles_of_block(run, block, groups, words) for block in run.blocks]
    ranks = {
        rank: roles_of_block.take(rows)
        for block, roles_of_block in zip(run.blocks, of_blocks, strict=True)
        for rank, rows in block.slices().items()
    }
    return Roles(words, ranks)


def role_of(run: Run, trace: RankTrace, group: int, peer: int = schema.NOT_APPLICABLE) -> str:
    """Return the role of one communication of a rank; ``peer`` is given for point-to-point operations only."""
    known = trace.groups if group in trace.groups else {n: g for t in run.ranks.values() for n, g in t.groups.items()}
    pipelines = [group_of_rank for group_of_rank in trace.groups.values() if group_of_rank.role == PIPELINE]
    return _role_and_size(trace.rank, group, peer, known, pipelines)[0]


def is_p2p(run: Run, spans: Spans) -> Bool:
    """Return a mask of point-to-point rows and stalls on them."""
    sides = codes_named(run, spans.name, ("send", "recv"))
    return np.asarray((spans.kind == schema.P2P) | ((spans.kind == schema.STALL) & sides))


def between_stages(run: Run, roles: Roles) -> dict[int, Bool]:
    """Return, by rank, a mask of the pipeline's point-to-point rows and stalls on them."""
    masks: dict[int, Bool] = {}
    for block in run.blocks:
        masks |= block.split(between_stages_of(run, block, roles))
    return masks


def between_stages_of(run: Run, block: Block, roles: Roles) -> Bool:
    """Return a mask of the pipeline's point-to-point rows and stalls on them, of a block."""
    role = block.together({rank: roles.ranks[rank].role for rank in block.ranks})
    return np.asarray(is_p2p(run, block.spans) & (role == roles.code(PIPELINE)))


def _roles_of_block(run: Run, block: Block, groups: Mapping[int, Group], words: tuple[str, ...]) -> RankRoles:
    spans = block.spans
    rows = np.flatnonzero(communication_rows(spans) | (spans.kind == schema.STALL))
    role, size, nodes = (np.full(len(spans), -1, np.int32) for _ in range(3))
    if len(rows):
        rank, group = block.rank()[rows], spans.group[rows]
        peer = np.where(is_p2p(run, spans)[rows], spans.peer[rows], schema.NOT_APPLICABLE)
        # A rank has few partners: decide once for each and hand the decision to the rows.
        example, which = grouped_rows((rank, group, peer))
        decided = _decided(run, groups, zip(*(column[example].tolist() for column in (rank, group, peer)), strict=True))
        role[rows] = np.array([words.index(role_and_size.role) for role_and_size in decided], np.int32)[which]
        size[rows] = np.array([role_and_size.group_size for role_and_size in decided], np.int32)[which]
        nodes[rows] = np.array([role_and_size.nodes for role_and_size in decided], np.int32)[which]
    return RankRoles(role, size, nodes)


class _Decision(NamedTuple):
    role: str
    group_size: int
    nodes: int


def _decided(run: Run, groups: Mapping[int, Group], partners: Iterable[tuple[int, int, int]]) -> list[_Decision]:
    pipelines: dict[int, list[Group]] = {}
    nodes: dict[tuple[int, ...], int] = {}
    decided = []
    for rank, number, peer in partners:
        if rank not in pipelines:
            pipelines[rank] = [group for group in run.ranks[rank].groups.values() if group.role == PIPELINE]
        ends = _ends(rank, groups.get(number), peer)
        if ends not in nodes:
            nodes[ends] = _num_nodes(run, ends)
        decided.append(_Decision(*_role_and_size(rank, number, peer, groups, pipelines[rank]), nodes[ends]))
    return decided


def _ends(rank: int, group: Group | None, peer: int) -> tuple[int, ...]:
    if peer >= 0:
        return (rank, peer)
    return group.ranks if group else ()


def _num_nodes(run: Run, members: tuple[int, ...]) -> int:
    known = [run.ranks[member].metadata.node for member in members if member in run.ranks]
    return len(set(known)) if members and len(known) == len(members) else -1


def _role_and_size(
    rank: int, number: int, peer: int, groups: Mapping[int, Group], pipelines: list[Group]
) -> tuple[str, int]:
    deciding_group = groups.get(number)
    both = [group for group in pipelines if peer >= 0 and rank in group.ranks and peer in group.ranks]
    if both:
        deciding_group = min(both, key=lambda group: group.size)
    return (deciding_group.role, deciding_group.size) if deciding_group else (UNKNOWN, -1)
