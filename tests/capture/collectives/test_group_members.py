"""Members of a group over several worlds present themselves in its store, and training sees nothing of it."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from msgspec import structs
from torch.distributed import distributed_c10d

from commtrace.capture.collectives import group_members
from commtrace.capture.collectives.group_members import GroupMeetings
from commtrace.capture.collectives.groups import GroupRegistry
from commtrace.trace.metadata import Group, GroupMember

TRAINER = GroupMember("a" * 16, "trainer", 0, "left", 1)
ENGINES = [GroupMember("b" * 16, "rollout", rank, "right", 2 + rank) for rank in range(2)]


class Process:
    """One member of the group, each with a registry of its own; torch's table of groups is shared by all of them."""

    def __init__(self, member: GroupMember, rank: int, store: Any, size: int = 3) -> None:
        self.now = 0.0
        self.registry = GroupRegistry()
        group: Any = dist.ProcessGroup(dist.HashStore(), rank, size)
        group._set_group_name("weights")
        self.group = group
        distributed_c10d._world.pg_map[self.group] = ("gloo", store)
        self.state = self.registry.state(self.group)
        self.members = GroupMeetings(self.registry, member, now=lambda: self.now)

    @property
    def known(self) -> Group:
        return self.state.group


@pytest.fixture(autouse=True)
def empty_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(group_members, "_ANSWER_SECONDS", 20.0)  # a store in use answers as soon as it gets a core
    yield
    distributed_c10d._world.pg_map.clear()


def steps(*processes: Process, times: int = 2) -> None:
    for _ in range(times):
        for process in processes:
            process.now += 0.5
            process.members.step()


def all_of(store: Any) -> list[Process]:
    return [Process(member, rank, store) for rank, member in enumerate([TRAINER, *ENGINES])]


@pytest.mark.parametrize("kind", ["hash", "tcp", "prefix"])
def test_all_members_learn_of_each_other_and_of_one_key(kind: str) -> None:
    store: Any = dist.HashStore() if kind == "hash" else dist.TCPStore("127.0.0.1", 0, is_master=True)
    processes = all_of(dist.PrefixStore("weights", store) if kind == "prefix" else store)
    steps(*processes, times=4)

    assert [process.known.members for process in processes] == [(TRAINER, *ENGINES)] * 3
    assert len({process.known.key for process in processes}) == 1
    assert len(processes[0].known.key) == 16


def test_a_member_that_is_not_recorded_stays_unknown_and_the_others_are_known() -> None:
    trainer, engine, _ = all_of(dist.HashStore())
    steps(trainer, engine, times=4)

    assert trainer.known.members == engine.known.members == (TRAINER, ENGINES[0], None)
    version = trainer.registry.version
    trainer.now += 4000
    steps(trainer, times=4)
    assert trainer.registry.version == version
    assert trainer.members._meetings == []  # given up


def test_a_later_group_of_the_same_name_at_the_same_store_is_not_taken_for_the_first() -> None:
    store = dist.HashStore()
    first, *_ = all_of(store)
    steps(first)
    second: Any = dist.ProcessGroup(dist.HashStore(), 1, 3)
    second._set_group_name("weights")
    distributed_c10d._world.pg_map[second] = ("gloo", store)
    state = first.registry.state(second)
    steps(first, times=4)

    assert state.group.members == (None, TRAINER, None)


class Refusing:
    """A store that cannot be asked."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistStoreError("connection reset by peer")


def test_the_first_error_ends_it_and_what_is_known_stays() -> None:
    process = Process(TRAINER, 0, Refusing())
    steps(process, times=4)

    assert process.known.members == (TRAINER, None, None)
    assert process.members._meetings == []


class Holding:
    """A store whose connection is in use for long."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.free = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.asked.set()
        self.free.wait(60)

    def check(self, keys: list[str]) -> bool:
        return False


@pytest.mark.timeout(30)
def test_a_store_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_members, "_ANSWER_SECONDS", 0.01)
    store = Holding()
    process = Process(TRAINER, 0, store)
    steps(process, times=20)

    assert store.asked.is_set()
    assert threading.active_count() < 10  # one question at a time
    store.free.set()


@pytest.mark.parametrize(
    "said",
    [
        "",
        "{}",
        "[]",
        "[1, 2, 3]",
        json.dumps([*structs.astuple(ENGINES[0]), "key"]),
        json.dumps([*structs.astuple(structs.replace(ENGINES[0], rank=-1)), "a" * 16]),
    ],
)
def test_an_answer_that_no_member_can_have_given_is_not_taken(said: str) -> None:
    store = dist.HashStore()
    process = Process(TRAINER, 0, store)
    store.set("commtrace/members/0/1", said)
    steps(process, times=4)

    assert process.known.members == (TRAINER, None, None)


class Kept:
    """A store of the network; a connection of our own is a clone, which does not keep what the job holds."""

    port = 1

    def __init__(self) -> None:
        self.clones: list[Any] = []

    def clone(self) -> Any:
        self.clones.append(dist.HashStore())
        return self.clones[-1]


def test_the_jobs_store_and_group_are_not_kept_alive() -> None:
    store = Kept()
    process = Process(TRAINER, 0, store)
    steps(process, times=4)
    assert len(store.clones) == 1
    references = weakref.ref(store), weakref.ref(process.group)
    del store, process.group
    distributed_c10d._world.pg_map.clear()
    gc.collect()

    assert [reference() for reference in references] == [None, None]


def test_a_group_without_a_known_store_knows_itself() -> None:
    process = Process(TRAINER, 2, dist.HashStore())
    distributed_c10d._world.pg_map.clear()
    steps(process, times=3)

    assert process.known.members == (None, None, TRAINER)
    assert process.members._meetings == []
