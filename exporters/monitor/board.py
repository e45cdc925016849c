"""Where ranks leave their reports and one reads them: a TCPStore, over a connection of our own.

The job's own connection is shared with the training thread, and a store serves one request of a connection at a time:
a slow answer to us would make training wait. Every request is bounded by a timeout, also where the store is frozen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple

from commtrace.errors import CommtraceError
from commtrace.exporters.monitor.connection import (
    TIMEOUT_SECONDS,
    Connection,
    check_that_it_answers,
    check_that_somebody_listens,
)
from commtrace.live.waits import Least

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


class Yardstick(NamedTuple):
    """What the monitor gives back to all ranks.

    Attributes:
        block_steps: how many steps a block has; 0 while that is not known.
        window: the newest one that was joined; −1 before the first.
        work_ns: what a rank typically worked per step in it, by pipeline stage; without the stages of a single rank.
    """

    block_steps: int = 0
    window: int = -1
    work_ns: Mapping[int, float] = {}


class Findings(NamedTuple):
    """What a monitor outside of the job has found, for the exporters of rank 0.

    Attributes:
        stragglers: who is slow now, dearest first.
        events: the newest few, oldest first.
    """

    stragglers: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()


class Board:
    """Reports of ranks in a store.

    Args:
        store: a TCPStore that nobody else uses.
        run: names the run among those that share the store.
        connection: what bounds the requests of the store; it lives as long as the board.
    """

    def __init__(self, store: Any, run: str, connection: Connection | None = None) -> None:
        self._store = store
        self._connection = connection
        self._prefix = f"commtrace/monitor/{run}/"
        self._present: set[int] = set()

    @classmethod
    def connect(
        cls, address: str, run: str, opening: Callable[[Connection], None] | None = None, *, suspect: bool = False
    ) -> Board:
        """A board in the store at ``HOST:PORT``.

        Args:
            address: of the store.
            run: names the run.
            opening: is given the connection before it is opened, so that another thread can cut it.
            suspect: the store did not answer the last time.

        Raises:
            BoardError: nothing answers there.
        """
        host, port = split_address(address)
        connection = Connection(host, port)
        if opening is not None:
            opening(connection)
        try:
            (check_that_it_answers if suspect else check_that_somebody_listens)(host, port)
            return cls(connection.open(), run, connection)
        except (OSError, OverflowError, RuntimeError) as error:
            raise BoardError(f"the store does not answer at {host}:{port}: {error or type(error).__name__}") from error

    @classmethod
    def serve(cls, address: str, run: str) -> Board:
        """A board in a store of its own, which other processes can connect to.

        Raises:
            BoardError: the address cannot be listened on.
        """
        from torch._C._distributed_c10d import TCPStore

        host, port = split_address(address)
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        try:
            return cls(TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False), run)
        except RuntimeError as error:
            raise BoardError(f"the store cannot be served at {host}:{port}: {error}") from error

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
        return Board(self._store, run, self._connection)

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

    def put_yardstick(self, yardstick: Yardstick) -> None:
        """Replace what all ranks are told.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            self._store.set(self._prefix + "yardstick", json.dumps(yardstick))

    def yardstick(self) -> Yardstick:
        """What all ranks are told; empty while nobody has joined them.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            key = self._prefix + "yardstick"
            if not self._store.check([key]):
                return Yardstick()
            block_steps, window, work_ns = json.loads(self._store.get(key))
        return Yardstick(block_steps, window, {int(stage): ns for stage, ns in work_ns.items()})

    def put_findings(self, findings: Findings) -> None:
        """Replace what a monitor outside of the job has found.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            self._store.set(self._prefix + "findings", json.dumps(findings))

    def findings(self) -> Findings:
        """What a monitor outside of the job has found; empty before its first word.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            key = self._prefix + "findings"
            return Findings(*json.loads(self._store.get(key))) if self._store.check([key]) else Findings()

    def put_least(self, told: Mapping[int, Sequence[Least]]) -> None:
        """Replace the least times of groups.

        Raises:
            BoardError: the store does not answer.
        """
        if told:
            with _told():
                self._store.multi_set(
                    [self._least_key(group) for group in told], [json.dumps(least) for least in told.values()]
                )

    def least(self, groups: Iterable[int]) -> list[Least]:
        """The least times of those of these groups that have some.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            there = [key for key in map(self._least_key, groups) if self._store.check([key])]
            told = self._store.multi_get(there) if there else []
        return [Least(*one)._replace(durations_ns=tuple(one[-1])) for least in told for one in json.loads(least)]

    def put_hang(self, rank: int, report: bytes) -> None:
        """Say what a rank is in since training stopped; empty when it goes on.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            self._store.set(self._hang_key(rank), report)
            self._store.add(self._prefix + "hangs", 1)

    def hangs_told(self) -> int:
        """How often ranks have said that training has stopped or goes on: one request, however many ranks there are.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            return int(self._store.add(self._prefix + "hangs", 0))

    def hangs(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """What those of these ranks say for which training stands still, by rank.

        Raises:
            BoardError: the store does not answer.
        """
        with _told():
            there = [rank for rank in ranks if self._store.check([self._hang_key(rank)])]
            told = self._store.multi_get([self._hang_key(rank) for rank in there]) if there else []
            return {rank: report for rank, report in zip(there, told, strict=True) if report}

    def _least_key(self, group: int) -> str:
        return f"{self._prefix}least/{group}"

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


def address_of_job() -> str:
    """Where the job's own store listens: ``HOST:PORT``.

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
    return f"{store.host}:{store.port}"
