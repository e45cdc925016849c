"""Process groups have the same number on every member, whatever is created or destroyed meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from commtrace.capture.collectives import group_lifecycle
from commtrace.capture.collectives.groups import GroupRegistry
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.metadata import Group, group_id
from tests.capture.recording import Recording, fake_backend
from tests.unreadable import unreadable


@pytest.fixture
def registry(world: None) -> GroupRegistry:
    return GroupRegistry()


@pytest.fixture
def watched(recording: Recording, world: None) -> Iterator[Recording]:
    uninstall = group_lifecycle.watch_creation(recording.tracer)
    yield recording
    uninstall()


def world_group() -> Any:
    return distributed_c10d._get_default_group()


def test_the_world_is_known_by_its_members(registry: GroupRegistry) -> None:
    group = registry.state(world_group()).group

    assert (group.id, group.ranks, group.ordinal) == (group_id((0, 1, 2, 3), 0), (0, 1, 2, 3), 0)
    assert (group.role, group.backend) == ("world", "fake")


def test_a_group_is_registered_once(registry: GroupRegistry) -> None:
    assert registry.state(world_group()) is registry.state(world_group())
    assert registry.version == 1


def test_groups_of_the_same_members_are_numbered_in_the_order_of_their_creation(registry: GroupRegistry) -> None:
    first, second = dist.new_group([1, 3]), dist.new_group([1, 3])
    other = dist.new_group([0, 1])

    # The later one is met first, as on a rank that happens to use it first.
    states = [registry.state(group) for group in (second, other, first)]

    assert [(state.group.ranks, state.group.ordinal) for state in states] == [((1, 3), 1), ((0, 1), 0), ((1, 3), 0)]
    assert len({state.group.id for state in states}) == 3


@pytest.mark.skipif("sort_ranks" not in signature(dist.new_group).parameters, reason="this torch sorts ranks always")
def test_ranks_keep_the_order_inside_the_group(registry: GroupRegistry) -> None:
    state = registry.state(dist.new_group([3, 1], sort_ranks=False))

    assert state.ranks_by_group_rank == (3, 1)
    assert state.group.ranks == (1, 3)


def test_a_group_that_was_destroyed_before_its_first_use_is_counted(watched: Recording) -> None:
    # The other members may have used it: theirs is number 0, and the next one number 1.
    dist.destroy_process_group(dist.new_group([1, 2]))
    state = watched.tracer.groups.state(dist.new_group([1, 2]))

    assert state.group.ordinal == 1
    assert [group.ordinal for group in watched.tracer.groups.known_groups() if group.ranks == (1, 2)] == [0, 1]


def test_a_destroyed_group_leaves_its_id_free_and_its_description_known(watched: Recording) -> None:
    registry = watched.tracer.groups
    numbers = []
    for _ in range(20):
        group = dist.new_group([1, 2])
        state = registry.state(group)
        numbers.append(state.group.ordinal)
        key = id(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert registry.states.get(key) is not state

    assert numbers == list(range(20))
    assert len(registry.known_groups()) == 21  # with the world


def test_numbers_begin_anew_in_a_world_that_is_initialised_again() -> None:
    registry = GroupRegistry()
    states = []
    for _ in range(2):
        with fake_backend():
            state = registry.state(world_group())
            states.append((state.group.ordinal, next(state.collective_seq)))
        gc.collect()

    assert states == [(0, 0), (1, 0)]


def test_the_largest_world_that_a_process_was_part_of_is_its_place() -> None:
    registry = GroupRegistry()
    places = []
    for rank, world_size in ((1, 4), (0, 2), (5, 8)):
        with fake_backend(rank=rank, world_size=world_size):
            registry.state(world_group())
            places.append(registry.place)
        gc.collect()

    assert places == [(1, 4, "fake"), (1, 4, "fake"), (5, 8, "fake")]


def test_a_groups_ranks_in_which_this_process_is_not_are_no_group(watched: Recording) -> None:
    dist.new_group([0, 2])  # rank 1 gets a placeholder

    assert [group.ranks for group in watched.tracer.groups.known_groups()] == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("description", "role"), [("mesh_dp", "dp"), ("undefined", "unknown"), ("EXPERTS", "EXPERTS"), (None, "unknown")]
)
def test_a_role_is_first_what_torch_says(registry: GroupRegistry, description: str | None, role: str) -> None:
    group = dist.new_group([0, 1], group_desc=description)

    assert registry.state(group).group.role == role


def test_a_role_is_then_what_the_framework_says(registry: GroupRegistry) -> None:
    group = dist.new_group([0, 1])
    before = registry.state(group).group
    version = registry.version

    registry.set_role(group, "tp")
    registry.set_role(group, "tp")

    assert registry.state(group).group == structs.replace(before, role="tp")
    assert registry.known_groups()[-1].role == "tp"
    assert registry.version == version + 1


def test_creation_puts_torchs_function_back(recording: Recording, world: None) -> None:
    original = distributed_c10d._new_group_with_tag
    uninstall = group_lifecycle.watch_creation(recording.tracer)
    assert distributed_c10d._new_group_with_tag is not original

    uninstall()

    assert distributed_c10d._new_group_with_tag is original


def test_a_failure_to_register_does_not_reach_the_creator(watched: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_registry: GroupRegistry) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(GroupRegistry, "register_known_groups", fail)

    assert dist.new_group([0, 1]) is not None
    assert len(watched.warnings()) == 1


@pytest.mark.skipif(torch.__version__ < "2.5", reason="this torch does not describe the groups of a mesh")
def test_members_of_a_device_mesh_have_their_dimensions_as_roles(watched: Recording) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    roles = {group.role: group.ranks for group in watched.tracer.groups.known_groups()}
    assert roles == {"world": (0, 1, 2, 3), "dp": (1, 3), "tp": (0, 1)}
    dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))


class WrittenInPython(dist.ProcessGroup):
    """As torchft's: a group over several jobs, which refuses what it does not know."""

    def __init__(self, rank: int, size: int) -> None:
        making: Any = super()  # torch declares another way to make one
        making.__init__(rank, size)
        self.place = rank, size

    def rank(self) -> int:
        return self.place[0]

    def size(self) -> int:
        return self.place[1]

    group_name = unreadable(ValueError("ProcessGroup name not set"))
    group_desc = unreadable(RuntimeError("nor described"))

    def getBackendName(self) -> str:  # noqa: N802
        return "python"


