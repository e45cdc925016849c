"""Forward and backward of chosen modules, without a line in the script.

Off, nothing is touched. On, ``_call_impl`` of the *classes* of the chosen modules is replaced: torch calls it for
every call of a module, it takes in what other people's hooks do there (an FSDP all-gather belongs to its module), the
modules themselves stay as they were (copies, pickles and replicas of them are right, and are not recorded), and a
graph that ``torch.compile`` traces does not notice: inside of one, every module is passed through.

The backward of a module begins when a gradient of its output has arrived: a hook on the output tensor, which adds no
node to the graph and changes no view. It ends when the gradient of its input is complete, which a hook on the input
tensor tells. Autograd runs the nodes of a graph from the youngest to the oldest, and every call of a module made a
range of nodes; so it has ended, too, when the backward of a module begins that was not called inside of it, and when
the graph has come to its end (a first layer, whose input has no gradient). Where functional code stands between the
module and what made its input, and uses that input as well, its backward counts for the module.

A call within a backward is a repeated forward: activation checkpointing.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any, Final

import torch
import wrapt
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commtrace.called import recorded
from commtrace.capture.clock import Mark
from commtrace.capture.module_names import PART, find_models, placed_modules
from commtrace.capture.records import Coordinates, module_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.module_choice import ModuleChoice

_graph_task: Final = torch._C._current_graph_task_id
"""Number of the pass through a graph that this thread is in; −1 outside of one."""

_logger = logging.getLogger("commtrace")

_KEY: Final = "commtrace"
"""Of our first hook on a tensor. A call that takes such a tensor need not hook it: when its gradient is complete, that
hook ends whatever came after it."""

_Tensor: Final = torch.Tensor
_MOST_TENSORS: Final = 16
_MOST_NESTING: Final = 3
"""How far an output is searched for tensors."""


class Label:
    """The names under which the calls of one module are recorded.

    Attributes:
        is_wrapped: a call goes through several functions or modules with this label; the outermost is recorded.
        open_calls: 1 during a call of a wrapped module.
    """

    __slots__ = ("backward", "forward", "is_wrapped", "open_calls", "recompute")

    def __init__(self, name: str, is_wrapped: bool) -> None:
        self.forward = name
        self.backward = f"{name} backward"
        self.recompute = f"{name} recompute"
        self.is_wrapped = is_wrapped
        self.open_calls = 0


def _calls_twice(module: Any) -> bool:
    """Whether a call goes through two functions that are replaced: its class has a ``_call_impl`` of its own, which may
    call the one that it inherits, or it is compiled in place and may fall back."""
    return "_call_impl" in type(module).__dict__ or module.__dict__.get("_compiled_call_impl") is not None


class ModuleSpans:
    """Chooses modules and turns their calls into entries of the recorder's buffer.

    ``select`` and ``clear`` are to be called on the training thread, between steps.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._labels: dict[int, Label] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._patched: dict[type, tuple[Any, Callable[..., Any]]] = {}
        self._made: weakref.WeakKeyDictionary[type, Callable[..., Any]] = weakref.WeakKeyDictionary()
        self._compiled: list[tuple[weakref.ref[Any], Any, Any]] = []
        self._choice: ModuleChoice | None = None
        self._looks_left = 0
        self._optimizer_hook: Any = None
        self._backward = _BackwardSpans(tracer)

    def select(self, choice: str) -> None:
        """Record the modules that ``choice`` takes (:class:`commtrace.trace.module_choice.ModuleChoice`) from now on.

        Models that are made later are found at the beginning of the next step and at the next step of an optimizer.

        Raises:
            ConfigurationError: the choice cannot be read.
        """
        parsed = ModuleChoice.parse(choice)
        self.clear()
        self._choice = parsed
        self._tracer.step_listeners.append(self._step_begins)
        self._optimizer_hook = register_optimizer_step_pre_hook(self._optimizer_steps)
        self._look()
        self._looks_left = 2

    def clear(self) -> None:
        """Record no modules any more: every class is as it was before."""
        self._choice = None
        self._looks_left = 0
        self._stop_listening()
        for owner, (own, replacement) in self._patched.items():
            if owner.__dict__.get("_call_impl") is replacement:
                if own is None:
                    del owner._call_impl  # type: ignore[attr-defined]
                else:
                    owner._call_impl = own  # type: ignore[attr-defined]
        self._patched.clear()
        for reference, own, replacement in self._compiled:
            module = reference()
            if module is not None and module.__dict__.get("_compiled_call_impl") is replacement:
                module.__dict__["_compiled_call_impl"] = own
        self._compiled.clear()
        self._labels.clear()
        self._alive.clear()
        self._backward.forget()

    @property
    def names(self) -> list[str]:
        """Of the modules that are recorded now."""
        return sorted({label.forward for label in self._labels.values()})

    # Finding modules

    def _step_begins(self) -> None:
        self._backward.forget()  # what a backward that raised left open
        if self._looks_left == 2:
            self._looks_left = 1
            self._guarded_look()

    def _optimizer_steps(self, *_arguments: Any) -> None:
        """By now the job has trained: its models exist."""
        if self._looks_left:
            self._looks_left = 0
            self._guarded_look()
            if not self._labels:
                _logger.warning("commtrace: no module has a name or depth that COMMTRACE_MODULES asks for")
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    def _guarded_look(self) -> None:
        try:
            self._look()
        except Exception as error:
            self._tracer.failed(PART, error)

    def _stop_listening(self) -> None:
        if self._step_begins in self._tracer.step_listeners:
            self._tracer.step_listeners.remove(self._step_begins)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    def _look(self) -> None:
        choice = self._choice
        if choice is None:
            return
        for placed in placed_modules(find_models()):
            if not choice.takes(placed.name, placed.depth):
                continue
            if any(id(module) in self._labels for module in placed.modules):
                continue
            label = Label(placed.name, len(placed.modules) > 1 or any(map(_calls_twice, placed.modules)))
            for module in placed.modules:
                self._add(module, label)

    def _add(self, module: Any, label: Label) -> None:
        key = id(module)
        labels, alive = self._labels, self._alive

        def gone(_reference: Any) -> None:  # before another object can have its id
            labels.pop(key, None)
            alive.pop(key, None)

        alive[key] = weakref.ref(module, gone)
        labels[key] = label
        self._patch(type(module))
        compiled = module.__dict__.get("_compiled_call_impl")
        if compiled is not None:  # ``module.compile()``: torch calls this instead of _call_impl
            replacement = functools.partial(self._recorded(lambda _module, *a, **k: compiled(*a, **k)), module)
            _leave_to_python(replacement.func)
            module.__dict__["_compiled_call_impl"] = replacement
            self._compiled.append((alive[key], compiled, replacement))

    def _patch(self, owner: type) -> None:
        if owner in self._patched:
            return
        own = owner.__dict__.get("_call_impl")
        replacement = self._made.get(owner)
        if replacement is None:
            # Kept: graphs that were compiled while it was in place are valid as long as it is the same.
            replacement = self._made[owner] = self._recorded(self._original(owner))
            _leave_to_python(replacement)
        self._patched[owner] = (own, replacement)
        owner._call_impl = replacement  # type: ignore[attr-defined]

    def _original(self, owner: type) -> Callable[..., Any]:
        """What ``_call_impl`` of a class would be without us."""
        for base in owner.__mro__:
            if base in self._patched and self._patched[base][0] is None:
                continue
            found: Callable[..., Any] | None = base.__dict__.get("_call_impl")
            if found is not None:
                return self._patched[base][0] if base in self._patched else found
        raise AttributeError(f"{owner.__name__} has no _call_impl")

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        _leave_to_python(self._tracer.clock.mark)
        return recorded(original, self._labels.get, self._tracer, self._backward, module_rows, schema.MODULE, PART)


