"""Identity of a process group across ranks.

Group names are per-process strings and may differ between members. The set of members, and the order in which groups of
the same members were created, are equal on every member, so they identify a group here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

UNKNOWN_ROLE: Final = "unknown"
"""Of a group of which nobody said what it is for."""


class Group(NamedTuple):
    """A process group as recorded by one rank.

    Attributes:
        id: 63-bit number that is equal on every member (see :func:`group_id`).
        ranks: global ranks of the members, ascending.
        ordinal: position among the groups of the same members, in order of creation.
        role: what the group is for, in the field's words: ``tp``, ``pp``, ``dp``, ``world``, …
        name: the name that torch gave to the group in this process.
        description: ``group_desc`` of the group; empty where there is none.
        backend: ``nccl``, ``gloo``, …
    """

    id: int
    ranks: tuple[int, ...]
    ordinal: int
    role: str
    name: str = ""
    description: str = ""
    backend: str = ""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


def group_id(ranks: Sequence[int], ordinal: int) -> int:
    """Return a number for the ``ordinal``-th group with these members: equal on all ranks without communication.

    The first 63 bits of a BLAKE2b digest: with 100,000 groups the chance of any collision is below 10⁻⁹.
    """
    text = ",".join(map(str, sorted(ranks))) + f";{ordinal}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
