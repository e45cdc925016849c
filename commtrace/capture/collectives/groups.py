"""Identity, members, role and sequence numbers of every process group of this process."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from commtrace.capture.collectives.operations import LEGACY, NcclBackend, nccl_backend
from commtrace.capture.records import DeviceCall, Queue
from commtrace.identity import Place, current_place
from commtrace.trace.metadata import UNKNOWN_ROLE, Group, group_id

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GENERIC_ROLES = frozenset({UNKNOWN_ROLE, "world", "default"})
"""Roles that say nothing of what a group is for: a whole world, or one that torch made for a mesh of all ranks."""


class GroupState:
    __slots__ = (
        "bracket",
        "bracket_is_collective",
        "collective_seq",
        "group",
        "nccl",
        "p2p_seq",
        "queues",
        "ranks_by_group_rank",
    )

    def __init__(self, group: Group, ranks_by_group_rank: Sequence[int], nccl: NcclBackend = LEGACY) -> None:
        self.group = group
        self.nccl = nccl
        self.ranks_by_group_rank = tuple(ranks_by_group_rank)
        self.collective_seq = itertools.count()
        self.p2p_seq: dict[tuple[bool, int, int], itertools.count[int]] = {}
        self.bracket: list[DeviceCall] | None = None
        self.bracket_is_collective = False
        self.queues: dict[tuple[int, int], Queue] = {}

    def next_p2p(self, is_send: bool, peer: int, tag: int = 0) -> int:
        """Return the number of the next send to, or receive from, ``peer`` (a global rank), counted per tag."""
        key = (is_send, peer, tag)
        counter = self.p2p_seq.get(key)
        if counter is None:
            counter = self.p2p_seq.setdefault(key, itertools.count((tag & 0x7FFFFFFF) << 32))
        return next(counter)

    def take_back(self, seq: int) -> None:
        """Free the number of a collective that its backend refused, unless another thread has taken the next one."""
        if next_number(self.collective_seq) == seq + 1:
            self.collective_seq = itertools.count(seq)

    def take_back_p2p(self, is_send: bool, peer: int, seq: int) -> None:
        """Free the number of a message, like :meth:`take_back`; its tag is in its number."""
        key = (is_send, peer, seq >> 32)
        if key in self.p2p_seq and next_number(self.p2p_seq[key]) == seq + 1:
            self.p2p_seq[key] = itertools.count(seq)

    def queue(self, peer: int, device: int) -> Queue:
        """Return the operations on the own stream of a communicator of the device; ``peer`` is −1 for collectives."""
        key = peer, device
        found = self.queues.get(key)
        return found if found is not None else self.queues.setdefault(key, Queue())


def next_number(counter: itertools.count[int]) -> int:
    """Return the next number of a counter, without taking it."""
    # Its printed form is the only place that says so.
    return int(repr(counter)[len("count(") : -1])


class GroupRegistry:
    """Map ``ProcessGroup`` objects to their state.

    Groups of the same members are numbered in the order of their creation, which torch requires to be the same on all
    members. So groups are registered when they are created; earlier ones are found in torch's ordered table.
    """

    def __init__(self, skip_roles: Collection[str] = ()) -> None:
        self.skip_roles = frozenset(skip_roles)  # numbered, but not timed
        self._pipeline_peers: frozenset[int] = frozenset()
        # By id: hashing a group is slow. A weak reference drops it before the id is reused.
        self.states: dict[int, GroupState] = {}
        self.version = 0  # changes with every group and role that becomes known
        self.place: Place | None = None  # in the largest world so far: a job may go on as a smaller one
        self._lock = threading.RLock()
        self._ordinals: dict[tuple[int, ...], itertools.count[int]] = {}
        self._references: dict[int, weakref.ref[ProcessGroup]] = {}
        self._history: dict[int, Group] = {}
        self._followers: list[Callable[[ProcessGroup, GroupState], None]] = []

    def state(self, process_group: ProcessGroup) -> GroupState:
        """Return the state of a group, registering it if it is new. The fast path is ``states.get(id(group))``."""
        found = self.states.get(id(process_group))
        if found is not None:
            return found
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
                state.group = state.group._replace(role=role)
                self._remember(state.group)

    def name_dimension(self, process_group: ProcessGroup, dimension: str) -> None:
        """Name a group after its dimension of a ``DeviceMesh``, unless a framework has named it."""
        state = self.state(process_group)
        if state.group.role in _GENERIC_ROLES:
            self.set_role(process_group, dimension)

    def renew_lock(self) -> None:
        self._lock = threading.RLock()

    def known_groups(self) -> list[Group]:
        """Return all groups there have been, destroyed ones too."""
        with self._lock:
            return list(self._history.values())

    def _register(self, process_group: ProcessGroup) -> GroupState:

        ranks_by_group_rank = _global_ranks(process_group)
        ranks = tuple(sorted(ranks_by_group_rank))
        ordinal = next(self._ordinals.setdefault(ranks, itertools.count()))
        group = Group(
            id=group_id(ranks, ordinal),
            ranks=ranks,
            ordinal=ordinal,
            role=_role_from_description(process_group),
            name=str(process_group.group_name),
            description=str(process_group.group_desc),
            backend=_backend_name(process_group),
        )
        place = current_place()
        if place is not None and (self.place is None or self.place.world_size <= place.world_size):
            self.place = place
        state = GroupState(group, ranks_by_group_rank, nccl_backend(process_group))
        key = id(process_group)
        self.states[key] = state
        self._references[key] = weakref.ref(process_group, functools.partial(self._forget, key, state))
        self._remember(group)
        for follower in tuple(self._followers):
            follower(process_group, state)
        return state

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


def _global_ranks(process_group: ProcessGroup) -> list[int]:
    from torch.distributed import distributed_c10d

    global_rank_to_group_rank = distributed_c10d._world.pg_group_ranks.get(process_group)
    if global_rank_to_group_rank:
        return sorted(global_rank_to_group_rank, key=global_rank_to_group_rank.__getitem__)
    return list(range(process_group.size()))


def _role_from_description(process_group: ProcessGroup) -> str:
    """Return torch's own role: ``default_pg`` → world, the ``mesh_dp`` of a DeviceMesh → dp."""
    description = str(process_group.group_desc)
    if description == "default_pg":
        return "world"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    return UNKNOWN_ROLE if description in ("", "undefined") else description


def _backend_name(process_group: ProcessGroup) -> str:
    from torch.distributed import distributed_c10d

    known = distributed_c10d._world.pg_map.get(process_group)
    return "" if known is None else str(known[0])
