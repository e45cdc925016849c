"""Process groups as ranks tell them to each other: thousands of members in three numbers where that says the same."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from commtrace.live.monitoring.declared import Count, Key, Rank, Text, WorldSize
from commtrace.trace.metadata import Group


class RankRange(Struct, frozen=True, array_like=True):
    """The members of a regular group."""

    begin: Rank
    end: WorldSize
    step: WorldSize

    @property
    def ranks(self) -> range:
        return range(self.begin, self.end, self.step)


class GroupMembers(Struct, frozen=True, omit_defaults=True):
    """A process group, see :class:`commtrace.trace.metadata.Group`.

    Attributes:
        regular: the members of a regular group, which may be thousands; else ``members`` has them.
    """

    id: Key
    regular: RankRange | None
    members: tuple[Rank, ...]
    ordinal: Count
    role: Text
    name: Text = ""
    description: Text = ""
    backend: Text = ""

    @property
    def ranks(self) -> Sequence[int]:
        """The members, ascending."""
        return self.members if self.regular is None else self.regular.ranks


def regular_range(ranks: Sequence[int]) -> RankRange | None:
    """Return the ranks as a range; None where they are none."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    regular = range(ranks[0], ranks[-1] + 1, step) if step > 0 else ()
    return RankRange(ranks[0], ranks[-1] + 1, step) if list(regular) == list(ranks) != [] else None


def group_members(group: Group) -> GroupMembers:
    """Return what is told of a group: its members and what it is for."""
    regular = regular_range(group.ranks)
    return GroupMembers(group.id, regular, () if regular else group.ranks, group.ordinal, group.role)
