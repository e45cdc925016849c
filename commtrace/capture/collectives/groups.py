"""Identity, members, role and sequence numbers of every process group of this process."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

from msgspec import structs

from commtrace.capture.collectives.operations import LEGACY, NcclBackend, nccl_backend
from commtrace.capture.records import DeviceCall, GraphContents, Queue
from commtrace.recording import launchers
from commtrace.recording.identity import Place, current_place
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.metadata import UNKNOWN_ROLE, Group, GroupMember, group_id, new_world_key, outside_group_id

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_logger = logging.getLogger("commtrace")

_GENERIC_ROLE = re.compile(rf"{UNKNOWN_ROLE}|world|default|dim_\d+|batch|loss|\w+_mesh")
"""Roles that say nothing of what a group is for: torch's own defaults, those of unnamed meshes among them, and names of
meshes that a program makes beside those of its parallelism, as torchtitan's for its batches and its loss."""


def is_generic_role(role: str) -> bool:
    """Return whether a role says nothing of what a group is for."""
    return _GENERIC_ROLE.fullmatch(role) is not None


TAG_BIT: Final = 32
"""The number of a message has its tag from this bit on."""


class Counters(Protocol):
    """The sequence numbers of one group. The class ``Group`` of the native part is another one."""

    is_slow: bool
    """For the native part: whether the group's communication is Python's."""

    is_skipped: bool
    """For the native part: whether collectives are numbered, and not recorded."""

    has_slow_messages: bool
    """For the native part: whether messages are Python's."""

    next_position: Callable[[int, int], int] | None
    """Of the native part: the position of a launch on the communicator of a peer (−1: of all) on a device."""

    def __next__(self) -> int:
        """Return the number of the next collective."""

    @property
    def launched(self) -> int:
        """Return how many collectives there have been."""

    def take(self, count: int, /) -> int:
        """Take the numbers of so many collectives; return the first of them."""

    def take_messages(self, is_send: bool, peer: int, tag: int, count: int, /) -> int:
        """Take the numbers of so many sends to, or receives from, ``peer``; return the first of them."""

    def take_back(self, seq: int, /) -> None:
        """Free the number of a collective that its backend refused, unless another thread has taken the next one."""

    def next_message(self, is_send: bool, peer: int, tag: int = 0, /) -> int:
        """Return the number of the next send to, or receive from, ``peer`` (a global rank), counted per tag."""

    def take_back_message(self, is_send: bool, peer: int, seq: int, /) -> None:
        """Free the number of a message, like :meth:`take_back`; its tag is in its number."""

    def messages(self) -> list[tuple[bool, int, int, int]]:
        """Return ``(is_send, peer, tag, how many)`` of each kind of message so far."""

    def detach(self) -> None:
        """Forget the group, which is gone: another one may get its address."""


class PythonCounters:
    """Counters that take a number in one step, which is atomic under the GIL."""

    next_position: Callable[[int, int], int] | None = None

    def __init__(self) -> None:
        self.is_slow = self.is_skipped = self.has_slow_messages = False
        self._collectives = itertools.count()
        self._messages: dict[tuple[bool, int, int], itertools.count[int]] = {}

    def __next__(self) -> int:
        return next(self._collectives)

    @property
    def launched(self) -> int:
        return _next_number(self._collectives)

    def take(self, count: int) -> int:
        first = next(self._collectives)
        self._collectives = itertools.count(first + count)
        return first

    def take_back(self, seq: int) -> None:
        if _next_number(self._collectives) == seq + 1:
            self._collectives = itertools.count(seq)

    def take_messages(self, is_send: bool, peer: int, tag: int, count: int) -> int:
        first = self.next_message(is_send, peer, tag)
        self._messages[is_send, peer, tag] = itertools.count(first + count)
        return first

    def next_message(self, is_send: bool, peer: int, tag: int = 0) -> int:
        key = (is_send, peer, tag)
        counter = self._messages.get(key)
        if counter is None:
            counter = self._messages.setdefault(key, itertools.count(_first_message(tag)))
        return next(counter)

    def take_back_message(self, is_send: bool, peer: int, seq: int) -> None:
        key = (is_send, peer, seq >> TAG_BIT)
        if key in self._messages and _next_number(self._messages[key]) == seq + 1:
            self._messages[key] = itertools.count(seq)

    def messages(self) -> list[tuple[bool, int, int, int]]:
        return [
            (is_send, peer, tag, _next_number(counter) - _first_message(tag))
            for (is_send, peer, tag), counter in list(self._messages.items())
        ]

    def detach(self) -> None:
        return None


