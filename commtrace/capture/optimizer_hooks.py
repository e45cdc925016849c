"""Hooks of torch's optimizers that can be taken out at any time, also while torch calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class OptimizerHook:
    """One hook for the steps of all optimizers.

    torch goes through the table of its hooks while it calls them, and raises into ``optimizer.step()`` when an entry
    leaves the table meanwhile and another one follows. A hook that fails, or has done its work, is taken out by itself:
    it then does nothing any more, and leaves the table when :meth:`remove` is called again.

    Args:
        register: ``register_optimizer_step_pre_hook`` or ``…_post_hook``.
        call: gets what torch passes.
        failed: is told what fails.
    """

    def __init__(
        self, register: Callable[[Any], Any], call: Callable[..., None], failed: Callable[[Exception], None]
    ) -> None:
        self._call = call
        self._failed = failed
        self._is_off = False
        self._handle: Any = register(self)

    def __call__(self, *arguments: Any) -> None:
        try:
            if not self._is_off:
                self._call(*arguments)
        except Exception as error:
            self._failed(error)

    def remove(self) -> bool:
        """Take the hook out. False while an optimizer steps: ask again later."""
        self._is_off = True
        if self._handle is not None:
            if _an_optimizer_steps():
                return False
            self._handle.remove()
            self._handle = None
        return True


def _an_optimizer_steps() -> bool:
    """Whether any thread is inside of what torch puts around ``step``, and so may be going through its table."""
    from torch.optim import Optimizer

    around = Optimizer.profile_hook_step(lambda: None).__code__
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is around:
                return True
            frame = frame.f_back
    return False
