"""Capture ``step`` of every ``torch.optim.Optimizer`` as the optimizer phase; of nested ones, only the outermost."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.recording.compile_safe import OptimizerListener, step_hooks
from commtrace.trace import schema


class StepHooks:
    """Our hooks on the steps of all optimizers, never taken out: torch raises if a table of hooks changes in a step."""

    def __init__(self) -> None:
        self.listener: OptimizerListener | None = None
        self._is_registered = False

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
        before_step, after_step = step_hooks(is_dynamo_compiling, self)
        optimizer.register_optimizer_step_pre_hook(before_step)
        optimizer.register_optimizer_step_post_hook(after_step)
        self._is_registered = True
        return True


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
        self._opened = _OpenOptimizers()
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
        tracer = self._tracer
        for listener in tuple(tracer.optimizer_listeners):
            listener()
        stack = self._opened.stack
        # A step that raised left its entry behind: torch calls the second hook only after success.
        while stack and any(opened is optimizer for opened, _ in stack):
            stack.pop()
        if tracer.open_optimizers > 0:
            tracer.steps.optimizer_is_part_of_another(optimizer)
            stack.append((optimizer, None))
            return
        tracer.steps.optimizer_begins(optimizer)
        stack.append((optimizer, tracer.enter(schema.OPTIMIZER, type(optimizer).__name__)))

    def after_step(self, optimizer: object) -> None:
        stack = self._opened.stack
        while stack and stack[-1][0] is not optimizer:
            if not any(opened is optimizer for opened, _ in stack):
                return
            stack.pop()
        if not stack:
            return
        _, span = stack.pop()
        if span is not None:
            self._tracer.leave(span)
            self._tracer.steps.optimizer_ended(optimizer)


class _OpenOptimizers(threading.local):
    """The optimizers that step on a thread, the innermost last, with their phases."""

    def __init__(self) -> None:
        self.stack: list[tuple[object, Span | None]] = []


def _register(_args: tuple[object, ...], _kwargs: dict[str, object]) -> None:
    STEP_HOOKS.register()
