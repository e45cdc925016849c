"""Has Python look for no garbage while a command works through a run, nor for all that is left at its end.

What an analysis makes and drops is freed as soon as nothing refers to it. Collections would only find what is in use:
columns, modules, thousands of small results, again and again, a tenth of a second in a summary of two million spans.
"""

from __future__ import annotations

import atexit
import gc
from typing import Any


def look_for_no_garbage(context: Any) -> None:
    """Until the click context of the command is closed."""
    if gc.isenabled():
        gc.disable()
        context.call_on_close(gc.enable)


def leave_everything_at_the_end() -> None:
    """For the process of a command: the system takes back what it holds when it ends."""
    atexit.register(gc.freeze)
