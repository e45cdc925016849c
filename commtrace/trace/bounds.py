"""Bounds of what a file or another process may say: the types of the fields of facts.

A number beyond them is damage. Sums and differences of two times still fit into 64 bits.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from commtrace.trace.inputs import MOST_RANKS

LARGEST: Final = 2**62

OUTSIDE: Final = MOST_RANKS
"""A peer of ``OUTSIDE + n`` is the member with rank n in its group, of another world or of an unknown one."""

Time = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Number = Annotated[int, Meta(ge=-1, le=LARGEST)]
Step = Annotated[int, Meta(ge=-1, lt=2**31 - 1)]
EndStep = Annotated[int, Meta(ge=-1, lt=2**31)]
Size = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Peer = Annotated[int, Meta(ge=-1, lt=OUTSIDE + MOST_RANKS)]
Identity = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""The id of a process group; −1 if it is not known."""

GroupId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Word = Annotated[str, Meta(max_length=65_536)]
Frames = Annotated[tuple[Word, ...], Meta(max_length=4096)]
"""``file:line function``, innermost first."""
