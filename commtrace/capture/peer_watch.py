"""Note at once which other ranks of this host have ended, before the launcher kills this one (pidfd_open(2))."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.files.rank_files import (
    forget_gone_peers,
    head_of_newest,
    note_gone_peers,
    rank_directory,
)
from commtrace.trace.files.writer import read_header
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.processes import GONE, process_state

PART: Final = "watching the other ranks of this host"

_MOST_PEERS: Final = 64
"""Of one host."""

_LOOK_SECONDS: Final = 1.0
_SEARCH_SECONDS: Final = 60.0
"""The files of the others, which name their processes, are looked for at most so long."""

_STILL_THERE_MS: Final = 12
"""After an end. More than analysis/hangs/first_failure.py asks for, less than launchers take to kill the others."""

_JOIN_SECONDS: Final = 1.0


class PeerWatch:
    """Watch the other ranks of this launch on this host.

    Args:
        failed: gets, once, its own failure.
        files: where the file system is called.
    """

    def __init__(self, failed: Callable[[str, BaseException], None], files: FileCalls = HERE) -> None:
        self._failed = failed
        self._files = files
        self._stop: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._own: RankMetadata | None = None
        self._run_directory = Path()
        self._has_noted = self._forgets = False
        self._watched: dict[int, int] = {}
        """Rank by the descriptor of its process. Descriptors are closed after they have left it: a fork may come."""

    @property
    def watched(self) -> frozenset[int]:
        return frozenset(self._watched.values())

    def start(self, run_directory: Path, metadata: RankMetadata) -> None:
        if metadata.world_size < 2 or not _can_watch():
            return
        self._own, self._run_directory = metadata, run_directory
        try:
            self._stop = os.pipe()
            thread = threading.Thread(target=self._run, args=(self._stop[0],), name="commtrace-peer-watch", daemon=True)
            thread.start()
        except (OSError, RuntimeError) as error:  # since Python 3.12 no thread starts once Python ends
            for end in self._stop or ():
                os.close(end)
            self._stop = None
            if threading.main_thread().is_alive():
                self._failed(PART, error)
            return
        self._thread = thread

    def stop(self, *, ended_cleanly: bool) -> None:
        """End the thread. If the job ended cleanly, its notes mean nothing and are removed: by the thread, as all calls
        of the run's file system are, which may not answer."""
        if self._thread is None or self._stop is None or self._own is None:
            return
        thread, self._thread = self._thread, None
        self._forgets = ended_cleanly
        os.write(self._stop[1], b"\0")
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
        if not thread.is_alive():
            for end in self._stop:
                os.close(end)

    def abandon_after_fork(self) -> None:
        """Close the descriptors, in a forked child, which does not have the thread."""
        if self._thread is None or self._stop is None:
            return
        self._thread = None
        for descriptor in (*self._stop, *self._watched):
            os.close(descriptor)
        self._watched.clear()

    def _run(self, stop: int) -> None:
        try:
            self._watch(stop)
            if self._forgets and self._has_noted:
                assert self._own is not None
                directory = rank_directory(self._run_directory, self._own.rank)
                self._files.call(forget_gone_peers, directory, self._own.session)
        except Exception as error:
            self._failed(PART, error)
        finally:
            while self._watched:
                os.close(self._watched.popitem()[0])

    def _watch(self, stop: int) -> None:
        assert self._own is not None
        directory = rank_directory(self._run_directory, self._own.rank)
        poll = select.poll()
        poll.register(stop, select.POLLIN)
        unknown = _ranks_nearby(self._own)
        give_up_at = time.monotonic() + _SEARCH_SECONDS
        is_confirmed = True  # every end that was noted is followed by the note that this rank is still there
        while True:
            for rank in sorted(unknown):
                peer = self._peer(rank)
                if peer is None:
                    continue
                unknown.discard(rank)
                # One that is gone already is not noted: in another container its number may mean nothing here.
                process = _opened(peer) if peer.node == self._own.node else None
                if process is not None:
                    self._watched[process] = rank
                    poll.register(process, select.POLLIN)
            if time.monotonic() > give_up_at:
                unknown.clear()
            patience = None if not unknown else 1000 * _LOOK_SECONDS
            ready = [descriptor for descriptor, _ in poll.poll(patience if is_confirmed else _STILL_THERE_MS)]
            ended = [descriptor for descriptor in ready if descriptor != stop]
            if ended or not is_confirmed:
                # Before anything else: every call of the system lets another thread take Python's lock for 5 ms.
                self._note(directory, {self._watched[descriptor] for descriptor in ended})
                is_confirmed = not ended
            if stop in ready:
                return
            for descriptor in ended:
                poll.unregister(descriptor)
                del self._watched[descriptor]
                os.close(descriptor)

    def _note(self, directory: Path, ended: set[int]) -> None:
        assert self._own is not None
        self._has_noted = True
        self._files.call(note_gone_peers, directory, self._own.session, time.monotonic_ns(), ended)

    def _peer(self, rank: int) -> RankMetadata | None:
        """Return the metadata in a rank's files; None while there are none of this launch."""
        assert self._own is not None
        try:
            head = self._files.call(head_of_newest, rank_directory(self._run_directory, rank))
        except OSError:  # the process that reads it has died, and is replaced
            return None
        peer = read_header(head)
        if peer is None or (peer.run_id, peer.attempt) != (self._own.run_id, self._own.attempt):
            return None
        return peer


def _can_watch() -> bool:
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _ranks_nearby(metadata: RankMetadata) -> set[int]:
    first = max(metadata.rank - metadata.local_rank, 0)
    return set(range(first, min(first + _MOST_PEERS, metadata.world_size))) - {metadata.rank}


def _opened(peer: RankMetadata) -> int | None:
    """Return a descriptor that can be read once the process has ended; None if it has ended or is elsewhere."""
    try:
        process = os.pidfd_open(peer.pid)
    except ProcessLookupError:
        return None
    # Only now: the number of one that ended before may belong to another process.
    if process_state(peer) not in (None, GONE):
        return process
    os.close(process)
    return None
