"""The optimizer phase of any training loop: ``step`` of every ``torch.optim.Optimizer``, by hooks for all of them.

An optimizer that steps inside another one (Megatron's and DeepSpeed's wrap torch's) is part of the outer one's
phase: only the outermost is recorded. Where nobody marks steps, they end with the optimizers
(:mod:`commtrace.capture.model.step_finder`), which is told here of every optimizer that is made or steps, and of steps
that ``GradScaler`` skips because gradients overflowed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from commtrace.called import nothing
from commtrace.capture.hooks import Hooks
from commtrace.capture.model.optimizer_hooks import STEP_HOOKS
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of optimizer steps"


class OptimizerPhase:
    """Turns optimizer steps into ``optimizer`` spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._local = threading.local()
        self._replaced = Hooks(PART, tracer)

    def install(self) -> None:
        """Have the hooks called. Idempotent."""
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
            self._replaced.replace(Optimizer, "zero_grad", self._replaced.around(_register, nothing))
        STEP_HOOKS.listener = self

    def uninstall(self) -> None:
        """Have them called no more."""
        if STEP_HOOKS.listener is self:
            STEP_HOOKS.listener = None
        self._replaced.restore()

    def _then_note(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Any, /, *arguments: Any, **keywords: Any) -> None:  # noqa: N807
            original(optimizer, *arguments, **keywords)
            try:
                self._tracer.steps.optimizer_made(optimizer)
            except Exception as error:
                self._tracer.failed(PART, error)

        return __init__

    def _also_when_skipped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, /, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
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
        """Switch the part off."""
        self._tracer.failed(PART, error)

    def before_step(self, optimizer: Any) -> None:
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

    def after_step(self, optimizer: Any) -> None:
        """End the phase that it began."""
        stack = self._stack()
        if not any(opened is optimizer for opened, _ in stack):
            return
        opened, span = stack.pop()
        while opened is not optimizer:
            opened, span = stack.pop()
        if span is not None:
            self._tracer.leave(span)
            self._tracer.steps.optimizer_ended(optimizer)

    def _stack(self) -> list[tuple[Any, Span | None]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[tuple[Any, Span | None]] = self._local.stack
        return stack


def _register(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    STEP_HOOKS.register()
