"""Our hooks on the steps of all optimizers: registered with torch once in a process, and never taken out.

torch raises into ``optimizer.step()`` when a table of hooks changes while it goes through it: a script that stops the
recording in a hook of its own would die of it. So the hooks stay and pass on what they see while somebody records.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, Final, Protocol

from commtrace.called import nothing, surrounded


class StepListener(Protocol):
    """What records the steps of optimizers."""

    def before_step(self, optimizer: Any) -> None:
        """Note that an optimizer is about to step."""

    def after_step(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""

    def failed(self, error: Exception) -> None:
        """Handle what one of these raised."""


class StepHooks:
    """The hooks, and who listens to them.

    Attributes:
        listener: is called while it is not None.
    """

    def __init__(self) -> None:
        self.listener: StepListener | None = None
        self._is_registered = False

    @property
    def active(self) -> bool:
        """Whether somebody listens."""
        return self.listener is not None

    def failed(self, error: Exception) -> None:
        """Pass a failure on to the listener."""
        if self.listener is not None:
            self.listener.failed(error)

    def register(self) -> bool:
        """Register the hooks with torch, if they are not. Return False, and do nothing, within an optimizer's step."""
        if self._is_registered:
            return True
        from torch.compiler import is_dynamo_compiling
        from torch.optim import optimizer

        if _is_called_from(optimizer.__file__):
            return False
        hook = functools.partial(surrounded, nothing, is_dynamo_compiling, self, end=nothing)
        optimizer.register_optimizer_step_pre_hook(hook(begin=self._before_step))
        optimizer.register_optimizer_step_post_hook(hook(begin=self._after_step))
        self._is_registered = True
        return True

    def _before_step(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        if self.listener is not None:
            self.listener.before_step(arguments[0])

    def _after_step(self, arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
        if self.listener is not None:
            self.listener.after_step(arguments[0])


STEP_HOOKS: Final = StepHooks()
"""Of this process."""


def _is_called_from(file: str) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None
