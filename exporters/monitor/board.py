"""Where ranks leave their reports and one reads them: a TCPStore, over a connection of our own.

The job's own connection is shared with the training thread, and a store serves one request of a connection at a time:
a slow answer to us would make training wait. Every request is bounded by a timeout.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple

from commtrace.errors import CommtraceError

TIMEOUT_SECONDS: Final = 3.0
_ANNOUNCEMENT: Final = "commtrace/monitor"


class BoardError(CommtraceError):
    """There is no store to report to, or it does not answer."""


class Announcement(NamedTuple):
    """What a process that joins must know about the job.

    Attributes:
        run: names the run on the board.
        world_size: its ranks.
        seconds: length of a window.
    """

    run: str
    world_size: int
    seconds: float


class Board:
    """Reports of ranks in a store.

    Args:
        store: a TCPStore that nobody else uses.
        run: names the run among those that share the store.
    """

    def __init__(self, store: Any, run: str) -> None:
        self._store = store
        self._prefix = f"commtrace/monitor/{run}/"
        self._present: set[int] = set()

    @classmethod
    def connect(cls, address: str, run: str) -> Board:
        """A board in the store at ``HOST:PORT``.

        Raises:
            BoardError: nothing answers there.
        """
        host, port = split_address(address)
        return cls(_store(host, port, is_master=False), run)

    @classmethod
    def serve(cls, address: str, run: str) -> Board:
        """A board in a store of its own, which other processes can connect to.

        Raises:
            BoardError: the address cannot be listened on.
        """
        host, port = split_address(address)
        return cls(_store(host, port, is_master=True), run)

    @classmethod
    def of_job(cls, run: str) -> Board:
        """A board in the store of this process's job.

        Raises:
            BoardError: the job has no TCPStore, or it does not answer.
        """
        host, port = address_of_job()
        return cls(_store(host, port, is_master=False), run)

    def announce(self, announcement: Announcement) -> None:
        """Say which run reports here.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            self._store.set(_ANNOUNCEMENT, json.dumps(announcement))

    def announced(self) -> Announcement | None:
        """The run that reports here; None before one has begun.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            if not self._store.check([_ANNOUNCEMENT]):
                return None
            return Announcement(*json.loads(self._store.get(_ANNOUNCEMENT)))

    def of_run(self, run: str) -> Board:
        """The board of a run in the same store."""
        return Board(self._store, run)

    def put(self, rank: int, report: bytes) -> None:
        """Replace the report of a rank.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            self._store.set(self._key(rank), report)

    def get(self, ranks: Iterable[int]) -> list[bytes]:
        """The newest reports of these ranks; those that have never reported are left out.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            present = self._reported(list(ranks))
            return list(self._store.multi_get([self._key(rank) for rank in present])) if present else []

    def put_hang(self, rank: int, report: bytes) -> None:
        """Say what a rank is in since training stopped; empty when it goes on.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            self._store.set(self._hang_key(rank), report)
            self._store.add(self._prefix + "hangs", 1)

    def hangs_told(self) -> bool:
        """Whether any rank has ever said that training has stopped: one request, however many ranks there are.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            return bool(self._store.check([self._prefix + "hangs"]))

    def hangs(self, ranks: Iterable[int]) -> list[bytes]:
        """What those of these ranks say for which training stands still.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            there = [rank for rank in ranks if self._store.check([self._hang_key(rank)])]
            told = self._store.multi_get([self._hang_key(rank) for rank in there]) if there else []
            return [report for report in told if report]

    def _hang_key(self, rank: int) -> str:
        return f"{self._prefix}hang/{rank}"

    def _reported(self, ranks: Sequence[int]) -> list[int]:
        """A get of what is not there would block, so that is asked first, of those that were never seen."""
        unseen = [rank for rank in ranks if rank not in self._present]
        if unseen and self._store.check([self._key(rank) for rank in unseen]):
            self._present.update(unseen)
        else:
            self._present.update(rank for rank in unseen if self._store.check([self._key(rank)]))
        return [rank for rank in ranks if rank in self._present]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}{rank}"


@contextmanager
def _told() -> Iterator[None]:
    """What the store raises, as an error of ours."""
    try:
        yield
    except RuntimeError as error:
        raise BoardError(f"the store does not answer: {error}") from error


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
        BoardError: it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BoardError(f"{address!r} is no address: write HOST:PORT")
    return host, int(port)


def address_of_job() -> tuple[str, int]:
    """Where the job's own store listens.

    Raises:
        BoardError: the job has none, or none that others can connect to.
    """
    from torch import distributed as dist
    from torch._C._distributed_c10d import TCPStore

    if not dist.is_initialized():
        raise BoardError("torch.distributed is not initialised")
    store: Any = vars(dist.distributed_c10d)["_get_default_store"]()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        raise BoardError(
            f"the job's store is a {type(store).__name__}, which takes no further connections; start "
            "`commtrace monitor --serve HOST:PORT` and set COMMTRACE_MONITOR_STORE=HOST:PORT"
        )
    return store.host, store.port


def _store(host: str, port: int, *, is_master: bool) -> Any:
    from torch._C._distributed_c10d import TCPStore

    if not is_master:
        _check_that_somebody_listens(host, port)
    try:
        return TCPStore(
            host, port, is_master=is_master, timeout=timedelta(seconds=TIMEOUT_SECONDS), wait_for_workers=False
        )
    except RuntimeError as error:
        does = "cannot be served at" if is_master else "does not answer at"
        raise BoardError(f"the store {does} {host}:{port}: {error}") from error


def _check_that_somebody_listens(host: str, port: int) -> None:
    """Where nobody does, a TCPStore tries again for longer than its timeout, in C++: a process that ends meanwhile, as
    the last ranks of a job do when the first one is gone, would be aborted when that thread asks for the GIL.
    """
    try:
        socket.create_connection((host, port), TIMEOUT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BoardError(f"the store does not answer at {host}:{port}: {error}") from error
