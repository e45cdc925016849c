"""Give each world of a job a run directory of its own, also where several begin at the same instant.

The ranks of one world share a directory. A second world under the same name, as the rollout engines of a job whose
trainers have begun, takes the next one; a world that follows one that has ended, as a restart or a run by hand, goes
on in its directory. ``world-0000.json`` in a run directory says which world has it; each further holder makes the file
of the next number, which only one process can.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.files.safe_files import open_new
from commtrace.trace.processes import GONE, process_state

_CLAIM: Final = re.compile(r"world-(\d{4,9})\.json")
_RANK_DIRECTORIES: Final = "rank-*"
_MOST_BYTES: Final = 4_096
_MOST_WORLDS: Final = 1_000

_SILENT_SECONDS: Final = 60.0
"""A recording writes every ten seconds at least; a file system on the network may show it late."""
_WATCHED_SECONDS: Final = 15.0
"""A restart on other hosts looks so long whether the world before it still writes."""


class Holder(NamedTuple):
    """A world that has a directory, and the process that took it; ``session`` is its epoch time in ns."""

    world: str
    launch: str  # equal for all that one `commtrace run` has started; empty without one
    attempt: int
    host: str
    boot_id: str
    pid: int
    session: int


class _Watched(NamedTuple):
    """A holder that may have ended: its last write, and since when that was the last one."""

    written: float
    since: float


class _Look(NamedTuple):
    """What a look at a directory has found: ``is_ours`` is None where another look is needed."""

    is_ours: bool | None
    watched: _Watched | None


class Claim:
    """One world on its way to a directory.

    Args:
        claimant: the world; ``session`` is now.
        folder: returns the ``n``-th directory that the world may have, from 1.
        files: where the file system is called.
        now: clock, in seconds.
        predecessors: keys of worlds whose processes make this one: it goes on in their directory.
    """

    def __init__(
        self,
        claimant: Holder,
        folder: Callable[[int], Path],
        files: FileCalls = HERE,
        now: Callable[[], float] = time.monotonic,
        predecessors: Set[str] = frozenset(),
    ) -> None:
        self._own, self._folder, self._files, self._now = claimant, folder, files, now
        self._predecessors = predecessors
        self._number = 1
        self._watched: _Watched | None = None

    def settle(self) -> int | None:
        """Return the number of the directory that is the world's now; None: ask again.

        Raises:
            OSError: a directory cannot be made or read.
        """
        while self._number <= _MOST_WORLDS:
            folder = self._folder(self._number)
            is_ours, self._watched = self._files.call(
                _take, folder, self._own, self._predecessors, self._watched, self._now()
            )
            if is_ours is None:
                return None
            if is_ours:
                return self._number
            self._number, self._watched = self._number + 1, None
        raise FileExistsError(f"{_MOST_WORLDS} worlds hold {self._folder(1)} and the directories beside it")


def _take(folder: Path, claimant: Holder, predecessors: Set[str], watched: _Watched | None, now: float) -> _Look:
    folder.mkdir(parents=True, exist_ok=True)
    newest = _newest_claim(folder)
    while True:
        if newest is not None:
            holder = _read(newest)
            if holder is not None and holder.world == claimant.world:
                return _Look(True, None)
            if holder is None or holder.world not in predecessors:
                is_held, watched = _is_held(folder, newest, holder, claimant, watched, now)
            else:
                is_held = False
            if is_held is not False:
                return _Look(None if is_held is None else False, watched)
        further = _next_claim(folder, newest)
        try:
            descriptor = open_new(further)
        except FileExistsError:
            newest = further  # another world was faster, or a listing on the network is late
            continue
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(claimant._asdict()))
        return _Look(True, None)


def _is_held(
    folder: Path, claim: Path, holder: Holder | None, claimant: Holder, watched: _Watched | None, now: float
) -> tuple[bool | None, _Watched | None]:
    """Return whether the world of a claim is still there (None: look again), and what to watch until then."""
    if holder is not None and (holder.host, holder.boot_id, holder.pid) == (
        claimant.host,
        claimant.boot_id,
        claimant.pid,
    ):
        return False, watched  # an earlier world of this very process
    if holder is not None and _is_beside(holder, claimant):
        return True, watched
    state = None if holder is None else process_state(holder)
    if state is not None:
        return state != GONE, watched
    written = _last_write(folder, claim)
    if _clock_of(folder) - written > _SILENT_SECONDS:
        return False, watched
    if holder is None or claimant.attempt <= holder.attempt:
        return True, watched
    if watched is None or watched.written != written:
        return (None if watched is None else True), _Watched(written, now)
    return (None if now - watched.since < _WATCHED_SECONDS else False), watched


def _is_beside(holder: Holder, claimant: Holder) -> bool:
    # Also where it has ended by now: one launch of two jobs, or of worlds of which one was short.
    return bool(holder.launch) and holder.launch == claimant.launch and claimant.attempt <= holder.attempt


def holder_of(folder: Path) -> Holder | None:
    """Return the world that has a run directory; None if that is not known."""
    newest = _newest_claim(folder)
    return None if newest is None else _read(newest)


def _newest_claim(folder: Path) -> Path | None:
    claims = [Path(entry.path) for entry in os.scandir(folder) if _CLAIM.fullmatch(entry.name)]
    newest = max(claims, key=_number, default=None)
    while (later := _next_claim(folder, newest)).exists():  # a listing on the network may be late, a name is not
        newest = later
    return newest


def _next_claim(folder: Path, newest: Path | None) -> Path:
    return folder / f"world-{0 if newest is None else _number(newest) + 1:04d}.json"


def _number(claim: Path) -> int:
    match = _CLAIM.fullmatch(claim.name)
    assert match is not None
    return int(match[1])


def _read(claim: Path) -> Holder | None:
    """Return the holder in a claim; None while it is being written, or if it is damaged."""
    try:
        with claim.open("rb") as file:
            detail = json.loads(file.read(_MOST_BYTES))
        holder = Holder(*(detail[name] for name in Holder._fields))
    except (KeyError, OSError, TypeError, ValueError):
        return None
    return holder if [type(value) for value in holder] == [str, str, int, str, str, int, int] else None


def _last_write(folder: Path, claim: Path) -> float:
    """Return the time of the last change to the files of a run, by the clock of its file system."""
    times = [claim.stat().st_mtime]
    for rank in folder.glob(_RANK_DIRECTORIES):
        for entry in os.scandir(rank):
            try:
                times.append(entry.stat().st_mtime)
            except FileNotFoundError:  # a running job deletes to keep to its budget
                continue
    return max(times)


def _clock_of(folder: Path) -> float:
    """Return the present by the clock of a file system, which may be another host's."""
    probe = folder / f".clock-{os.getpid()}-{time.time_ns()}"
    os.close(open_new(probe))
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
