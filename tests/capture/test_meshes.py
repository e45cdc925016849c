"""The dimension of a mesh is the role of its group, unless a framework knows better."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from commtrace.capture import creation, meshes
from tests.capture.recording import Recording


def roles(recording: Recording, mesh: DeviceMesh) -> list[str]:
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return [recording.tracer.groups.state(group).group.role for group in groups]


@pytest.fixture(autouse=True)
def _without_earlier_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes of earlier tests that something still holds would name this test's default group."""
    earlier = [thing for thing in gc.get_objects() if issubclass(type(thing), DeviceMesh)]
    existing = meshes._existing_meshes

    def made_here(mesh_type: type) -> list[Any]:
        return [mesh for mesh in existing(mesh_type) if not any(mesh is other for other in earlier)]

    monkeypatch.setattr(meshes, "_existing_meshes", made_here)


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
