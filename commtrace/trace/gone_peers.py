"""Keeps the ranks of its host that a rank saw end, in order, in a file beside its segments.

``gone-SESSION`` has a line for each look that found somebody gone, ``[at_ns, [ranks]]``, and one without ranks a little
later: the rank that wrote it was still there. Rows would come too late: the launcher kills the rank a tenth of a second
later, or sooner. A rank that ends in order removes its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

from commtrace.trace.inputs import decode_json
from commtrace.trace.run import PeerLook, RankTrace

_MOST_BYTES: Final = 65_536


def note_gone_peers(rank_directory: Path, session: int, at_ns: int, ranks: Collection[int]) -> None:
    """Add a look.

    Args:
        rank_directory: of the rank that looked.
        session: of its recording.
        at_ns: when, on the host's monotonic clock.
        ranks: whose processes it found gone, those of earlier looks left out; none to tell that it is still there.

    Raises:
        OSError: it cannot be written.
    """
    file = os.open(_path(rank_directory, session), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, f"{json.dumps([at_ns, sorted(ranks)])}\n".encode())
    finally:
        os.close(file)


def forget_gone_peers(rank_directory: Path, session: int) -> None:
    """Remove all looks.

    Raises:
        OSError: they cannot be removed.
    """
    _path(rank_directory, session).unlink(missing_ok=True)


def with_gone_peers(trace: RankTrace, rank_directory: Path) -> RankTrace:
    """Return the trace with its looks, as far as the file can be read."""
    path = _path(rank_directory, trace.metadata.session)
    try:
        text = path.read_text(encoding="ascii") if path.stat().st_size <= _MOST_BYTES else ""
        looks: list[PeerLook] = [decode_json(line, PeerLook) for line in text.splitlines()]
    except (OSError, ValueError):
        return trace  # Most have none; of a damaged one nothing is believed.
    ranks = range(trace.metadata.world_size)
    if not all(0 <= look.at_ns < 2**63 and all(rank in ranks for rank in look.ended) for look in looks):
        return trace
    return replace(trace, gone_peers=tuple(looks))


def _path(rank_directory: Path, session: int) -> Path:
    return rank_directory / f"gone-{session}"