def test_the_members_of_a_group_that_is_written_in_python_are_not_known(registry: GroupRegistry) -> None:
    group = registry.state(WrittenInPython(1, 2)).group

    assert (group.size, group.members) == (2, (None, None))
    assert (group.ranks, group.role, group.name, group.description) == ((), "unknown", "", "")


def test_a_group_that_is_larger_than_the_job_has_members_elsewhere(registry: GroupRegistry) -> None:
    store = dist.HashStore()
    larger, smaller = (dist.ProcessGroup(store, 1, size) for size in (6, 4))

    assert registry.state(larger).group.ranks == ()
    assert registry.state(smaller).group.ranks == (0, 1, 2, 3)


class WithStore:
    """Groups that a program makes for a store of its own, and those that torch makes: on gloo, which keeps stores."""

    def __init__(self, store: dist.Store, rank: int = 0, world_size: int = 1) -> None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        self.registry = GroupRegistry()

    def over(self, store: dist.Store, rank: int, size: int) -> Group:
        """As programs do it that have no function of torch for this: the group's ranks stand for global ones."""
        group = dist.ProcessGroup(store, rank, size)
        self.groups = [*getattr(self, "groups", []), group]
        distributed_c10d._world.pg_map[group] = ("gloo", dist.PrefixStore("a", dist.PrefixStore("b", store)))
        distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
        return self.registry.state(group).group


