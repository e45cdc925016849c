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

from commtrace.capture.hooks import Hooks
from commtrace.capture.model.optimizer_hooks import AFTER_STEP, BEFORE_STEP, OptimizerHook
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of optimizer steps"


class OptimizerPhase:
    """Turns optimizer steps into ``optimizer`` spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks: list[OptimizerHook] = []
        self._local = threading.local()
        self._replaced = Hooks(PART, tracer)

    def install(self) -> None:
        """Have the hooks called. Idempotent."""
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import Optimizer

        if not self._hooks:
            self._replaced.replace(Optimizer, "__init__", self._then_note)
            self._replaced.replace(GradScaler, "step", self._also_when_skipped)
            self._hooks.append(OptimizerHook(BEFORE_STEP, self._before, self._failed))
            self._hooks.append(OptimizerHook(AFTER_STEP, self._after, self._failed))

    def uninstall(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()
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

    def _failed(self, error: Exception) -> None:
        self._tracer.failed(PART, error)

    def _before(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
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

    def _after(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
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
