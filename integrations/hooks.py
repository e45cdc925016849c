"""Where integrations have always found :class:`Hooks`; capture hangs its hooks with it too."""

from commtrace.capture.hooks import Hooks, Wrap

__all__ = ["Hooks", "Wrap"]
