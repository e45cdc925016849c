"""Process groups are known as soon as they are made, have their mesh's names, and let callbacks run before they go."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from commtrace.capture.collectives import group_lifecycle
from commtrace.capture.threads import CompletionCallbacks
from tests.capture.recording import Recording, fake_backend
from tests.process_groups import world_group


@pytest.fixture
def watching(recording: Recording) -> Iterator[Recording]:
    """Torch's creation of groups is watched."""
    uninstall = group_lifecycle.watch_creation(recording.tracer)
    try:
        yield recording
    finally:
        uninstall()


def recorded_groups(recording: Recording) -> list[tuple[str, tuple[int, ...]]]:
    """Filled with the role and the ranks of every group when it becomes known."""
    found: list[tuple[str, tuple[int, ...]]] = []
    recording.tracer.groups.follow(lambda _group, state: found.append((state.group.role, state.ranks_by_group_rank)))
    return found


def test_the_default_group_is_known_when_it_has_been_made(watching: Recording) -> None:
    groups = recorded_groups(watching)

    with fake_backend(rank=1, world_size=3):
        assert groups == [("world", (0, 1, 2))]
        assert watching.tracer.groups.place == (1, 3, "fake")


def test_the_default_group_is_known_each_time_that_it_is_made(watching: Recording) -> None:
    groups = recorded_groups(watching)

    for world_size in (4, 2):
        with fake_backend(world_size=world_size):
            pass

    assert groups == [("world", (0, 1, 2, 3)), ("world", (0, 1))]


def test_a_group_of_some_ranks_is_known_when_it_has_been_made_with_its_own_ranks(watching: Recording) -> None:
    groups = recorded_groups(watching)

    with fake_backend(rank=2):
        dist.new_group([0, 1])
        dist.new_group([3, 2])

        assert [ranks for _, ranks in groups] == [(0, 1, 2, 3), (2, 3)]


def test_groups_that_were_made_before_are_known_too(recording: Recording) -> None:
    with fake_backend(rank=2):
        dist.new_group([2, 3])
        uninstall = group_lifecycle.watch_creation(recording.tracer)
        uninstall()

        assert [ranks for _, ranks in recorded_groups(recording)] == [(0, 1, 2, 3), (2, 3)]


def test_torchs_own_functions_are_put_back(recording: Recording) -> None:
    from torch.distributed import distributed_c10d

    before = dict(vars(distributed_c10d))
    group_lifecycle.watch_creation(recording.tracer)()

    assert vars(distributed_c10d) == before


KEEPS_GROUPS = "_pg_registry" in inspect.getsource(DeviceMesh)


def roles(recording: Recording, mesh: DeviceMesh) -> list[str]:
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return [recording.tracer.groups.state(group).group.role for group in groups]


@pytest.mark.parametrize("made", ["before", "after"])
def test_every_dimension_is_named_whenever_the_mesh_is_made(recording: Recording, world: None, made: str) -> None:
    uninstall = None
    if made == "after":
        uninstall = group_lifecycle.watch_meshes(recording.tracer)
    pair = dist.new_group([0, 1])
    made_meshes = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("ep",)),
        init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),  # the default group
    ]
    uninstall = uninstall or group_lifecycle.watch_meshes(recording.tracer)

    assert [roles(recording, mesh) for mesh in made_meshes] == [["dp", "tp"], ["ep"], ["fsdp"]]
    assert recording.warnings() == []
    uninstall()


def test_a_role_of_the_framework_counts_for_more_than_that_of_a_mesh(recording: Recording, world: None) -> None:
    recording.tracer.groups.set_role(world_group(), "tp-pp")
    uninstall = group_lifecycle.watch_meshes(recording.tracer)

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))

    assert roles(recording, mesh) == ["tp-pp"]
    uninstall()


@pytest.mark.skipif(not KEEPS_GROUPS, reason="meshes of this torch keep no more of their groups than their names")
def test_a_mesh_of_a_world_that_was_destroyed_says_nothing_about_the_next_one(recording: Recording) -> None:
    with fake_backend(rank=1):
        stale = [
            init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),  # the default group
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"],
        ]
    with fake_backend(rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "ep"))
        uninstall = group_lifecycle.watch_meshes(recording.tracer)

        assert recording.tracer.groups.state(world_group()).group.role == "world"
        assert roles(recording, mesh) == ["cp", "ep"]
        assert recording.warnings() == []
        uninstall()
    assert len(stale) == 2


