"""Capture optimizer steps that are compiled: Dynamo leaves the hooks on an optimizer's step out of its graph.

Which functions step an optimizer is known from their compilation, in which Dynamo meets the optimizer. From then on a
call of such a function is the optimizer's phase; if it trains as well, what follows its last forward or backward.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from commtrace.capture.device.clock import Mark
from commtrace.capture.hooks import Arguments, Hooks, Keywords
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.recording.compile_safe import RAISED, wrap_with_callbacks
from commtrace.trace import schema

PART: Final = "capture of compiled optimizer steps"

_TRACED_METHODS: Final = ("step", "_init_group")
"""Dynamo meets one of these: the first, if a function calls it, the other, if that is all that is compiled."""


class CompiledCalls:
    """The calls of compiled functions: scripts keep their wrappers, which tell the recording that is on, if any."""

    def __init__(self) -> None:
        self.listener: CompiledSteps | None = None

    @property
    def active(self) -> bool:
        return self.listener is not None

    def failed(self, error: Exception) -> None:
        if self.listener is not None:
            self.listener.failed(error)

    def watched(self, compiled: Callable[..., Any], function: _Function) -> Callable[..., Any]:
        import torch

        begin = functools.partial(self._begin, function)
        return wrap_with_callbacks(compiled, torch.compiler.is_dynamo_compiling, self, begin, self._end)

    def _begin(self, function: _Function, args: Arguments, _kwargs: Keywords) -> tuple[CompiledSteps, _Call] | None:
        listener = self.listener
        return None if listener is None or not listener.active else (listener, listener.begin(function, args))

    def _end(self, begun: tuple[CompiledSteps, _Call], result: object) -> None:
        listener, call = begun
        listener.end(call, result)


COMPILED_CALLS: Final = CompiledCalls()
"""Of this process."""


class CompiledSteps:
    """Turn the compiled optimizer steps in them into ``optimizer`` spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)
        self._local = threading.local()

    @property
    def active(self) -> bool:
        return self._hooks.active

    def failed(self, error: Exception) -> None:
        self._hooks.failed(error)

    def install(self) -> None:
        import torch

        self._hooks.replace(torch, "compile", self._wrap_compile)
        self._hooks.when_imported("torch._dynamo.variables.optimizer", self._hook_dynamo)
        COMPILED_CALLS.listener = self

    def uninstall(self) -> None:
        if COMPILED_CALLS.listener is self:
            COMPILED_CALLS.listener = None
        self._hooks.restore()

    def _hook_dynamo(self, module: ModuleType) -> None:
        variable = module.OptimizerVariable
        if "call_method" in vars(variable):
            self._hooks.replace(variable, "call_method", self._hooks.around(self._method_is_traced))
        else:  # torch ≥ 2.15 keeps its methods in a table, and calls this one where it traces a step
            self._hooks.replace(variable, "move_step_if_cpu", self._hooks.around(self._step_is_traced))

    def _wrap_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            model = args[0] if args else kwargs.get("model")
            try:
                # Without a model it is a decorator, which calls this again. Compiled modules stay as they are.
                if self._hooks.active and isinstance(model, (FunctionType, MethodType)) and callable(compiled):
                    return self._watched(compiled, model)
            except Exception as error:
                self._hooks.failed(error)
            return compiled

        return compile

    def _watched(self, compiled: Callable[..., Any], model: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        function = _Function()
        owner = getattr(model, "__self__", None)
        if isinstance(owner, torch.optim.Optimizer) and getattr(model, "__name__", "") == "step":
            function.add(owner)
        return COMPILED_CALLS.watched(compiled, function)

    def _calls(self) -> list[_Call]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        calls: list[_Call] = self._local.calls
        return calls

    def _method_is_traced(self, args: Arguments, kwargs: Keywords) -> None:
        # Arguments of call_method: the variable, the translator, the name of the method.
        if len(args) > 2 and args[2] in _TRACED_METHODS:
            self._step_is_traced(args, kwargs)

    def _step_is_traced(self, args: Arguments, _kwargs: Keywords) -> None:
        calls = self._calls()
        if calls:
            call = calls[-1]
            call.function.add(args[0].value)
            if call.start is None and self._tracer.recording:
                call.start = self._tracer.clock.mark()

    def begin(self, function: _Function, args: Arguments) -> _Call:
        """Note that a compiled function is called, and begin a phase if it is known to step an optimizer."""
        tracer = self._tracer
        call = _Call(function, tracer.steps.updates, tracer.work_end)
        if function.is_silent and not function.trains:
            call.optimizers = function.stepped_by(args)
            if call.optimizers and not tracer.open_optimizers:
                self._announce(call.optimizers[0])
                call.span = tracer.enter(schema.OPTIMIZER, type(call.optimizers[0]).__name__)
        self._calls().append(call)
        call.arguments = args
        return call

    def end(self, call: _Call, result: object) -> None:
        """End the phase, or find that there was one."""
        tracer, calls, function = self._tracer, self._calls(), call.function
        while calls and calls.pop() is not call:
            pass
        arguments, call.arguments = call.arguments, ()
        if call.span is not None:
            tracer.leave(call.span)
            if result is not RAISED and tracer.steps.updates == call.updates:
                self._stepped(call.optimizers)
            return
        if result is RAISED or tracer.open_optimizers or tracer.steps.updates != call.updates:
            return  # The hooks on the optimizer's step have seen it: it was not compiled.
        optimizers = function.stepped_by(arguments)
        if not optimizers:
            return
        function.is_silent = True
        has_trained = tracer.work_end is not call.work_end
        function.trains = function.trains or has_trained
        self._announce(optimizers[0])
        span = tracer.enter(schema.OPTIMIZER, type(optimizers[0]).__name__)
        start = tracer.work_end if has_trained else call.start
        if span.start is not None and start is not None:
            span.start = start
        tracer.leave(span)
        self._stepped(optimizers)

    def _announce(self, optimizer: object) -> None:
        for listener in tuple(self._tracer.optimizer_listeners):
            listener()
        self._tracer.steps.optimizer_begins(optimizer)

    def _stepped(self, optimizers: list[object]) -> None:
        for optimizer in optimizers:
            self._tracer.steps.optimizer_ended(optimizer)


class _Function:
    """A compiled function, and the optimizers that it steps."""

    def __init__(self) -> None:
        self.is_silent = False  # the hooks on the optimizer's step do not see it
        self.trains = False  # forwards or backwards are seen in it
        self._optimizers: dict[int, weakref.ref[object]] = {}

    def add(self, optimizer: object) -> None:
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)  # an earlier one with this id is gone

    def stepped_by(self, arguments: tuple[object, ...]) -> list[object]:
        """Return the optimizers that a call steps: those among its arguments, if there are any."""
        known = [optimizer for reference in self._optimizers.values() if (optimizer := reference()) is not None]
        given = [argument for argument in arguments if any(argument is optimizer for optimizer in known)]
        return given or known


class _Call:
    def __init__(self, function: _Function, updates: int, work_end: Mark | None) -> None:
        self.function = function
        self.updates = updates
        self.work_end = work_end
        self.start: Mark | None = None
        self.span: Span | None = None
        self.optimizers: list[object] = []
        self.arguments: tuple[object, ...] = ()
