"""Integrate both generations of FSDP: the root's forward is a span, groups get the roles that they shard for."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, Protocol

import torch

from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.integrations.dimensions import add_dimension, add_framework, set_role_if_unknown

_STATE_MODULES: Final = (
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed._composable.fsdp._fsdp_state",  # torch 2.4 and 2.5
)


class Forwards(Protocol):
    """A maker of forward spans."""

    def wrap_forward(
        self, original: Callable[..., object], announce: Callable[[object], None]
    ) -> Callable[..., object]:
        """Return ``original`` as a span; ``announce`` is called with the model before it."""

    def begin_forward(self, module: object) -> Span | None:
        """Begin the outermost forward of a model."""

    def end_forward(self, span: Span | None) -> None: ...


def hook(hooks: Hooks, tracer: Tracer, loop: Forwards) -> None:
    """Hook both generations as soon as they are imported, or now."""
    wrapped = _Wrapped(tracer)

    def replace_wrapper(module: ModuleType) -> None:
        def wrap(original: Callable[..., object]) -> Callable[..., object]:
            return loop.wrap_forward(original, wrapped.announce)

        hooks.replace(module.FullyShardedDataParallel, "forward", wrap)

    hooks.when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", replace_wrapper)
    states = _States(hooks, tracer, loop)
    for name in _STATE_MODULES:
        hooks.when_imported(name, states.hook)


class _Wrapped:
    """``FullyShardedDataParallel``, the first generation: a module around the model."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def announce(self, model: Any) -> None:
        if model in self._known:
            return
        self._known.add(model)
        across = getattr(model, "_inter_node_pg", None)
        groups = [(model.process_group, "dp" if across is None else "dp-shard"), (across, "dp-replicate")]
        _announce(self._tracer, groups)


class _States:
    """``fully_shard``, the second generation: hooks of the model's modules. Dynamo must not see the wrappers."""

    def __init__(self, hooks: Hooks, tracer: Tracer, loop: Forwards) -> None:
        self._hooks = hooks
        self._tracer = tracer
        self._loop = loop
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._open: tuple[Any, Span] | None = None

    # Dynamo is kept out of these methods, or traces them (``skip_fsdp_hooks``) as if the wrappers were not there.
    def hook(self, module: ModuleType) -> None:
        self._hooks.replace_required(module.FSDPState, "_root_pre_forward", self._wrap_begin)
        self._hooks.replace_required(module.FSDPState, "_register_pre_backward_hook", self._wrap_end)
        # After a forward that raised. Earlier versions have no such call: there the next forward ends the one before.
        self._hooks.replace(module.FSDPState, "_reset_iter_state", self._wrap_end)

    def _wrap_begin(self, original: Callable[..., object]) -> Callable[..., object]:
        failed = self._hooks.failed

        @functools.wraps(original)
        def root_pre_forward(state: Any, /, module: Any, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(state, module, *args, **kwargs)
            try:
                if self._hooks.active and state._state_ctx.iter_forward_root is None:
                    self._begin(state, module)
            except Exception as error:
                failed(error)
            return original(state, module, *args, **kwargs)

        return root_pre_forward

    def _begin(self, state: object, module: object) -> None:
        self._end()  # a forward that raised was not ended
        if state not in self._known:
            self._known.add(state)
            _announce(self._tracer, list(_groups_below(module)))
        span = self._loop.begin_forward(module)
        self._open = None if span is None else (state, span)

    def _wrap_end(self, original: Callable[..., object]) -> Callable[..., object]:
        failed = self._hooks.failed

        @functools.wraps(original)
        def at_the_end(state: object, /, *args: object, **kwargs: object) -> object:
            result = original(state, *args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            try:
                if self._open is not None and self._open[0] is state:
                    self._end()
            except Exception as error:
                failed(error)
            return result

        return at_the_end

    def _end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            self._loop.end_forward(opened[1])


def _groups_below(module: Any) -> Iterator[tuple[Any, str]]:
    for below in module.modules():
        state = getattr(below, "_get_fsdp_state", lambda: None)()
        for parameters in _parameter_groups(state):
            of_mesh = parameters.mesh_info
            shard, replicate = (getattr(of_mesh, f"{word}_process_group", None) for word in ("shard", "replicate"))
            yield shard, _name(of_mesh, "shard") or ("dp" if replicate is None else "dp-shard")
            yield replicate, _name(of_mesh, "replicate") or ("dp" if shard is None else "dp-replicate")


def _name(of_mesh: Any, word: str) -> str:
    # torch names no group that has all ranks.
    names, dimension = of_mesh.mesh.mesh_dim_names, getattr(of_mesh, f"{word}_mesh_dim", None)
    return "" if names is None or dimension is None else str(names[dimension])


def _parameter_groups(state: object) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions have at most one
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _announce(tracer: Tracer, groups: list[tuple[Any, str]]) -> None:
    seen: set[int] = set()
    for group, role in groups:
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            add_dimension(tracer, set_role_if_unknown(tracer, group, role), group.rank(), group.size())
    add_framework(tracer, "FSDP")