def test_a_mesh_without_names_says_nothing(recording: Recording, world: None) -> None:
    uninstall = group_lifecycle.watch_meshes(recording.tracer)
    mesh = init_device_mesh("cpu", (4,))

    assert roles(recording, mesh) == ["world"]
    assert recording.warnings() == []
    uninstall()


def test_the_originals_come_back(recording: Recording, world: None) -> None:
    before = dict(vars(DeviceMesh))
    uninstall = group_lifecycle.watch_meshes(recording.tracer)
    assert vars(DeviceMesh)["__init__"] is not before["__init__"]
    uninstall()

    assert vars(DeviceMesh)["__init__"] is before["__init__"]
    assert vars(DeviceMesh)["from_group"] is before["from_group"]


def test_a_group_that_is_still_being_made_is_not_taken_for_a_world(recording: Recording, world: None) -> None:
    """``_register_pg_in_world`` is passed before torch knows the ranks of a group that ``new_group`` makes."""
    uninstall = group_lifecycle.watch_creation(recording.tracer)
    group = dist.new_group([1, 3])

    assert recording.tracer.groups.state(group).group.ranks == (1, 3)
    uninstall()


def listen(recording: Recording) -> torch.futures.Future[int]:
    """A future with a callback of ours."""
    callbacks, future = recording.tracer.completions, torch.futures.Future[int]()
    callbacks.add(future, partial(lambda _alive, _future: None, callbacks.alive))
    return future


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    timeouts: list[float] = []

    def wait(_callbacks: CompletionCallbacks, timeout_seconds: float) -> bool:
        timeouts.append(timeout_seconds)
        return False

    monkeypatch.setattr(CompletionCallbacks, "settle", wait)
    return timeouts


def test_the_name_of_the_run_is_waited_for_before_the_last_group_goes_only(recording: Recording) -> None:
    asked: list[str] = []
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    uninstall = group_lifecycle.watch_destruction(recording.tracer, lambda: asked.append("asked"))

    dist.destroy_process_group(dist.new_group([0, 1]))
    assert asked == []
    dist.destroy_process_group()
    uninstall()

    assert asked == ["asked"]


def test_a_callback_has_run_when_the_group_is_destroyed(recording: Recording, world: None) -> None:
    uninstall = group_lifecycle.watch_destruction(recording.tracer)
    group = dist.new_group([0, 1])
    future = listen(recording)
    timer = threading.Timer(0.05, future.set_result, [7])
    timer.start()

    dist.destroy_process_group(group)

    assert not recording.tracer.completions.pending
    timer.join()
    uninstall()


def test_a_callback_that_never_comes_is_waited_for_once(recording: Recording, world: None, waits: list[float]) -> None:
    uninstall = group_lifecycle.watch_destruction(recording.tracer)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    dist.destroy_process_group(groups[0])
    assert waits == []
    future = listen(recording)

    for group in groups[1:]:
        dist.destroy_process_group(group)

    assert waits == [group_lifecycle.LONGEST_SECONDS]
    future.set_result(7)
    assert recording.warnings() == []
    uninstall()


def test_it_waits_again_once_callbacks_have_come(recording: Recording, world: None, waits: list[float]) -> None:
    uninstall = group_lifecycle.watch_destruction(recording.tracer)
    for _ in range(2):
        future = listen(recording)
        dist.destroy_process_group(dist.new_group([0, 1]))
        future.set_result(7)
        dist.destroy_process_group(dist.new_group([0, 1]))

    assert waits == [group_lifecycle.LONGEST_SECONDS] * 2
    uninstall()


def test_originals_are_put_back(recording: Recording, world: None) -> None:
    before = (dist.destroy_process_group, dist.distributed_c10d.destroy_process_group)
    shutdown = vars(dist.ProcessGroup).get("shutdown")

    group_lifecycle.watch_destruction(recording.tracer)()

    assert (dist.destroy_process_group, dist.distributed_c10d.destroy_process_group) == before
    assert vars(dist.ProcessGroup).get("shutdown") is shutdown


def test_groups_that_come_and_go_cost_no_pause_where_no_reducer_was(
    recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("commtrace.capture.collectives.group_lifecycle.time.sleep", pauses.append)
    uninstall = group_lifecycle.watch_destruction(recording.tracer)
    dist.destroy_process_group(dist.new_group([0, 1]))
    assert pauses == []

    recording.tracer.completions.add_temporaries([torch.ones(2)])
    dist.destroy_process_group(dist.new_group([0, 1]))
    assert pauses == [group_lifecycle.PAUSE_SECONDS]
    uninstall()
