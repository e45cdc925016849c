"""What each communication is for: tp, pp, dp, … from the group tables.

The role of a collective is that of its group. Frameworks send some point-to-point messages over groups that are not
made for them (Megatron: the world group), so a message's role is that of the narrowest pipeline group that holds both
peers, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.trace import schema
from commtrace.trace.groups import Group
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Spans

UNKNOWN: Final = "unknown"
"""Role of an operation on a group that no rank told anything about."""

PIPELINE: Final = "pp"


@dataclass(frozen=True, slots=True)
class RankRoles:
    """Aligned with the rank's span rows; −1 where a row is neither a communication nor a stall.

    Attributes:
        role: position in ``Roles.words``.
        group_size: members of the group that gave the role; −1 where it is unknown.
        nodes: how many nodes they are on, of a message its two ends; −1 where a member was not recorded.
    """

    role: Int32
    group_size: Int32
    nodes: Int32

    def take(self, rows: Bool | slice) -> RankRoles:
        """Only these rows."""
        return RankRoles(self.role[rows], self.group_size[rows], self.nodes[rows])


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a run: the words, ascending, and by rank what its rows are for."""

    words: tuple[str, ...]
    ranks: Mapping[int, RankRoles]

    def code(self, word: str) -> int:
        """Position of a word, or −2 (which no row has) if the run does not hold it."""
        return self.words.index(word) if word in self.words else -2


def select_roles(roles: Roles, rows: Mapping[int, Bool | slice]) -> Roles:
    """Only these ranks and of each these rows."""
    return Roles(roles.words, {rank: roles.ranks[rank].take(own) for rank, own in rows.items()})


def find_roles(run: Run) -> Roles:
    """The role of every communication and stall row."""
    groups = {number: group for trace in run.ranks.values() for number, group in trace.groups.items()}
    words = tuple(sorted({group.role for group in groups.values()} | {PIPELINE, UNKNOWN}))
    return Roles(words, {rank: _roles_of_rank(run, trace, groups, words) for rank, trace in run.ranks.items()})


def role_of(run: Run, trace: RankTrace, group: int, peer: int = schema.NOT_APPLICABLE) -> str:
    """The role of one communication of a rank; ``peer`` is given for point-to-point operations only."""
    known = trace.groups if group in trace.groups else {n: g for t in run.ranks.values() for n, g in t.groups.items()}
    pipelines = [own for own in trace.groups.values() if own.role == PIPELINE]
    return _role_and_size(trace.rank, group, peer, known, pipelines)[0]


def is_p2p(run: Run, spans: Spans) -> Bool:
    """Point-to-point rows, and stalls on them."""
    sides = [run.name_code("send"), run.name_code("recv")]
    return np.asarray((spans.kind == schema.P2P) | ((spans.kind == schema.STALL) & np.isin(spans.name, sides)))


def _roles_of_rank(run: Run, trace: RankTrace, groups: Mapping[int, Group], words: tuple[str, ...]) -> RankRoles:
    spans = trace.spans
    rows = np.flatnonzero(np.isin(spans.kind, (schema.COLLECTIVE, schema.P2P, schema.STALL)))
    role = np.full(len(spans), -1, np.int32)
    size = np.full(len(spans), -1, np.int32)
    nodes = np.full(len(spans), -1, np.int32)
    if len(rows):
        of_group = spans.group[rows]
        peer = np.where(is_p2p(run, spans)[rows], spans.peer[rows], schema.NOT_APPLICABLE)
        # A rank has few partners: decide once for each and hand the decision to the rows.
        example, which = grouped(pack((of_group, peer)))
        pipelines = [group for group in trace.groups.values() if group.role == PIPELINE]
        decided = [_role_and_size(trace.rank, int(of_group[at]), int(peer[at]), groups, pipelines) for at in example]
        role[rows] = np.array([words.index(word) for word, _ in decided], np.int32)[which]
        size[rows] = np.array([members for _, members in decided], np.int32)[which]
        ends = [_ends(trace.rank, groups.get(int(of_group[at])), int(peer[at])) for at in example]
        nodes[rows] = np.array([_num_nodes(run, members) for members in ends], np.int32)[which]
    return RankRoles(role, size, nodes)


def _ends(rank: int, group: Group | None, peer: int) -> tuple[int, ...]:
    """The ranks between which bytes move."""
    if peer >= 0:
        return (rank, peer)
    return group.ranks if group else ()


def _num_nodes(run: Run, members: tuple[int, ...]) -> int:
    if not members or not all(member in run.ranks for member in members):
        return -1
    return len({run.ranks[member].metadata.node for member in members})


def _role_and_size(
    rank: int, number: int, peer: int, groups: Mapping[int, Group], pipelines: list[Group]
) -> tuple[str, int]:
    own = groups.get(number)
    both = [group for group in pipelines if peer >= 0 and rank in group.ranks and peer in group.ranks]
    if both:
        own = min(both, key=lambda group: group.size)
    return (own.role, own.size) if own else (UNKNOWN, -1)