def _first_message(tag: int) -> int:
    return (tag & 0x7FFFFFFF) << TAG_BIT


def _next_number(counter: itertools.count[int]) -> int:
    # Its printed form is the only place that says so without taking it.
    return int(repr(counter)[len("count(") : -1])


class GroupState:
    __slots__ = (
        "_bracket",
        "bracket_is_collective",
        "collective_seq",
        "graph",
        "group",
        "nccl",
        "queues",
        "ranks_by_group_rank",
    )

    def __init__(
        self,
        group: Group,
        ranks_by_group_rank: Sequence[int],
        nccl: NcclBackend = LEGACY,
        counters: Counters | None = None,
        graph: GraphContents | None = None,
    ) -> None:
        self.graph = graph  # what goes into it is numbered here, from 0; None of a group's own state
        self.group = group
        self.nccl = nccl
        self.ranks_by_group_rank = tuple(ranks_by_group_rank)
        self.collective_seq: Counters = PythonCounters() if counters is None else counters
        self._bracket: list[DeviceCall] | None = None
        self.bracket_is_collective = False
        self.queues: dict[tuple[int, int], Queue] = {}

    @property
    def bracket(self) -> list[DeviceCall] | None:
        """Return the members of the coalescing bracket that is open; None where none is."""
        return self._bracket

    @bracket.setter
    def bracket(self, members: list[DeviceCall] | None) -> None:
        self._bracket = members
        self.collective_seq.is_slow = members is not None

    def next_p2p(self, is_send: bool, peer: int, tag: int = 0) -> int:
        return self.collective_seq.next_message(is_send, peer, tag)

    def take_back(self, seq: int) -> None:
        self.collective_seq.take_back(seq)
        if self.graph is not None:
            self.graph.refused(self, seq)

    def take_back_p2p(self, is_send: bool, peer: int, seq: int) -> None:
        self.collective_seq.take_back_message(is_send, peer, seq)
        if self.graph is not None:
            self.graph.refused(self, seq)

    def queue(self, peer: int, device: int) -> Queue:
        """Return the operations on the own stream of a communicator of the device; ``peer`` is −1 for collectives."""
        key = peer, device
        queue = self.queues.get(key)
        if queue is None:
            take = self.collective_seq.next_position
            queue = self.queues.setdefault(key, Queue(next_position=take and functools.partial(take, peer, device)))
        return queue


MakeCounters: TypeAlias = "Callable[[ProcessGroup, Group, Sequence[int], NcclBackend], Counters]"
"""Makes the counters of a new group, from the group, what is known of it, and its members by their rank in it."""


