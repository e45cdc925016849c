"""The dimension of a mesh is the role of its group, unless a framework knows better."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from commtrace.capture.collectives import creation, meshes
from tests.capture.recording import Recording, fake_backend

KEEPS_GROUPS = "_pg_registry" in inspect.getsource(DeviceMesh)


def roles(recording: Recording, mesh: DeviceMesh) -> list[str]:
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return [recording.tracer.groups.state(group).group.role for group in groups]


@pytest.mark.parametrize("made", ["before", "after"])
def test_every_dimension_is_named_whenever_the_mesh_is_made(recording: Recording, world: None, made: str) -> None:
    uninstall = None
    if made == "after":
        uninstall = meshes.install(recording.tracer)
    pair = dist.new_group([0, 1])
    made_meshes = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("ep",)),
        init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),  # the default group
    ]
    uninstall = uninstall or meshes.install(recording.tracer)

    assert [roles(recording, mesh) for mesh in made_meshes] == [["dp", "tp"], ["ep"], ["fsdp"]]
    assert recording.warnings() == []
    uninstall()


def test_what_a_framework_says_counts_for_more(recording: Recording, world: None) -> None:
    world_group = dist.group.WORLD
    recording.tracer.groups.set_role(world_group, "tp-pp")
    uninstall = meshes.install(recording.tracer)

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))

    assert roles(recording, mesh) == ["tp-pp"]
    uninstall()


@pytest.mark.skipif(not KEEPS_GROUPS, reason="meshes of this torch keep no more of their groups than their names")
def test_a_mesh_of_a_world_that_was_destroyed_says_nothing_of_the_next_one(recording: Recording) -> None:
    with fake_backend(rank=1):
        stale = [
            init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),  # the default group
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"],
        ]
    with fake_backend(rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "ep"))
        uninstall = meshes.install(recording.tracer)

        assert recording.tracer.groups.state(dist.group.WORLD).group.role == "world"
        assert roles(recording, mesh) == ["cp", "ep"]
        assert recording.warnings() == []
        uninstall()
    assert len(stale) == 2


def test_a_mesh_without_names_says_nothing(recording: Recording, world: None) -> None:
    uninstall = meshes.install(recording.tracer)
    mesh = init_device_mesh("cpu", (4,))

    assert roles(recording, mesh) == ["world"]
    assert recording.warnings() == []
    uninstall()


def test_the_originals_come_back(recording: Recording, world: None) -> None:
    before = dict(vars(DeviceMesh))
    uninstall = meshes.install(recording.tracer)
    assert vars(DeviceMesh)["__init__"] is not before["__init__"]
    uninstall()

    assert vars(DeviceMesh)["__init__"] is before["__init__"]
    assert vars(DeviceMesh)["from_group"] is before["from_group"]


def test_a_group_that_is_still_being_made_is_not_taken_for_a_world(recording: Recording, world: None) -> None:
    """``_register_pg_in_world`` is passed before torch knows the ranks of a group that ``new_group`` makes."""
    uninstall = creation.install(recording.tracer)
    group = dist.new_group([1, 3])

    assert recording.tracer.groups.state(group).group.ranks == (1, 3)
    uninstall()
