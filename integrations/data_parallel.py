"""Integrate DDP and both generations of FSDP: the forward of the model is a span, its groups get their roles."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.distributed import ProcessGroup

from commtrace.capture.collectives.groups import is_generic_role
from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.integrations.topology import add_dimension, add_framework, set_role_if_unknown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.nn.parallel import DistributedDataParallel

_logger: Final = logging.getLogger("commtrace")

_STATE_MODULES: Final = (
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed._composable.fsdp._fsdp_state",  # torch 2.4 and 2.5
)


Roles = Iterable[tuple["ProcessGroup | None", str]]
"""Groups with the roles that they have unless torch names them."""


class Forwards(Protocol):
    """A maker of forward spans."""

    def wrap_forward(
        self, original: Callable[..., object], announce: Callable[[torch.nn.Module], None]
    ) -> Callable[..., object]:
        """Return ``original`` as a span; ``announce`` is called with the model before it."""

    def begin_forward(self, module: torch.nn.Module) -> Span | None:
        """Begin the outermost forward of a model."""

    def end_forward(self, span: Span | None) -> None: ...


class MeshInfo(Protocol):
    """The mesh of a group of parameters; also ``shard_process_group``, ``replicate_mesh_dim`` and the like, or none."""

    mesh: DeviceMesh


class ParameterGroup(Protocol):
    """The part of an ``FSDPParamGroup`` that is read."""

    mesh_info: MeshInfo


class LeftForwards(Protocol):
    """Forwards whose end may not be seen."""

    @property
    def opened(self) -> object:
        """Return a forward whose end has not been seen, or None."""

    def end_left(self) -> None:
        """End an open forward whose model has returned unseen: work outside of it begins."""


def hook(hooks: Hooks, tracer: Tracer, loop: Forwards) -> LeftForwards:
    """Hook DDP and FSDP as soon as they are imported, or now; return the forwards of FSDP that are open."""
    replicated = _Models(tracer, "DDP", _groups_of_ddp)
    sharded = _Models(tracer, "FSDP", _groups_of_wrapper)
    states = _States(hooks, tracer, loop)

    def hook_ddp(module: ModuleType) -> None:
        hooks.replace(
            module.DistributedDataParallel, "forward", lambda original: loop.wrap_forward(original, replicated.announce)
        )

    def hook_wrapper(module: ModuleType) -> None:
        hooks.replace(
            module.FullyShardedDataParallel, "forward", lambda original: loop.wrap_forward(original, sharded.announce)
        )

    hooks.when_imported("torch.nn.parallel.distributed", hook_ddp)
    hooks.when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", hook_wrapper)
    for name in _STATE_MODULES:
        hooks.when_imported(name, states.hook)
    return states


class _Models:
    """``DistributedDataParallel`` or ``FullyShardedDataParallel``, FSDP's first generation: modules around a model."""

    def __init__(self, tracer: Tracer, framework: str, groups: Callable[..., Roles]) -> None:
        self._tracer = tracer
        self._framework = framework
        self._groups = groups
        self._known: dict[int, weakref.ref[torch.nn.Module]] = {}

    def announce(self, model: torch.nn.Module) -> None:
        key, known = id(model), self._known
        if key not in known:
            known[key] = weakref.ref(model, lambda _: known.pop(key, None))
            announce(self._tracer, self._framework, self._groups(model))


def announce(tracer: Tracer, framework: str, groups: Roles) -> None:
    seen: set[int] = set()
    for group, role in groups:
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            role = set_role_if_unknown(tracer, group, role)
            try:
                rank, size = int(group.rank()), int(group.size())
            # A group that is written in Python may have neither between two quorums.
            except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
                _logger.debug("a group of role %s does not know its place: %s", role, error)
                continue
            add_dimension(tracer, role, rank, size)
    add_framework(tracer, framework)


def _groups_of_ddp(model: DistributedDataParallel) -> Roles:
    return [(model.process_group, "dp")]


def _groups_of_wrapper(model: FullyShardedDataParallel) -> Roles:
    across = getattr(model, "_inter_node_pg", None)
    return [(model.process_group, "dp" if across is None else "dp-shard"), (across, "dp-replicate")]


