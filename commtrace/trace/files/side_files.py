"""Keeps the count of spans that a rank could not write before its end.

A full disk nearly always has room for an empty file, so the count is in the name of one, ``lost-SESSION-COUNT``.
Without it, readers would take the rank for killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from commtrace.trace import schema
from commtrace.trace.inputs import decode_json
from commtrace.trace.run import PeerLook, RankTrace

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


_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_MOST_BYTES: Final = 65_536
_OWN_FILES: Final = f"{Path(__file__).resolve().parents[1]}/"


def stack_path(rank_directory: Path, session: int) -> Path:
    """Return the file of one recording."""
    return rank_directory / f"stack-{session}"


def read_stack(path: Path) -> tuple[str, ...]:
    """Return the frames that faulthandler wrote, innermost first, as ``file:line function``; none of commtrace's own.

    A file that is missing, empty or damaged has none.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return ()
    frames = [f"{found[1]}:{found[2]} {found[3]}" for line in lines if (found := _FRAME.fullmatch(line))]
    return tuple(frame for frame in frames if not frame.startswith(_OWN_FILES))


def with_stack(trace: RankTrace, rank_directory: Path) -> RankTrace:
    """Return the trace with its stack, if it has left one and has not ended since."""
    stack = () if trace.closed else read_stack(stack_path(rank_directory, trace.metadata.session))
    return replace(trace, stack=stack) if stack else trace


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