@pytest.fixture
def with_stores() -> Iterator[type[WithStore]]:
    yield WithStore
    for group in [group for group in distributed_c10d._world.pg_map if group is not world_group()]:
        del distributed_c10d._world.pg_map[group], distributed_c10d._world.pg_group_ranks[group]
    dist.destroy_process_group()


def tcp_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_a_group_that_meets_at_another_store_than_the_world_may_have_members_of_other_worlds(
    with_stores: type[WithStore], kind: str, tmp_path: Path
) -> None:
    makers: dict[str, Any] = {
        "tcp": tcp_store,
        "file": lambda: dist.FileStore(str(tmp_path / str(len([*tmp_path.iterdir()])))),
        "hash": dist.HashStore,
    }
    own, other = makers[kind](), makers[kind]()
    with_store = with_stores(own)

    assert with_store.over(own, 0, 1).ranks == (0,)
    joined = with_store.over(other, 0, 1)
    assert (joined.ranks, joined.size, joined.members) == ((), 1, (None,))
    usual = with_store.registry.state(dist.new_group([0]))
    assert usual.group.ranks == (0,)


def test_ranks_that_cannot_be_those_of_this_world_are_none_of_it(with_stores: type[WithStore]) -> None:
    store = tcp_store()
    with_store = with_stores(store)

    assert with_store.over(store, 0, 3).ranks == ()  # the world has one rank
    assert with_store.over(store, 1, 2).ranks == ()


def test_members_of_other_worlds_have_numbers_that_no_rank_has(with_stores: type[WithStore]) -> None:
    with_store = with_stores(tcp_store())
    with_store.over(tcp_store(), 1, 3)
    state = with_store.registry.state(with_store.groups[0])

    assert state.ranks_by_group_rank == (OUTSIDE, 0, OUTSIDE + 2)


def test_groups_over_worlds_have_ids_that_differ_from_each_other_and_from_those_of_this_world(
    with_stores: type[WithStore],
) -> None:
    with_store, store = with_stores(tcp_store()), tcp_store()
    groups = [
        with_store.registry.state(world_group()).group,
        with_store.over(store, 0, 1),
        with_store.over(store, 0, 1),
        with_store.over(store, 0, 2),
        with_store.over(tcp_store(), 0, 1),
    ]

    assert len({group.id for group in groups}) == len(groups)
    assert len(with_store.registry.over_worlds) == len(groups) - 1


def test_a_mesh_beside_those_of_the_parallelism_names_no_group(watched: Recording) -> None:
    """As torchtitan makes its meshes: all from one of all ranks."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    if not hasattr(world, "_unflatten"):
        pytest.skip("this torch makes no mesh of another one")
    uninstall = group_lifecycle.watch_meshes(watched.tracer)
    for_data = world._unflatten(0, (1, 2, 2), ("pp", "batch", "tp"))
    for_data["batch", "tp"]._flatten("loss_mesh")
    dense = world._unflatten(0, (1, 2, 2), ("pp", "dp_shard", "tp"))
    uninstall()

    role = {name: watched.tracer.groups.state(dense.get_group(name)).group.role for name in ("dp_shard", "tp")}
    assert role == {"dp_shard": "dp_shard", "tp": "tp"}
    assert watched.tracer.groups.state(world_group()).group.role == "world"


def test_a_dimension_of_all_ranks_names_the_group_of_all_ranks(watched: Recording) -> None:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    if not hasattr(world, "_unflatten"):
        pytest.skip("this torch makes no mesh of another one")
    uninstall = group_lifecycle.watch_meshes(watched.tracer)
    mesh = world._unflatten(0, (1, 1, 4), ("pp", "batch", "tp"))
    uninstall()

    assert watched.tracer.groups.state(mesh.get_group("tp")).group.role == "tp"
