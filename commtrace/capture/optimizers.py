"""The optimizer phase of any training loop: ``step`` of every ``torch.optim.Optimizer``, by torch's own global hooks.

An optimizer that steps inside another one (Megatron's and DeepSpeed's wrap torch's) is part of the outer one's
phase: only the outermost is recorded.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of optimizer steps"


class OptimizerPhase:
    """Turns optimizer steps into ``optimizer`` spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._handles: list[Any] = []
        self._local = threading.local()

    def install(self) -> None:
        """Register the hooks with torch. Idempotent."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        try:
            stack = self._stack()
            # A step that raised left its entry behind: torch calls the second hook only after success.
            while any(opened is optimizer for opened, _ in stack):
                stack.pop()
            nested = self._tracer.open_optimizers > 0
            stack.append(
                (optimizer, None if nested else self._tracer.enter(schema.OPTIMIZER, type(optimizer).__name__))
            )
        except Exception as error:
            self._tracer.failed(PART, error)

    def _after(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        try:
            stack = self._stack()
            if not any(opened is optimizer for opened, _ in stack):
                return
            opened, span = stack.pop()
            while opened is not optimizer:
                opened, span = stack.pop()
            if span is not None:
                self._tracer.leave(span)
        except Exception as error:
            self._tracer.failed(PART, error)

    def _stack(self) -> list[tuple[Any, Span | None]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[tuple[Any, Span | None]] = self._local.stack
        return stack
