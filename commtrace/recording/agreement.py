"""Let the ranks of a job agree on the name and attempt of their run, those of rank 0, through the job's store.

Processes may give up their default group and make another one. Where all of them sit as before, the world goes on
(:func:`is_same_world`); else it is another one, and another attempt of the job.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

from commtrace.recording.options import is_run_id
from commtrace.trace.metadata import is_world_key, new_world_key

_PREFIX: Final = "commtrace/run"
_ARRIVALS: Final = f"{_PREFIX}/arrivals"
_MOST_DIGITS: Final = 10
_MOST_BYTES: Final = 2000

_PATIENCE_SECONDS: Final = 1.0
"""Rank 0 waits at most so long for the others to arrive: some of them may not be recorded."""

_REUNION: Final = f"{_PREFIX}/reunion"
_SAME, _OTHER = "same", "other"
_ASK_AGAIN_SECONDS: Final = 0.005

_arrived_in = 0
"""The process that has arrived before: it may record several times."""


class Seat(NamedTuple):
    """The place of a process in a world that it has left."""

    world: str  # its key; empty if its ranks did not agree on one
    rank: int
    world_size: int


class Predecessor(NamedTuple):
    """The world that a process was in before this one."""

    world: str  # its key
    job: str  # name that the worlds of the job share
    attempt: int
    first_step: int  # of the process in this world, unless the program numbers its steps


class Store(Protocol):
    """The part of a ``torch.distributed.Store`` that is used: no request waits for another rank."""

    def add(self, key: str, amount: int, /) -> int: ...

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class Agreed(NamedTuple):
    run_id: str
    attempt: int
    world: str = ""  # key of the world: these ranks have it, and no others
    job: str = ""  # name that the worlds of a job share


class _Announcement(NamedTuple):
    round: int
    world_size: int
    attempt: int
    run_id: str
    world: str
    job: str


Name: TypeAlias = "Callable[[str, str, int], str | None]"
"""Names the run of a world: from the job's name, the world's key and the attempt; None if it is not settled yet."""


class Agreement:
    """One rank's part in the agreement.

    Args:
        requeues: restarts of the whole job, with another store each time.
        restarts: restarts of this node's ranks by its launcher.
        now: clock, in seconds.
        name: names the run, on rank 0; by default after the job.
        predecessor: the world that this process was in before.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        job: str,
        requeues: int = 0,
        restarts: int = 0,
        now: Callable[[], float] = time.monotonic,
        name: Name = lambda job, world, attempt: job,
        predecessor: Predecessor | None = None,
    ) -> None:
        if predecessor is not None:
            restarts = max(restarts, predecessor.attempt + 1 - requeues)
        self._predecessor = predecessor
        self.predecessors: set[str] = set()  # keys of the worlds that members were in before, on rank 0
        self.first_step = 0  # of this world, as its members count; known with the agreement
        self._rank, self._world_size, self._job, self._name = rank, world_size, job, name
        self._requeues, self._restarts, self._now = requeues, restarts, now
        self._round: int | None = None
        self._arrived_at = 0.0

    def reached(self, store: Store) -> Agreed | None:
        """Return the agreement; None while rank 0 has not announced it yet.

        Raises:
            RuntimeError, NotImplementedError: the store has ended, or is of a kind that cannot be asked.
        """
        if self._round is None:
            self._arrive(store)
        if self._rank == 0:
            have_arrived = store.add(_ARRIVALS, 0) >= self._world_size
            is_patient = self._now() < self._arrived_at + _PATIENCE_SECONDS
            return None if is_patient and not have_arrived else self._announce(store)
        if not store.check([_PREFIX]):
            return None
        announced = _parsed(store.get(_PREFIX))
        if announced is None or announced.round < (self._round or 0) or announced.world_size != self._world_size:
            return None
        store.add(f"{_PREFIX}/heard/{announced.round}", 1)
        self.first_step = self._agreed_step(store)
        return Agreed(announced.run_id, announced.attempt, announced.world, announced.job)

    def unreported(self, store: Store) -> int:
        """Return the number of ranks that have not read the announcement of rank 0; 0 on other ranks."""
        if self._rank != 0:
            return 0
        return max(0, self._world_size - 1 - store.add(f"{_PREFIX}/heard/{self._round}", 0))

    def local_rank(self, store: Store, host: str, wanted: int | None = None) -> int:
        """Return a number that no other rank of the host has: ``wanted``, else the first that is free."""
        numbers: list[int] = [*([] if wanted is None else [wanted]), *range(self._world_size)]
        for number in numbers:
            holder = store.compare_set(f"{_PREFIX}/hosts/{host}/{number}", "", str(self._rank))
            if holder == str(self._rank).encode():
                return number
        raise RuntimeError(f"more ranks on {host} than in the job")

    def _arrive(self, store: Store) -> None:
        global _arrived_in
        self._arrived_at = self._now()
        earlier_processes = store.add(f"{_PREFIX}/processes/{self._rank}", int(_arrived_in != os.getpid())) - 1
        _arrived_in = os.getpid()
        if self._predecessor is None:
            store.compare_set(f"{_reunion(store)}/verdict", "", _OTHER)
        else:
            store.set(f"{_PREFIX}/predecessor", f"{self._predecessor.world} {self._predecessor.job}")
            self._agreed_step(store)
        self._restarts = _raised(store, f"{_PREFIX}/restarts", max(self._restarts, earlier_processes))
        self._round = store.add(f"{_ARRIVALS}/{self._rank}", 1) - 1
        store.add(_ARRIVALS, 1)

    def _announce(self, store: Store) -> Agreed | None:
        restarts = _raised(store, f"{_PREFIX}/restarts", self._restarts)
        attempt = self._requeues + restarts
        # A store may outlive an attempt, which is a world of its own.
        world = store.compare_set(f"{_PREFIX}/world/{restarts}", "", new_world_key()).decode()
        self._follow(store)
        run_id = self._name(self._job, world, attempt)
        if run_id is None:
            return None
        announced = _Announcement(self._round or 0, self._world_size, attempt, run_id, world, self._job)
        store.set(_PREFIX, json.dumps(announced))
        self.first_step = self._agreed_step(store)
        return Agreed(run_id, attempt, world, self._job)

    def _agreed_step(self, store: Store) -> int:
        first_step = 0 if self._predecessor is None else self._predecessor.first_step
        return _raised(store, f"{_PREFIX}/first_step", first_step)

    def _follow(self, store: Store) -> None:
        """Take note of the world before this one, and of its job's name: this process may have joined just now."""
        key = f"{_PREFIX}/predecessor"
        if not store.check([key]):
            return
        world, _, job = store.get(key)[:_MOST_BYTES].decode("utf-8", "replace").partition(" ")
        self.predecessors.add(world)
        if self._predecessor is None and is_run_id(job):
            self._job = job


