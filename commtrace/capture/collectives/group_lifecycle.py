"""Follow process groups from creation to destruction: register them, name them, let callbacks finish first."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from commtrace.capture.hooks import RAISED, Arguments, Function, Hooks, Keywords
from commtrace.capture.instances import instances_of
from commtrace.capture.tracer import Tracer
from commtrace.recording.identity import Place

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_logger: Final = logging.getLogger("commtrace")

CREATION: Final = "process group creation"
_CREATORS: Final = ("_update_default_pg", "_new_group_with_tag", "_register_pg_in_world")
"""Functions that torch looks up in its module when it makes a group: replacing them reaches every caller.
``init_process_group`` calls the first one, ``split_group`` the last."""


def watch_creation(tracer: Tracer, joined: Callable[[], bool] = lambda: False) -> Callable[[], None]:
    """Register groups as they are created, in the same order on every member; return the function that undoes it.

    ``joined`` is called when a default group has been made; it returns True if that is another recording's.
    """
    from torch.distributed import distributed_c10d

    hooks = Hooks(CREATION, tracer)

    def register(is_default: bool, group: object) -> None:
        if group is RAISED:
            return
        if is_default and distributed_c10d.is_initialized() and joined():
            return
        tracer.groups.register_known_groups()

    def note_rendezvous(args: Arguments, kwargs: Keywords) -> None:
        rank, size = _argument(args, kwargs, "rank", 1), _argument(args, kwargs, "world_size", 2)
        tracer.groups.joining = _joined_place(rank, size)

    def note_group(args: Arguments, kwargs: Keywords) -> None:
        if not _argument(args, kwargs, "global_ranks_in_group", 2):  # else it is no default group
            rank, size = _argument(args, kwargs, "group_rank", 1), _argument(args, kwargs, "group_size", 0)
            tracer.groups.joining = _joined_place(rank, size)

    restore = hooks.restore
    try:
        hooks.replace(distributed_c10d, "rendezvous", hooks.around(note_rendezvous))
        hooks.replace(distributed_c10d, "_new_process_group_helper", hooks.around(note_group))
        for name in _CREATORS:
            begin = partial(_is_default, name)
            hooks.replace(distributed_c10d, name, hooks.around(begin, register))
        tracer.groups.register_known_groups()
    except BaseException:
        restore()
        raise
    return restore


def _is_default(creator: str, _args: Arguments, _kwargs: Keywords) -> bool:
    return creator == _CREATORS[0]


def _argument(args: Arguments, kwargs: Keywords, name: str, position: int) -> Any:
    """Return an argument; None if it was not given."""
    return kwargs.get(name, args[position] if position < len(args) else None)


def _joined_place(rank: object, world_size: object) -> Place | None:
    """Return the place that a process takes in the job that it joins; the environment has what is None or below 0."""
    numbers = []
    for number, variable in ((rank, "RANK"), (world_size, "WORLD_SIZE")):
        if not isinstance(number, int) or number < 0:
            text = os.environ.get(variable, "")
            if not text.isdecimal():
                return None
            number = int(text)
        numbers.append(number)
    return Place(numbers[0], numbers[1]) if numbers[0] < numbers[1] else None


_JOINING: Final = ("rendezvous", "_new_process_group_helper", "_update_default_pg")
"""Functions that ``init_process_group`` looks up in its module, the first ones before it waits for other ranks."""


def before_joining(action: Callable[[], None]) -> None:
    """Call ``action`` once, before this process makes its default group; after that torch's functions are as before."""
    from torch.distributed import distributed_c10d

    replaced: dict[str, tuple[Function, Function]] = {}

    def restore() -> set[str]:
        restored = set()
        while replaced:
            name, (original, replacement) = replaced.popitem()
            if vars(distributed_c10d).get(name) is replacement:
                setattr(distributed_c10d, name, original)
                restored.add(name)
        return restored

    def replacement_of(name: str, original: Function) -> Function:
        def joining(*args: Any, **kwargs: Any) -> Any:
            function = original
            if replaced:
                restored = restore()
                action()
                if name in restored:  # by now it may be hooked for the new recording
                    function = vars(distributed_c10d)[name]
            return function(*args, **kwargs)

        return joining

    for name in _JOINING:
        original = vars(distributed_c10d).get(name)
        if original is not None:
            replaced[name] = original, replacement_of(name, original)
            setattr(distributed_c10d, name, replaced[name][1])


MESH_NAMES: Final = "names of DeviceMesh dimensions"


