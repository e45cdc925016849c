"""Types of messages from other processes, with the bounds that msgspec checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from commtrace.trace.metadata import Group

MOST_LIVE_RANKS: Final = 1 << 17
"""More than any job has. Below the limit of files, because memory for a running job grows with it."""

MOST_TEXT: Final = 1_024

Text: TypeAlias = Annotated[str, Meta(max_length=MOST_TEXT)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_LIVE_RANKS)]
WorldSize: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_LIVE_RANKS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Number: TypeAlias = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""Number of a step, a peer or a microbatch; −1 without one."""

Key: TypeAlias = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
"""The id of a process group, or a sequence number."""

Duration: TypeAlias = Annotated[int, Meta(ge=-(10**18), le=10**18)]
"""ns; the sum of a few fits into 64 bits."""

Instant: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""ns of some clock."""

WindowNumber: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Epoch seconds divided by the length of a window."""


class RankRange(Struct, frozen=True, array_like=True):
    begin: Rank
    end: WorldSize
    step: WorldSize

    @property
    def ranks(self) -> range:
        return range(self.begin, self.end, self.step)


class WireGroup(Struct, frozen=True, omit_defaults=True):
    """A process group, see :class:`commtrace.trace.metadata.Group`.

    ``regular`` holds the members of a regular group, perhaps thousands, in three numbers; ``members`` those of others.
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
        return self.members if self.regular is None else self.regular.ranks


def most_group_members(world_size: int) -> int:
    """Return the limit of the members of irregular groups that all ranks of a job send together."""
    # A job has few kinds of groups, and each kind holds every rank once.
    return 4_096 + 64 * world_size


def regular_range(ranks: Sequence[int]) -> RankRange | None:
    """Return the ranks as a range; None if they are not one."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    regular = range(ranks[0], ranks[-1] + 1, step) if step > 0 else ()
    return RankRange(ranks[0], ranks[-1] + 1, step) if list(regular) == list(ranks) != [] else None


def group_members(group: Group) -> WireGroup:
    """Return the members of a group and its role."""
    regular = regular_range(group.ranks)
    return WireGroup(group.id, regular, () if regular else group.ranks, group.ordinal, group.role)
