"""Read small files beside a rank's segments, for facts that a rank can no longer write as rows.

* ``lost-SESSION-COUNT``: the recording was closed, but this many spans were not written. The count is in the name,
  because even a full disk nearly always has room for an empty file.
* ``exit-SESSION-CODE``: the command of ``commtrace run`` ended with this code; the rank had not closed its files.
  ``exit-SESSION-0-shell``: a shell stood between them, as in ``sh -c 'torchrun … || true'``; its 0 says nothing.
* ``ended-SESSION-SIGNAL``: the rank ended without closing its files. Before, its process group had been sent this
  signal, by which launchers end what is left of a job; 0: none.
* ``stack-SESSION``: stack of the main thread, from faulthandler, which needs no GIL, copied by the process beside the
  rank.
* ``gone-SESSION``: ``[at_ns, [ranks]]`` for each look that found ranks of the host gone, and one without ranks a little
  later. Rows would come too late: the launcher kills this rank within about a tenth of a second.

A rank that ends cleanly removes the stack and the looks.

``hang-SESSION-NNN.json`` is written each time a rank makes no progress (:mod:`commtrace.trace.hang_report`); before it
was ``hang-NNN.json``, which a restart wrote over.

:mod:`.rank_files` writes them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from commtrace.trace import schema
from commtrace.trace.files.rank_files import looks_path, stack_path
from commtrace.trace.hang_report import WrittenHang
from commtrace.trace.inputs import decode_json, open_file, printable_json, read_file
from commtrace.trace.run import PeerLook, RankTrace

_EXIT: Final = re.compile(r"exit-([0-9]{1,19})-([0-9]{1,3})(-shell)?")
_ENDED: Final = re.compile(r"ended-([0-9]{1,19})-([0-9]{1,2})")
_LOSSES: Final = re.compile(r"lost-([0-9]{1,19})-([0-9]{1,15})")
_OF_ANY_KIND: Final = "span"
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_OWN_FILES: Final = f"{Path(__file__).resolve().parents[2]}/"
_MOST_BYTES: Final = 65_536
_MOST_BYTES_OF_HANG: Final = 4_000_000


def with_side_files(trace: RankTrace, rank_directory: Path) -> RankTrace:
    """Add to the trace the facts in readable files beside its segments."""
    session = trace.metadata.session
    try:
        names = os.listdir(rank_directory)
    except OSError:  # deleted since its rows were read
        return trace
    trace = _with_losses(trace, [rank_directory / name for name in names if name.startswith("lost-")])
    trace = _with_end(_with_exit(trace, names), names)
    looks, stack = looks_path(rank_directory, session), stack_path(rank_directory, session)
    if looks.name in names:
        trace = _with_gone_peers(trace, looks)
    return _with_stack(trace, stack) if stack.name in names else trace


def with_exit(trace: RankTrace, rank_directory: Path) -> RankTrace:
    """Add to the trace that its command has ended, if it is known."""
    try:
        return _with_exit(trace, os.listdir(rank_directory))
    except OSError:  # deleted since its rows were read
        return trace


def _with_exit(trace: RankTrace, names: Iterable[str]) -> RankTrace:
    for name in names:
        match = _EXIT.fullmatch(name)
        if match is not None and int(match[1]) == trace.metadata.session and not trace.closed:
            if match[3]:
                return replace(trace, shell_hides_end=True)
            # That it left its job counts only where the job did not fail after that.
            is_success = int(match[2]) == 0 and trace.exit is None
            return replace(trace, has_left=is_success, command_failed=not is_success)
    return trace


def _with_end(trace: RankTrace, names: Iterable[str]) -> RankTrace:
    for name in names:
        match = _ENDED.fullmatch(name)
        if match is not None and int(match[1]) == trace.metadata.session and not trace.closed:
            return replace(trace, end_signal=int(match[2]))
    return trace


def _with_losses(trace: RankTrace, paths: Iterable[Path]) -> RankTrace:
    for path in paths:
        match = _LOSSES.fullmatch(path.name)
        if match is not None and int(match[1]) == trace.metadata.session:
            lost = _by_kind(path, int(match[2]))
            kinds = {**trace.dropped, **lost}
            dropped = {kind: trace.dropped.get(kind, 0) + lost.get(kind, 0) for kind in kinds}
            return replace(trace, closed=True, dropped={kind: count for kind, count in dropped.items() if count})
    return trace


def _by_kind(path: Path, total: int) -> dict[str, int]:
    try:
        lost: dict[str, int] = decode_json(read_file(path, _MOST_BYTES), dict[str, int])
    except (OSError, ValueError):
        return {_OF_ANY_KIND: total}
    fits = set(lost) <= set(schema.KINDS) and all(count >= 0 for count in lost.values())
    return lost if fits and sum(lost.values()) == total else {_OF_ANY_KIND: total}


def read_stack(path: Path) -> tuple[str, ...]:
    """Return faulthandler's frames as ``file:line function``, innermost first; empty for a missing or damaged file."""
    try:
        with open_file(path) as file:
            lines = file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    frames = [f"{match[1]}:{match[2]} {match[3]}" for line in lines if (match := _FRAME.fullmatch(line))]
    return tuple(frame for frame in frames if not frame.startswith(_OWN_FILES))


def _with_stack(trace: RankTrace, path: Path) -> RankTrace:
    stack = () if trace.closed else read_stack(path)
    return replace(trace, stack=stack) if stack else trace


def _with_gone_peers(trace: RankTrace, path: Path) -> RankTrace:
    try:
        looks: list[PeerLook] = [decode_json(line, PeerLook) for line in read_file(path, _MOST_BYTES).splitlines()]
    except (OSError, ValueError):
        return trace  # of a damaged one nothing is believed
    ranks = range(trace.metadata.world_size)
    if not all(0 <= look.at_ns < 2**63 and all(rank in ranks for rank in look.ended) for look in looks):
        return trace
    return replace(trace, gone_peers=tuple(looks))


def read_last_hang(rank_directory: Path, session: int, problems: list[str]) -> WrittenHang | None:
    """Return the last report of a hang in this recording; None without one. ``problems`` gets what is unreadable."""
    for path in sorted(rank_directory.glob("hang-*.json"), reverse=True):
        try:
            report: WrittenHang = printable_json(read_file(path, _MOST_BYTES_OF_HANG), WrittenHang)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: not read: {error}")
            continue
        if report.metadata.session == session:
            return report
    return None
