"""Wrappers of functions that a compiled region may call, such as ``_call_impl`` of recorded modules.

They live outside of ``commtrace.capture``, whose files Dynamo skips: a skipped function in a traced one would end the
graph, or raise with ``fullgraph=True``. Here Dynamo reads the first line and goes on with the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

RAISED: Any = object()
"""The result of a function that raised."""


class WrapperOwner(Protocol):
    """The part of commtrace that a wrapper belongs to."""

    @property
    def active(self) -> bool:
        """Return whether it is on."""

    def failed(self, error: Exception) -> None:
        """Switch it off."""


def wrap_with_callbacks(
    original: Callable[..., object],
    is_compiling: Callable[[], bool],
    part: WrapperOwner,
    begin: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    end: Callable[[Any, Any], None],
) -> Callable[..., Any]:
    """Wrap a function with ``begin`` before and ``end`` after it: see :meth:`commtrace.capture.hooks.Hooks.around`."""
    failed, raised = part.failed, RAISED

    @functools.wraps(original)
    def hooked(*args: object, **kwargs: object) -> object:
        if is_compiling():  # first of all: the compiler reads no further
            return original(*args, **kwargs)
        begun = None
        try:
            if part.active:
                begun = begin(args, kwargs)
        except Exception as error:
            failed(error)
        if begun is None:
            return original(*args, **kwargs)
        result = raised
        try:
            result = original(*args, **kwargs)
        finally:
            try:
                end(begun, result)
            except Exception as error:
                failed(error)
        return result

    return hooked


def do_nothing(*_arguments: object) -> None: ...


class OptimizerListener(Protocol):
    """Record the steps of optimizers."""

    def before_step(self, optimizer: object) -> None: ...

    def after_step(self, optimizer: object) -> None: ...

    def failed(self, error: Exception) -> None: ...


class Listening(Protocol):
    """Holds who listens to the steps of optimizers, if anybody does."""

    listener: OptimizerListener | None

    def failed(self, error: Exception) -> None:
        """Handle an exception of the listener, or on the way to it."""


def step_hooks(is_compiling: Callable[[], bool], steps: Listening) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks for before and after the step of an optimizer, which tell the listener of that moment."""
    failed = steps.failed

    def before_step(optimizer: object, _args: object, _kwargs: object) -> None:
        if is_compiling():  # first of all: the compiler reads no further
            return
        try:
            listener = steps.listener
            if listener is not None:
                listener.before_step(optimizer)
        except Exception as error:
            failed(error)

    def after_step(optimizer: object, _args: object, _kwargs: object) -> None:
        if is_compiling():
            return
        try:
            listener = steps.listener
            if listener is not None:
                listener.after_step(optimizer)
        except Exception as error:
            failed(error)

    return before_step, after_step


def wrapper_codes() -> list[CodeType]:
    """Return the codes of all wrappers of :func:`wrap_with_callbacks`, and of all :func:`step_hooks`."""
    return [
        constant
        for maker in (wrap_with_callbacks, step_hooks)
        for constant in maker.__code__.co_consts
        if isinstance(constant, CodeType)
    ]


def wrap_call_impl_natively(
    original: Callable[..., object],
    begin: Callable[[tuple[object, ...], dict[str, object]], object],
    end: Callable[..., None],
) -> Callable[..., object]:
    """Wrap ``_call_impl`` with ``begin`` and ``end`` of the native part, which know the labels of modules."""
    import torch

    is_compiling = torch.compiler.is_dynamo_compiling

    # The module is one of args: to take it out, and put it in again, costs 60 ns.
    def _call_impl(*args: object, **kwargs: object) -> object:
        if is_compiling():  # first of all: the compiler reads no further
            return original(*args, **kwargs)
        call = begin(args, kwargs)
        if call is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            end(call)
            raise
        end(call, result)
        return result

    return _call_impl


def wrap_call_impl(
    original: Callable[..., object],
    label_of: Callable[[int], Any],
    tracer: Any,
    backward: Any,
    kind: int,
    part: str,
    may_capture: bool,
) -> Callable[..., object]:
    """Wrap ``_call_impl`` with a span around it if the module with its id has a label."""
    import torch

    is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
    graph_task: Any = torch._C._current_graph_task_id
    next_node: Any = torch._C._autograd._get_sequence_nr
    clock, recorder = tracer.clock, tracer.recorder
    # Not the buffer itself: torch 2.4 guards on the length of a container that a traced function refers to.
    buffered, append = recorder.buffer.__len__, recorder.buffer.append
    mark, capacity, drop = clock.mark, recorder.capacity, recorder.drop
    make_rows = backward.make_rows
    tensor_type, hook_type, watched = torch.Tensor, backward.hook_type, backward.key
    begins, completes, attach = backward.begins, backward.completes, backward.attach
    watch_inputs, watch_outputs = backward.watch_inputs, backward.watch_outputs

    def _call_impl(module: object, /, *args: object, **kwargs: object) -> object:
        if is_compiling():  # first of all: the compiler reads no further
            return original(module, *args, **kwargs)
        label = None
        first = -1
        try:
            label = label_of(id(module))
            if label is not None:
                if label.open_calls or not tracer.recording:
                    label = None
                else:
                    if is_grad_enabled():
                        first = next_node()
                        # One tensor in, one tensor out: without the calls that everything else takes.
                        if len(args) == 1 and not kwargs and type(args[0]) is tensor_type:
                            tensor = args[0]
                            hooks = tensor._backward_hooks
                            if hooks is None or watched not in hooks:
                                node = tensor.grad_fn
                                if node is not None:
                                    attach(tensor, node, hook_type(completes, node._sequence_nr()))
                        else:
                            watch_inputs(args, kwargs)
                    name = label.forward if graph_task() == -1 else label.recompute
                    coordinates = tracer.coordinates
                    if label.is_wrapped:
                        label.open_calls = 1
                    start = mark()
        except Exception as error:
            if label is not None:
                label.open_calls = 0
                label = None
            tracer.failed(part, error)
        if label is None:
            return original(module, *args, **kwargs)
        try:
            result = original(module, *args, **kwargs)
        finally:
            try:
                label.open_calls = 0
                end = mark()
                # While a graph is captured nothing runs, and marks are of the host's clock.
                if not (may_capture and type(end) is int and clock.is_capturing()):
                    entry = (make_rows, kind, name, coordinates, start, end)
                    if buffered() < capacity:
                        append(entry)
                    else:
                        drop(entry)
            except Exception as error:
                tracer.failed(part, error)
        try:
            if first >= 0:
                last = next_node()
                if last == first:
                    return result
                if type(result) is tensor_type:
                    node = result.grad_fn
                    if node is not None and node._sequence_nr() >= first:
                        attach(result, node, hook_type(begins, label.backward, first, last))
                else:
                    watch_outputs(result, label.backward, first, last)
        except Exception as error:
            tracer.failed(part, error)
        return result

    return _call_impl
