"""Types of what arrives from another process, with their bounds: msgspec checks them where a message is decoded."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

MOST_LIVE_RANKS: Final = 1 << 17
"""More than any job has. Fewer than files may tell of: what is allocated for a running job grows with it."""

MOST_TEXT: Final = 1_024

Text: TypeAlias = Annotated[str, Meta(max_length=MOST_TEXT)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_LIVE_RANKS)]
WorldSize: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_LIVE_RANKS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Number: TypeAlias = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""Of a step, a peer, a microbatch: −1 where there is none."""

Key: TypeAlias = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
"""The id of a process group, or a sequence number."""

Duration: TypeAlias = Annotated[int, Meta(ge=-(10**18), le=10**18)]
"""ns; a few of them can be added up in 64 bits."""

Instant: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""ns of some clock."""

WindowNumber: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Epoch seconds divided by the length of a window."""