class GroupRegistry:
    """Map ``ProcessGroup`` objects to their state.

    Groups of the same members are numbered in the order of their creation, which torch requires to be the same on all
    members. So groups are registered when they are created; earlier ones are found in torch's ordered table.
    """

    def __init__(self, skip_roles: Collection[str] = (), make_counters: MakeCounters | None = None) -> None:
        self.skip_roles = frozenset(skip_roles)  # numbered, but not timed
        self._make_counters = make_counters
        self._pipeline_peers: frozenset[int] = frozenset()
        # By id: hashing a group is slow. A weak reference drops it before the id is reused.
        self.states: dict[int, GroupState] = {}
        self.version = 0  # changes with every group and role that becomes known
        self.joining: Place | None = None  # in the job whose default group is being made, or was made
        self.place: Place | None = None  # in the largest world so far: a job may go on as a smaller one
        self._lock = threading.RLock()
        self._ordinals: dict[object, itertools.count[int]] = {}
        self._references: dict[int, weakref.ref[ProcessGroup]] = {}
        self._history: dict[int, Group] = {}
        self.over_worlds: list[tuple[weakref.ref[ProcessGroup], GroupState]] = []
        """Those whose members may be of other worlds, oldest first."""
        self._followers: list[Callable[[ProcessGroup, GroupState], None]] = []

    def state(self, process_group: ProcessGroup) -> GroupState:
        """Return the state of a group, registering it if it is new. The fast path is ``states.get(id(group))``."""
        state = self.states.get(id(process_group))
        if state is not None:
            return state
        with self._lock:
            self.register_known_groups()
            return self.states.get(id(process_group)) or self._register(process_group)

    def register_known_groups(self) -> None:
        """Register every group that torch knows, oldest first."""
        from torch.distributed import distributed_c10d

        with self._lock:
            world = distributed_c10d._world
            for process_group in list(world.pg_map):
                if (
                    id(process_group) not in self.states
                    and hasattr(process_group, "allreduce")
                    # One that is still being made has no ranks yet. Those of the default group, all, come last.
                    and (world.pg_group_ranks.get(process_group) or process_group is world.default_pg)
                ):
                    self._register(process_group)

    def follow(self, follower: Callable[[ProcessGroup, GroupState], None]) -> None:
        with self._lock:
            self.register_known_groups()
            self._followers.append(follower)
            alive = [(reference(), self.states[key]) for key, reference in list(self._references.items())]
        for process_group, state in alive:
            if process_group is not None:
                follower(process_group, state)

    def unfollow(self, follower: Callable[[ProcessGroup, GroupState], None]) -> None:
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)

    def skips(self, state: GroupState, peer: int = -1) -> bool:
        """Return whether a communication is not to be timed; ``peer`` is given for point-to-point operations only."""
        # The role is found as readers find it: a pipeline's messages may go over the group of all ranks.
        return ("pp" if peer in self._pipeline_peers else state.group.role) in self.skip_roles

    def set_role(self, process_group: ProcessGroup, role: str) -> None:
        """Set the role of a group. The first framework that knows wins over torch's description."""
        state = self.state(process_group)
        with self._lock:
            if state.group.role != role:
                state.group = structs.replace(state.group, role=role)
                self._tell_skipped(state)
                self._remember(state.group)

    def set_members(self, state: GroupState, members: tuple[GroupMember | None, ...], key: str) -> None:
        """Set what is known of the members of a group over several worlds, and the key that it has in all of them."""
        with self._lock:
            state.group = structs.replace(state.group, members=members, key=key)
            self._remember(state.group)

    def name_dimension(self, process_group: ProcessGroup, dimension: str) -> None:
        """Name a group after its dimension of a ``DeviceMesh``, unless a framework has named it."""
        state = self.state(process_group)
        if is_generic_role(state.group.role) and not is_generic_role(dimension):
            self.set_role(process_group, dimension)

    def renew_lock(self) -> None:
        self._lock = threading.RLock()

    def known_groups(self) -> list[Group]:
        """Return all groups there have been, destroyed ones too."""
        with self._lock:
            return list(self._history.values())

    def _register(self, process_group: ProcessGroup) -> GroupState:

        place = current_place()
        if place is not None and (self.place is None or self.place.world_size <= place.world_size):
            self.place = place
        group = Group(
            id=0,
            ranks=(),
            ordinal=0,
            role=_role_from_description(process_group),
            name=_text(process_group, "group_name"),
            description=_text(process_group, "group_desc"),
            backend=_backend_name(process_group),
        )
        if is_of_this_world(process_group):
            ranks_by_group_rank = _global_ranks(process_group)
            ranks = tuple(sorted(ranks_by_group_rank))
            ordinal = self._next_ordinal(ranks)
            group = structs.replace(group, id=group_id(ranks, ordinal), ranks=ranks, ordinal=ordinal)
        else:
            size = process_group.size()
            # Its members have ranks of their own worlds, which are not known yet, but for this one's.
            ranks_by_group_rank = [OUTSIDE + number for number in range(size)]
            if place is not None and 0 <= process_group.rank() < size:
                ranks_by_group_rank[process_group.rank()] = place.rank
            store = store_name(without_prefixes(store_of(process_group)))
            ordinal = self._next_ordinal((store, group.name, size))
            number = outside_group_id(store, group.name, size, ordinal)
            group = structs.replace(group, id=number, ordinal=ordinal, members=(None,) * size)
        nccl = nccl_backend(process_group)
        counters = None
        if self._make_counters is not None:
            counters = self._make_counters(process_group, group, ranks_by_group_rank, nccl)
        state = GroupState(group, ranks_by_group_rank, nccl, counters)
        self._tell_skipped(state)
        key = id(process_group)
        self.states[key] = state
        self._references[key] = weakref.ref(process_group, functools.partial(self._forget, key, state))
        self._remember(group)
        if group.is_over_worlds:
            self.over_worlds.append((self._references[key], state))
        for follower in tuple(self._followers):
            follower(process_group, state)
        return state

    def _next_ordinal(self, members: object) -> int:
        return next(self._ordinals.setdefault(members, itertools.count()))

    def _tell_skipped(self, state: GroupState) -> None:
        counters = state.collective_seq
        counters.is_skipped = state.group.role in self.skip_roles
        counters.has_slow_messages = bool(self.skip_roles)

    def _remember(self, group: Group) -> None:
        self._history[group.id] = group
        if group.role == "pp":
            self._pipeline_peers |= set(group.ranks)
        self.version += 1

    def _forget(self, key: int, state: GroupState, _reference: object) -> None:
        # No lock: this runs wherever the last reference is dropped, perhaps inside code that holds the lock.
        if self.states.get(key) is state:
            self.states.pop(key, None)
            self._references.pop(key, None)
            state.collective_seq.detach()