def _reunion(store: Store) -> str:
    """Return a prefix for the present meeting at a store, the same for all who have come to it as often as this one."""
    # Numbers of processes are not enough: two containers may have the same.
    process = _names.setdefault(os.getpid(), secrets.token_hex(8))
    return f"{_REUNION}/{store.add(f'{_REUNION}/came/{process}', 1)}"


_names: Final[dict[int, str]] = {}
"""Of this process, by its number: a forked child has another one."""


def is_same_world(
    store: Store,
    seat: Seat,
    place: tuple[int, int],
    seconds: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return whether a new default group has the ranks of the one before: each process sits as it did, and all came.

    The first one that knows decides for all. Where not all report, this process alone knows of no change after so many
    ``seconds``.

    Args:
        seat: of this process, before.
        place: its rank and world size now.

    Raises:
        RuntimeError, NotImplementedError: the store has ended, or is of a kind that cannot be asked.
    """
    meeting = _reunion(store)
    verdict, here = f"{meeting}/verdict", f"{meeting}/{seat.world}"
    if (seat.rank, seat.world_size) != place:
        return store.compare_set(verdict, "", _OTHER) == _SAME.encode()
    deadline = now() + seconds
    come = store.add(here, 1)
    while come < seat.world_size and now() < deadline:
        if store.check([verdict]):
            break
        sleep(_ASK_AGAIN_SECONDS)
        come = store.add(here, 0)
    return store.compare_set(verdict, "", _SAME) == _SAME.encode()


def _raised(store: Store, key: str, number: int) -> int:
    """Return the greatest number that any rank has announced, this one included."""
    held = _number(store.compare_set(key, "", str(number)))
    while held < number:
        held = _number(store.compare_set(key, str(held), str(number)))
    return held


def _number(value: bytes) -> int:
    if not value.isdigit() or len(value) > _MOST_DIGITS:
        raise RuntimeError(f"its store holds {value[:20]!r} for a number")
    return int(value)


def _parsed(value: bytes) -> _Announcement | None:
    """Return the announcement of rank 0; None for any other value."""
    if len(value) > _MOST_BYTES:
        return None
    try:
        fields: object = json.loads(value)
    except ValueError:
        return None
    if not isinstance(fields, list) or [type(field) for field in fields] != [int, int, int, str, str, str]:
        return None
    announced = _Announcement(*fields)
    are_names = is_run_id(announced.run_id) and is_run_id(announced.job) and is_world_key(announced.world)
    return announced if announced.attempt >= 0 and are_names else None
