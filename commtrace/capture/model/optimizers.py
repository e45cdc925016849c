"""Capture ``step`` of every ``torch.optim.Optimizer`` as the optimizer phase; of nested ones, only the outermost."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol

from commtrace._compile_safe import do_nothing, wrap_with_callbacks
from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema


class StepListener(Protocol):
    """Record the steps of optimizers."""

    def before_step(self, optimizer: object) -> None: ...

    def after_step(self, optimizer: object) -> None: ...

    def failed(self, error: Exception) -> None:
        """Handle an exception of one of these."""


class StepHooks:
    """Our hooks on the steps of all optimizers, never taken out: torch raises if a table of hooks changes in a step."""

    def __init__(self) -> None:
        self.listener: StepListener | None = None
        self._is_registered = False

    @property
    def active(self) -> bool:
        return self.listener is not None

    def failed(self, error: Exception) -> None:
        if self.listener is not None:
            self.listener.failed(error)

    def register(self) -> bool:
        """Register the hooks with torch, once. Return False, and do nothing, within an optimizer's step."""
        if self._is_registered:
            return True
        from torch.compiler import is_dynamo_compiling
        from torch.optim import optimizer

        if _is_called_from(optimizer.__file__):
            return False
        hook = functools.partial(wrap_with_callbacks, do_nothing, is_dynamo_compiling, self, end=do_nothing)
        optimizer.register_optimizer_step_pre_hook(hook(begin=self._before_step))
        optimizer.register_optimizer_step_post_hook(hook(begin=self._after_step))
        self._is_registered = True
        return True

    def _before_step(self, arguments: tuple[object, ...], _keywords: dict[str, object]) -> None:
        if self.listener is not None:
            self.listener.before_step(arguments[0])

    def _after_step(self, arguments: tuple[object, ...], _keywords: dict[str, object]) -> None:
        if self.listener is not None:
            self.listener.after_step(arguments[0])


STEP_HOOKS: Final = StepHooks()
"""Of this process."""


def _is_called_from(file: str) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


PART: Final = "capture of optimizer steps"


class OptimizerPhase:
    """Turn optimizer steps into ``optimizer`` spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._local = threading.local()
        self._replaced = Hooks(PART, tracer)

    def install(self) -> None:
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import Optimizer

        if STEP_HOOKS.listener is self:
            return
        self._replaced.replace(Optimizer, "__init__", self._then_note)
        self._replaced.replace(GradScaler, "step", self._also_when_skipped)
        if not STEP_HOOKS.register():
            self._tracer.guard.noticed(
                "the recording was started within an optimizer's step: steps of optimizers are recorded from the next "
                "zero_grad() of an optimizer on. Start it outside to have all of them."
            )
            self._replaced.replace(Optimizer, "zero_grad", self._replaced.around(_register))
        STEP_HOOKS.listener = self

    def uninstall(self) -> None:
        if STEP_HOOKS.listener is self:
            STEP_HOOKS.listener = None
        self._replaced.restore()

    def _then_note(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: object, /, *arguments: object, **keywords: object) -> None:  # noqa: N807
            original(optimizer, *arguments, **keywords)
            try:
                self._tracer.steps.optimizer_made(optimizer)
            except Exception as error:
                self._tracer.failed(PART, error)

        return __init__

    def _also_when_skipped(self, original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def step(scaler: object, /, optimizer: object, *arguments: object, **keywords: object) -> object:
            updates = None
            try:
                updates = self._tracer.steps.updates
            except Exception as error:
                self._tracer.failed(PART, error)
            result = original(scaler, optimizer, *arguments, **keywords)
            try:
                if self._tracer.steps.updates == updates and not self._tracer.open_optimizers:
                    self._tracer.steps.optimizer_ended(optimizer)
            except Exception as error:
                self._tracer.failed(PART, error)
            return result

        return step

    def failed(self, error: Exception) -> None:
        self._tracer.failed(PART, error)

    def before_step(self, optimizer: object) -> None:
        """Begin a phase, if no other optimizer is stepping."""
        for listener in tuple(self._tracer.optimizer_listeners):
            listener()
        stack = self._stack()
        # A step that raised left its entry behind: torch calls the second hook only after success.
        while any(opened is optimizer for opened, _ in stack):
            stack.pop()
        if self._tracer.open_optimizers > 0:
            self._tracer.steps.optimizer_is_part_of_another(optimizer)
            stack.append((optimizer, None))
            return
        self._tracer.steps.optimizer_begins(optimizer)
        stack.append((optimizer, self._tracer.enter(schema.OPTIMIZER, type(optimizer).__name__)))

    def after_step(self, optimizer: object) -> None:
        stack = self._stack()
        if not any(opened is optimizer for opened, _ in stack):
            return
        opened, span = stack.pop()
        while opened is not optimizer:
            opened, span = stack.pop()
        if span is not None:
            self._tracer.leave(span)
            self._tracer.steps.optimizer_ended(optimizer)

    def _stack(self) -> list[tuple[object, Span | None]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[tuple[object, Span | None]] = self._local.stack
        return stack


def _register(_args: tuple[object, ...], _kwargs: dict[str, object]) -> None:
    STEP_HOOKS.register()