def _global_ranks(process_group: ProcessGroup) -> list[int]:
    from torch.distributed import distributed_c10d

    global_rank_to_group_rank = distributed_c10d._world.pg_group_ranks.get(process_group)
    if global_rank_to_group_rank:
        return sorted(global_rank_to_group_rank, key=global_rank_to_group_rank.__getitem__)
    return list(range(process_group.size()))


def is_of_this_world(process_group: ProcessGroup) -> bool:
    """Return whether all members of a group are ranks of this world, as far as this process can tell.

    A program may join worlds: trainers and rollout engines by a group for their weights, torchft replicas that are
    jobs of their own. Such a group does not meet at the store of the default group, at which torch's own groups do.
    """
    from torch.distributed import ProcessGroup, distributed_c10d

    world = distributed_c10d._world
    if process_group is world.default_pg:
        return True
    store, of_world = (without_prefixes(store_of(group)) for group in (process_group, world.default_pg))
    if store is not None and of_world is not None and not _is_same_store(store, of_world):
        return False
    ranks = world.pg_group_ranks.get(process_group)
    if ranks:
        place = current_place()
        return place is None or (max(ranks) < place.world_size and ranks.get(place.rank) == process_group.rank())
    if type(process_group) is not ProcessGroup and isinstance(process_group, ProcessGroup):
        return False  # it is written in Python
    if world.default_pg is not None:
        return process_group.size() <= world.default_pg.size()
    launched = launchers.position(os.environ)
    return process_group.size() <= (1 if launched is None else launched.world_size)


def store_of(process_group: ProcessGroup | None) -> Store | None:
    """Return the store at which the members of a group meet; None if torch does not know it."""
    from torch.distributed import distributed_c10d

    known = None if process_group is None else distributed_c10d._world.pg_map.get(process_group)
    return None if known is None else known[1]


def without_prefixes(store: Store | None) -> Store | None:
    """Return the store below those that put a prefix before each key."""
    below: Any = store
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    return cast("Store | None", below)


def store_name(store: Store | None) -> str:
    """Return a name of a store by its address or path, which its users in one world give alike; empty if unknown."""
    host, port, path = (getattr(store, attribute, None) for attribute in ("host", "port", "path"))
    if host is not None and port is not None:
        return f"{host}:{port}"
    return "" if path is None else str(path)


def _is_same_store(store: Store, other: Store) -> bool:
    from torch._C._distributed_c10d import HashStore

    if store is other:
        return True
    if type(store) is not type(other):
        return False
    if isinstance(store, HashStore) and isinstance(other, HashStore):
        # Of this process alone, and pybind may make another object of it: it answers at once.
        key = f"commtrace/same/{new_world_key()}"
        store.set(key, "")
        is_there = other.check([key])
        store.delete_key(key)
        return is_there
    # Of a kind without address, nothing speaks against it.
    return store_name(store) == store_name(other)


def _text(process_group: ProcessGroup, attribute: str) -> str:
    from torch.distributed import ProcessGroup

    try:
        return str(getattr(process_group, attribute))
    except Exception as error:
        # Without a name torch's own raise RuntimeError. One that is written in Python may raise anything: torchft's do
        # unless they have been registered.
        if type(process_group) is ProcessGroup and not isinstance(error, RuntimeError):
            raise
        _logger.debug("a process group has no %s: %s", attribute, error)
        return ""


def _role_from_description(process_group: ProcessGroup) -> str:
    """Return torch's own role: ``default_pg`` → world, the ``mesh_dp`` of a DeviceMesh → dp."""
    description = _text(process_group, "group_desc")
    if description == "default_pg":
        return "world"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    return UNKNOWN_ROLE if description in ("", "undefined") else description


def _backend_name(process_group: ProcessGroup) -> str:
    from torch.distributed import distributed_c10d

    known = distributed_c10d._world.pg_map.get(process_group)
    return "" if known is None else str(known[0])