class _BackwardSpans:
    """The modules whose backward is going on, by pass through a graph; passes nest in reentrant checkpoints."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.open: dict[int, list[tuple[Call, Coordinates, Mark]]] = {}

    def forget(self) -> None:
        """What is open now never ends."""
        self.open.clear()

    def watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the youngest input tell when its gradient is complete: autograd comes to it first."""
        if len(args) == 1 and not kwargs and type(args[0]) is _Tensor:
            tensor = args[0]
            hooks: Any = tensor._backward_hooks
            if hooks is None or _KEY not in hooks:
                node = tensor.grad_fn
                if node is not None:
                    _attach(tensor, node, _Complete(self, node._sequence_nr()))
            return
        youngest: tuple[int, Any, Any] = (-1, None, None)
        for tensor in _tensors((*args, *kwargs.values())):
            node = tensor.grad_fn
            if node is not None:
                number = node._sequence_nr()
                if number > youngest[0]:
                    youngest = (number, tensor, node)
        number, tensor, node = youngest
        if tensor is not None and not _is_watched(tensor):
            _attach(tensor, node, _Complete(self, number))

    def watch_outputs(self, result: Any, label: Label, first: int, last: int) -> None:
        """Have every output tell when its gradient arrives, but those that the module only passed through."""
        call = None
        for tensor in (result,) if type(result) is _Tensor else _tensors((result,)):
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= first:
                call = call or Call(self, label, first, last)
                _attach(tensor, node, call)

    def stack(self, task: int) -> list[tuple[Call, Coordinates, Mark]]:
        """What is open in a pass through a graph."""
        stack = self.open.get(task)
        if stack is None:
            stack = self.open[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end, task))
        return stack

    def finish(self, opened: tuple[Call, Coordinates, Mark], end: Mark) -> None:
        """The backward of a call ended then."""
        call, coordinates, start = opened
        tracer = self.tracer
        tracer.append((module_rows, schema.MODULE, call.label.backward, coordinates, tracer.clock, start, end))

    def _end(self, task: int) -> None:
        try:
            stack = self.open.pop(task, None)
            if stack:
                end = self.tracer.clock.mark()
                while stack:
                    self.finish(stack.pop(), end)
        except Exception as error:
            self.tracer.failed(PART, error)


