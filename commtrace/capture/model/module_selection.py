"""Selects the modules to record: those of the configuration, and others while a trigger requests them.

:mod:`commtrace.capture.model.modules` is imported when the first module is chosen, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commtrace.capture.model.module_names import PART as PART
from commtrace.capture.tracer import Tracer
from commtrace.trace.selection.module_choice import ModuleChoice

if TYPE_CHECKING:
    from commtrace.capture.model.modules import ModuleSpans


class ModuleSelection:
    """Switches the capture of modules; on the training thread, between steps.

    Args:
        tracer: where spans go.
        configured: the choice that holds when nobody asks for another one; empty: no modules.

    Raises:
        ConfigurationError: ``configured`` cannot be read.
    """

    def __init__(self, tracer: Tracer, configured: str = "") -> None:
        if configured:
            ModuleChoice.parse(configured)
        self._tracer = tracer
        self._configured = configured
        self._spans: ModuleSpans | None = None

    def install(self) -> None:
        """Record what the configuration names, from the first step on."""
        if self._configured:
            self.select(self._configured)

    def select(self, spec: str) -> None:
        """Record the modules that ``spec`` names, e.g. ``depth=2``, instead of those that are recorded now.

        Raises:
            ConfigurationError: the choice cannot be read.
        """
        if self._spans is None:
            from commtrace.capture.model.modules import ModuleSpans

            self._spans = ModuleSpans(self._tracer)
        self._spans.select(spec)

    def clear(self) -> None:
        """Record those that the configuration names, or none."""
        if self._configured:
            self.select(self._configured)
        else:
            self.uninstall()

    def uninstall(self) -> None:
        """Record none."""
        if self._spans is not None:
            self._spans.clear()
