"""Hooks of torch's optimizers that can be taken out at any time, also while torch calls them."""

from __future__ import annotations

from collections.abc import Callable
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
        self._is_off = self._is_running = False
        self._handle: Any = register(self)

    def __call__(self, *arguments: Any) -> None:
        try:
            if self._is_off:
                return
            try:
                self._is_running = True
                self._call(*arguments)
            finally:
                self._is_running = False
        except Exception as error:
            self._is_running = True
            self._failed(error)
            self._is_running = False

    def remove(self) -> bool:
        """Take the hook out. False while it is running: ask again later."""
        self._is_off = True
        if self._is_running:
            return False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        return True