def watch_meshes(tracer: Tracer) -> Callable[[], None]:
    """Name groups after their ``DeviceMesh`` dimensions: ``dp``, ``tp``, …; return the function that undoes it."""
    hooks = Hooks(MESH_NAMES, tracer)

    def mesh_of(args: Arguments, _kwargs: Keywords) -> DeviceMesh:
        mesh: DeviceMesh = args[0]
        return mesh

    def name_new(mesh: DeviceMesh, result: object) -> None:
        if result is not RAISED:
            _name_dimensions(tracer, mesh)

    def name_result(_begun: bool, mesh: DeviceMesh) -> None:
        if mesh is not RAISED:
            _name_dimensions(tracer, mesh)

    # torch describes a group that it makes for a mesh by the dimension's name. It makes none for a dimension of all
    # ranks, which uses the default group, nor for a mesh of existing groups: these are named here.
    def hook(module: ModuleType) -> None:
        hooks.replace(module.DeviceMesh, "__init__", hooks.around(mesh_of, name_new))
        # Meshes that are made of another one get their groups after their __init__.
        for maker in ("from_group", "_unflatten", "_flatten", "_concatenate"):
            hooks.replace(module.DeviceMesh, maker, hooks.around(lambda args, kwargs: True, name_result))
        for mesh in _existing_meshes(module.DeviceMesh):
            try:
                _name_dimensions(tracer, mesh)
            except RuntimeError as error:  # its groups were destroyed, and it is still referenced
                _logger.debug("a DeviceMesh without its groups is left alone: %s", error)

    restore = hooks.restore
    hooks.when_imported("torch.distributed.device_mesh", hook)
    return restore


def _existing_meshes(mesh_type: type[DeviceMesh]) -> list[DeviceMesh]:
    from torch.distributed import is_initialized

    return instances_of(mesh_type) if is_initialized() else []


def _name_dimensions(tracer: Tracer, mesh: DeviceMesh) -> None:
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


def _was_made_with(mesh: DeviceMesh, group: ProcessGroup) -> bool:
    # A mesh finds its groups by name: this may be one that was given the same name after its own was destroyed.
    # Versions of torch that do not keep the groups beside the names do not know.
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    return getattr(root, "_pg_registry", {}).get(group.group_name, group) is group


DESTRUCTION: Final = "waiting for callbacks before process groups are destroyed"
LONGEST_SECONDS: Final = 1.0
"""A callback is late by as long as a thread of the backend waits for a core. That of a communication that never ends
does not come, so it is waited for once."""
PAUSE_SECONDS: Final = 0.01


def watch_destruction(
    tracer: Tracer, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Let a backend's threads finish their callbacks before a group is destroyed; return the function that undoes it.

    ``before`` is called before the default group is destroyed, while its store is still there, and ``after`` once it is
    destroyed.
    """
    import torch.distributed
    from torch.distributed import ProcessGroup, distributed_c10d

    hooks = Hooks(DESTRUCTION, tracer)
    completions = tracer.completions
    has_waited = is_inside = had_default = False

    def is_subgroup(args: Arguments, kwargs: Keywords) -> bool:
        # The group is one of several, while the default group stays.
        group, default = args[0] if args else kwargs.get("group"), distributed_c10d._world.default_pg
        return group is not None and default is not None and group is not default and group.size() < default.size()

    def settle(args: Arguments, kwargs: Keywords) -> bool | None:
        nonlocal has_waited, is_inside, had_default
        if is_inside:
            return None
        had_default = distributed_c10d._world.default_pg is not None
        if not is_subgroup(args, kwargs):
            before()
            tracer.steps.training_ended()
        if completions.unsettled and not has_waited:
            completions.settle(LONGEST_SECONDS)
        has_waited = completions.unsettled
        # The destructor of ProcessGroupGloo joins the backend's threads. Where the last reference to the group is the
        # reducer's of a DistributedDataParallel that outlives destroy_process_group, torch runs it with the GIL held:
        # a thread that then wants the GIL, for a callback or to drop the last reference to a tensor, hangs the process.
        # So does torch alone with tensors of the script's, which cannot be known: the pause is for those.
        if completions.saw_temporaries:
            time.sleep(PAUSE_SECONDS)
        is_inside = True
        return True

    def leave(_begun: bool, result: object) -> None:
        nonlocal is_inside
        is_inside = False
        if had_default and result is not RAISED and distributed_c10d._world.default_pg is None:
            after()

    watched = hooks.around(settle, leave)
    restore = hooks.restore
    try:
        # The method is what destroy_process_group calls since torch 2.5, however a script has bound that.
        hooks.replace(ProcessGroup, "shutdown", watched)
        for owner in (distributed_c10d, torch.distributed):
            hooks.replace(owner, "destroy_process_group", watched)
        return restore
    except BaseException:
        restore()
        raise
