"""Where a rank was in which no thread of Python could run any more, kept beside its segments.

A file of its own, ``stack-SESSION``, empty as long as all is well: faulthandler writes it in a handler of a signal,
which needs neither Python's lock nor the recorder. Who ends in order removes it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from commtrace.trace.run import RankTrace

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