class Call:
    """One forward of a module; a hook on its outputs, by which its backward begins. Holds no tensor and no node.

    Attributes:
        first, last: the nodes that the call made are those from ``first`` to before ``last``.
        task: the latest pass through the graph in which its backward began; −1 before.
    """

    __slots__ = ("first", "label", "last", "spans", "task")

    __torch_unserializable__ = True  # torch warns of hooks that get lost with a tensor; this one is nobody's loss

    def __init__(self, spans: _BackwardSpans, label: Label, first: int, last: int) -> None:
        self.spans = spans
        self.label = label
        self.first = first
        self.last = last
        self.task = -1

    def __call__(self, _gradient: Any) -> None:
        spans = self.spans
        tracer = spans.tracer
        try:
            task = _graph_task()
            if task == self.task or not tracer.recording:
                return  # another output has told
            self.task = task
            stack = spans.open.get(task)
            if stack is None:
                stack = spans.stack(task)
            now = tracer.clock.mark()
            first, last = self.first, self.last
            while stack:
                around = stack[-1][0]
                if around.first <= first and last <= around.last:
                    break
                spans.finish(stack.pop(), now)
            stack.append((self, tracer.coordinates, now))
        except Exception as error:
            tracer.failed(PART, error)


class _Complete:
    """A hook on a tensor by which the backward ends of every call that came after the tensor.

    Attributes:
        number: of the node that made the tensor.
    """

    __slots__ = ("number", "spans")

    __torch_unserializable__ = True

    def __init__(self, spans: _BackwardSpans, number: int) -> None:
        self.spans = spans
        self.number = number

    def __call__(self, _gradient: Any) -> None:
        spans = self.spans
        try:
            stack = spans.open.get(_graph_task())
            if not stack or stack[-1][0].first <= self.number:
                return
            now = spans.tracer.clock.mark()
            while stack and stack[-1][0].first > self.number:
                spans.finish(stack.pop(), now)
        except Exception as error:
            spans.tracer.failed(PART, error)


def _is_watched(tensor: Any) -> bool:
    hooks = tensor._backward_hooks
    return hooks is not None and _KEY in hooks


def _attach(tensor: Any, node: Any, hook: Call | _Complete) -> None:
    """What ``Tensor.register_hook`` does, at a third of its price; before the hooks that are there.

    Other people's hooks on an output (FSDP gathers parameters there) belong to the module's backward. And a module
    around this one hooks the same tensor later and has to begin earlier.
    """
    hooks = tensor._backward_hooks
    if hooks is None:
        tensor._backward_hooks = hooks = OrderedDict()
        node._register_hook_dict(tensor)
        hooks[_KEY] = hook
        return
    key = hook if _KEY in hooks else _KEY
    others = list(hooks.items())
    hooks.clear()  # autograd goes by the order of insertion, which move_to_end() does not change
    hooks[key] = hook
    hooks.update(others)


def _tensors(values: Any) -> list[Any]:
    """The tensors in arguments or results: in lists, tuples, dictionaries and dataclasses, the first few of them."""
    if len(values) == 1 and type(values[0]) is _Tensor:
        return list(values)
    found: list[Any] = []
    _collect(values, found, _MOST_NESTING)
    return found


def _collect(values: Iterable[Any], found: list[Any], nesting: int) -> None:
    for value in values:
        kind = type(value)
        if kind is _Tensor or issubclass(kind, _Tensor):
            found.append(value)
        elif nesting and issubclass(kind, (list, tuple)):
            _collect(value, found, nesting - 1)
        elif nesting and issubclass(kind, dict):
            _collect(value.values(), found, nesting - 1)
        elif nesting and is_dataclass(kind):
            _collect(getattr(value, "__dict__", {}).values(), found, nesting - 1)
        if len(found) >= _MOST_TENSORS:
            return


def _leave_to_python(*functions: Any) -> None:
    """Have ``torch.compile`` compile no frames of these: where a graph breaks it would take them for the model's."""
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]

    def skip(eval_frame: ModuleType) -> None:
        for code in codes:
            eval_frame.skip_code(code)

    wrapt.register_post_import_hook(skip, "torch._dynamo.eval_frame")


_leave_to_python(
    _attach, _is_watched, _tensors, _collect,
    *(part for owner in (_BackwardSpans, Call, _Complete) for part in vars(owner).values()),
)  # fmt: skip
