"""Find the begin and end of a module's backward by hooks on its input and output tensors.

It ends with the first of these: its input's gradient is complete; the backward of a module begins that was not called
inside of it (autograd runs nodes from the youngest to the oldest); the graph ends.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.autograd.graph import Node

from commtrace.capture.device.clock import Mark
from commtrace.capture.hooks import leave_to_python
from commtrace.capture.records import MakeRows, module_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.schema import Coordinates

KEY: Final = "commtrace"
"""The key of our first hook on a tensor. A second one on an input is not needed: the first ends whatever came after it.
"""

_Tensor: Final = torch.Tensor
_MOST_TENSORS: Final = 16
_MOST_NESTING: Final = 3
"""Limits of the search for tensors in an output."""

_Open: TypeAlias = tuple[str, int, int, Coordinates, Mark]
"""A backward that is going on: name, first node of its call, the node after the last one, place, start."""


class Hook(functools.partial):  # type: ignore[type-arg]
    """A function with arguments, as a hook: made without a frame of Python, and holding no tensor and no node."""

    __slots__ = ()

    __torch_unserializable__ = True  # torch warns of hooks that get lost with a tensor; this one may


class BackwardSpans:
    """The modules whose backward is going on, by pass through a graph; passes nest in reentrant checkpoints.

    ``begins`` is the hook on an output, ``completes`` that on an input, which ends the backward of later calls.
    """

    def __init__(self, tracer: Tracer, part: str) -> None:
        self._tracer = tracer
        self._part = part
        self.make_rows = module_rows(tracer.clock)
        self._open: dict[int, list[_Open]] = {}
        # For code that may not import this module. Torch's own keys are numbers.
        self.hook_type, self.attach = Hook, attach
        self.key: object = KEY
        self.begins, self.completes = _hooks(tracer, part, self.make_rows, self._open, self._new_pass)

    def forget(self) -> None:
        self._open.clear()

    def watch_inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Hook the youngest input, to which autograd comes first."""
        youngest: tuple[int, torch.Tensor, Node] | None = None
        for tensor in _tensors((*args, *kwargs.values()) if kwargs else args):
            node = tensor.grad_fn
            if node is not None:
                number = node._sequence_nr()
                if youngest is None or number > youngest[0]:
                    youngest = (number, tensor, node)
        if youngest is not None and not _is_watched(youngest[1]):
            number, tensor, node = youngest
            attach(tensor, node, Hook(self.completes, number))

    def watch_outputs(self, result: object, name: str, first: int, last: int) -> None:
        """Hook every output, but those that the module only passed through."""
        made = [
            (tensor, node)
            for tensor in _tensors((result,))
            if (node := tensor.grad_fn) is not None and node._sequence_nr() >= first
        ]
        begins = self.begins if len(made) == 1 else _once_in_a_pass(self.begins)
        for tensor, node in made:
            attach(tensor, node, Hook(begins, name, first, last))

    def _new_pass(self, task: int) -> list[_Open]:
        stack = self._open[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end, task))
        return stack

    def _end(self, task: int) -> None:
        try:
            tracer = self._tracer
            stack = self._open.pop(task, None)
            if stack:
                end = tracer.clock.mark()
                for name, _, _, coordinates, start in reversed(stack):
                    tracer.append((self.make_rows, schema.MODULE, name, coordinates, start, end))
        except Exception as error:
            self._tracer.failed(self._part, error)


def _hooks(
    tracer: Tracer,
    part: str,
    make_rows: MakeRows,
    opened: dict[int, list[_Open]],
    new_pass: Callable[[int], list[_Open]],
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return ``begins`` and ``completes`` of :class:`BackwardSpans`, as closures over all that they use."""
    graph_task = torch._C._current_graph_task_id  # number of the pass through a graph that this thread is in
    clock, recorder, stack_of = tracer.clock, tracer.recorder, opened.get
    mark, buffer, capacity, drop = clock.mark, recorder.buffer, recorder.capacity, recorder.drop
    kind = schema.MODULE

    def begins(name: str, first: int, last: int, _gradient: object) -> None:
        try:
            if not tracer.recording:
                return
            task = graph_task()
            stack = stack_of(task)
            if stack is None:
                stack = new_pass(task)
            now = mark()
            while stack:
                around = stack[-1]
                if around[1] <= first and last <= around[2]:
                    break
                del stack[-1]
                entry = (make_rows, kind, around[0], around[3], around[4], now)
                if len(buffer) < capacity:
                    buffer.append(entry)
                else:
                    drop(entry)
            stack.append((name, first, last, tracer.coordinates, now))
        except Exception as error:
            tracer.failed(part, error)

    def completes(number: int, _gradient: object) -> None:
        try:
            stack = stack_of(graph_task())
            if not stack or stack[-1][1] <= number:
                return
            now = mark()
            while stack and stack[-1][1] > number:
                name, _, _, coordinates, start = stack.pop()
                entry = (make_rows, kind, name, coordinates, start, now)
                if len(buffer) < capacity:
                    buffer.append(entry)
                else:
                    drop(entry)
        except Exception as error:
            tracer.failed(part, error)

    leave_to_python(begins, completes)
    return begins, completes


def _once_in_a_pass(begins: Callable[..., None]) -> Callable[..., None]:
    """Return a hook for a call with several outputs, of which only the first one with a gradient counts."""
    latest = -1

    def once(name: str, first: int, last: int, gradient: object) -> None:
        nonlocal latest
        task = torch._C._current_graph_task_id()
        if task != latest:
            latest = task
            begins(name, first, last, gradient)

    return once


def _is_watched(tensor: Any) -> bool:
    hooks = tensor._backward_hooks
    return hooks is not None and KEY in hooks


def attach(tensor: Any, node: Node, hook: Hook) -> None:
    """Register a hook like ``Tensor.register_hook``, but before the hooks that are there."""
    # Before them: hooks of others on an output (FSDP gathers parameters there) belong to the module's backward, and a
    # module around this one hooks the same tensor later and has to begin earlier. register_hook only appends, and
    # register_prehook of the node runs after all hooks of the tensor. They also take longer, per call 3.7 and 2.8 µs
    # where this takes 1.5 µs (torch 2.13, medians of 15 rounds in turns): a module has two of them.
    hooks = tensor._backward_hooks
    if hooks is None:
        tensor._backward_hooks = hooks = OrderedDict()
        node._register_hook_dict(tensor)
        hooks[KEY] = hook
        return
    key = hook if KEY in hooks else KEY
    earlier_hooks = list(hooks.items())
    hooks.clear()  # autograd goes by the order of insertion, which move_to_end() does not change
    hooks[key] = hook
    hooks.update(earlier_hooks)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    if len(values) == 1 and type(values[0]) is _Tensor:
        return list(values)
    tensors: list[torch.Tensor] = []
    _collect(values, tensors, _MOST_NESTING)
    return tensors


def _collect(values: Iterable[Any], tensors: list[torch.Tensor], nesting: int) -> None:
    for value in values:
        kind = type(value)
        if kind is _Tensor or issubclass(kind, _Tensor):
            tensors.append(value)
        elif nesting and issubclass(kind, (list, tuple)):
            _collect(value, tensors, nesting - 1)
        elif nesting and issubclass(kind, dict):
            _collect(value.values(), tensors, nesting - 1)
        elif nesting and is_dataclass(kind):
            _collect(getattr(value, "__dict__", {}).values(), tensors, nesting - 1)
        if len(tensors) >= _MOST_TENSORS:
            return


leave_to_python(attach, _is_watched, _tensors, _collect, _once_in_a_pass, *vars(BackwardSpans).values())