class _States:
    """``fully_shard``, FSDP's second generation: hooks of the model's modules. Dynamo must not see the wrappers."""

    def __init__(self, hooks: Hooks, tracer: Tracer, loop: Forwards) -> None:
        self._hooks = hooks
        self._tracer = tracer
        self._loop = loop
        self._known: weakref.WeakSet[FSDPState] = weakref.WeakSet()
        self.opened: tuple[weakref.ref[FSDPState], Span] | None = None

    # Dynamo is kept out of these methods, or traces them (``skip_fsdp_hooks``) as if the wrappers were not there.
    def hook(self, module: ModuleType) -> None:
        self._hooks.replace_required(module.FSDPState, "_root_pre_forward", self._wrap_begin)
        self._hooks.replace_required(module.FSDPState, "_register_pre_backward_hook", self._wrap_end)
        # After a forward that raised. Earlier versions have no such call: there the next forward ends the one before.
        self._hooks.replace(module.FSDPState, "_reset_iter_state", self._wrap_end)
        # Of modules that are sharded as one group, any may be called alone, as a loss calls the head of a model. Its
        # return is all that the state hears of, until the others of the group have been called as well.
        self._hooks.replace(module.FSDPState, "_cast_output_dtype", self._wrap_end)
        parameters = getattr(module, "FSDPParamGroup", None)
        if parameters is not None:
            self._hooks.replace(parameters, "pre_forward", self._wrap_begin_in_group)

    def end_left(self) -> None:
        if self.opened is not None and self._has_returned():
            self._end()

    def _wrap_begin(self, original: Callable[..., object]) -> Callable[..., object]:
        failed = self._hooks.failed

        @functools.wraps(original)
        def root_pre_forward(state: FSDPState, /, module: torch.nn.Module, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(state, module, *args, **kwargs)
            try:
                if self._hooks.active:
                    root = state._state_ctx.iter_forward_root
                    if root is None or (len(root._modules) > 1 and self._has_returned()):
                        self._begin(state, module)
            except Exception as error:
                failed(error)
            return original(state, module, *args, **kwargs)

        return root_pre_forward

    def _wrap_begin_in_group(self, original: Callable[..., object]) -> Callable[..., object]:
        failed = self._hooks.failed

        @functools.wraps(original)
        def pre_forward(parameters: object, /, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(parameters, *args, **kwargs)
            try:
                # The state counts a second call of the same module as part of the first one's forward.
                if self.opened is None and self._hooks.active:
                    module: Any = args[0] if args else kwargs["module"]
                    state = _state_of(module)
                    if state is not None and len(state._modules) > 1:
                        self._begin(state, module)
            except Exception as error:
                failed(error)
            return original(parameters, *args, **kwargs)

        return pre_forward

    def _has_returned(self) -> bool:
        # The root of an iteration that no backward follows, such as an evaluation's, is never reset if it is a group.
        state = None if self.opened is None else self.opened[0]()
        return state is None or not _is_called(state)

    def _begin(self, state: FSDPState, module: torch.nn.Module) -> None:
        self._end()  # a forward that raised was not ended
        if state not in self._known:
            self._known.add(state)
            announce(self._tracer, "FSDP", groups_below(module))
        span = self._loop.begin_forward(module)
        self.opened = None if span is None else (weakref.ref(state), span)

    def _wrap_end(self, original: Callable[..., object]) -> Callable[..., object]:
        failed = self._hooks.failed

        @functools.wraps(original)
        def at_the_end(state: FSDPState, /, *args: object, **kwargs: object) -> object:
            result = original(state, *args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            try:
                if self.opened is not None and self.opened[0]() is state:
                    self._end()
            except Exception as error:
                failed(error)
            return result

        return at_the_end

    def _end(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            self._loop.end_forward(opened[1])


def _is_called(state: FSDPState) -> bool:
    """Return whether a module of ``state`` is being called around this place."""
    modules = state._modules
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _CALLS and any(frame.f_locals.get("self") is module for module in modules):
            return True
        frame = frame.f_back
    return False


_CALLS: Final = {
    call.__code__ for name in ("_call_impl", "_wrapped_call_impl") if (call := getattr(torch.nn.Module, name, None))
}


def _state_of(module: torch.nn.Module) -> FSDPState | None:
    state: FSDPState | None = getattr(module, "_get_fsdp_state", lambda: None)()
    return state


def groups_below(module: torch.nn.Module) -> Iterator[tuple[ProcessGroup | None, str]]:
    """Yield the groups over which the parameters of a model are sharded and replicated."""
    for below in module.modules():
        for parameters in _parameter_groups(_state_of(below)):
            of_mesh = parameters.mesh_info
            shard, replicate = (getattr(of_mesh, f"{word}_process_group", None) for word in ("shard", "replicate"))
            yield shard, _dimension(of_mesh, "shard") or ("dp" if replicate is None else "dp-shard")
            yield replicate, _dimension(of_mesh, "replicate") or ("dp" if shard is None else "dp-replicate")


def _dimension(of_mesh: MeshInfo, word: str) -> str:
    # torch names no group that has all ranks.
    names, dimension = of_mesh.mesh.mesh_dim_names, getattr(of_mesh, f"{word}_mesh_dim", None)
    if names is None or dimension is None:
        return ""
    name = str(names[dimension])
    return "" if is_generic_role(name) else _ROLES_OF_DIMENSIONS.get(name, name)


_ROLES_OF_DIMENSIONS: Final = {"fsdp": "dp", "efsdp": "expert-dp"}
"""torchtitan's names for the dimensions over which it shards."""


def _parameter_groups(state: FSDPState | None) -> list[ParameterGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions have at most one
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
