"""Keeps the count of spans that a rank could not write before its end.

A full disk nearly always has room for an empty file, so the count is in the name of one, ``lost-SESSION-COUNT``.
Without it, readers would take the rank for killed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from commtrace.trace import schema
from commtrace.trace.run import RankTrace

_NAME: Final = re.compile(r"lost-([0-9]{1,19})-([0-9]{1,15})")
_MOST_BYTES: Final = 4_096
_OF_ANY_KIND: Final = "span"


def write_losses(rank_directory: Path, session: int, lost: Mapping[str, int]) -> None:
    """Record that a recording ended in order, and the spans that are in no segment.

    Args:
        rank_directory: of the rank; where it is gone, nothing is written.
        session: of the recording.
        lost: spans, by kind.

    Raises:
        OSError: not even that can be written.
    """
    path = rank_directory / f"lost-{session}-{sum(lost.values())}"
    path.touch()
    with contextlib.suppress(OSError):  # its name says enough
        path.write_text(json.dumps(dict(lost)), encoding="ascii")


def with_losses(trace: RankTrace, rank_directory: Path) -> RankTrace:
    """Return the trace with what :func:`write_losses` has left for it."""
    for path in rank_directory.glob("lost-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[1]) == trace.metadata.session:
            lost = _by_kind(path, int(match[2]))
            kinds = {**trace.dropped, **lost}
            dropped = {kind: trace.dropped.get(kind, 0) + lost.get(kind, 0) for kind in kinds}
            return replace(trace, closed=True, dropped={kind: count for kind, count in dropped.items() if count})
    return trace


def _by_kind(path: Path, total: int) -> dict[str, int]:
    """Return what is in the file, if there was room for it and it fits its name."""
    try:
        status = path.stat()
        text = path.read_text(encoding="ascii") if path.is_file() and status.st_size <= _MOST_BYTES else ""
        lost = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {_OF_ANY_KIND: total}
    is_whole = (
        isinstance(lost, dict)
        and set(lost) <= set(schema.KINDS)
        and all(type(count) is int and count >= 0 for count in lost.values())
        and sum(lost.values()) == total
    )
    return lost if is_whole else {_OF_ANY_KIND: total}
