"""Gives process groups the name of the ``DeviceMesh`` dimension that they serve: ``dp``, ``tp``, …

torch puts the name into the description of the groups that it makes for a mesh, and there it is read when a group
becomes known. That misses a dimension of all ranks, for which the default group is used, and meshes made from groups
that existed before: these are told here. What a framework says of a group counts for more.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from commtrace.capture.hooks import RAISED, Hooks
from commtrace.capture.tracer import Tracer

_logger: Final = logging.getLogger("commtrace")

PART: Final = "names of DeviceMesh dimensions"


def install(tracer: Tracer) -> Callable[[], None]:
    """Watch meshes being made, and name those that there are; returns the function that takes the hooks out."""
    hooks = Hooks(PART, tracer)

    def told_of_itself(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return args[0]

    def tell_of_itself(mesh: Any, result: Any) -> None:
        if result is not RAISED:
            _name_dimensions(tracer, mesh)

    def tell_of_result(_begun: bool, mesh: Any) -> None:
        if mesh is not RAISED:
            _name_dimensions(tracer, mesh)

    def hook(module: ModuleType) -> None:
        hooks.replace(module.DeviceMesh, "__init__", hooks.around(told_of_itself, tell_of_itself))
        hooks.replace(module.DeviceMesh, "from_group", hooks.around(lambda args, kwargs: True, tell_of_result))
        for mesh in _existing_meshes(module.DeviceMesh):
            try:
                _name_dimensions(tracer, mesh)
            except RuntimeError as error:  # its groups were destroyed, and it is still held by somebody
                _logger.debug("a DeviceMesh without its groups is left alone: %s", error)

    restore = hooks.restore
    hooks.when_imported("torch.distributed.device_mesh", hook)
    return restore


def _existing_meshes(mesh_type: type) -> list[Any]:
    from torch.distributed import is_initialized

    if not is_initialized():
        return []
    # Not isinstance, which would run code of lazy and deprecated objects.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), mesh_type)]


def _name_dimensions(tracer: Tracer, mesh: Any) -> None:
    names = mesh.mesh_dim_names
    # A slice of a mesh is given the groups of its root later: they have their names.
    if not names or not any(hasattr(mesh, held) for held in ("_dim_group_names", "_dim_group_infos")):
        return
    if mesh.get_coordinate() is None:  # This rank is not in the mesh.
        return
    for dimension, name in enumerate(names):
        group = mesh.get_group(dimension)
        if _was_made_with(mesh, group):
            tracer.groups.name_dimension(group, name)


def _was_made_with(mesh: Any, group: Any) -> bool:
    """Return whether this is the dimension's own group, or one that was given the same name after that was destroyed.

    A mesh finds its groups by name. Versions of torch that do not keep the groups beside the names cannot tell.
    """
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    return getattr(root, "_pg_registry", {}).get(group.group_name, group) is group
