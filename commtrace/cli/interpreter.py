"""How Python runs while a command works through a run: without collections of garbage, with threads that take turns.

What an analysis makes and drops is freed as soon as nothing refers to it. Collections would only find what is in use:
columns, modules, thousands of small results, again and again, a tenth of a second in a summary of two million spans.

A thread that comes back from a long column waits for the interpreter while another one imports a module or works
through a loop: by default for 5 ms each time, in which numpy could have worked off a column or two.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from typing import Final

_TURN_S: Final = 0.0002


def run_for_analysis(at_end: Callable[[Callable[[], None]], object]) -> None:
    """Until what is handed to ``at_end`` is called, as that of the command's click context does when it is closed."""
    if gc.isenabled():
        gc.disable()
        at_end(gc.enable)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    at_end(lambda: sys.setswitchinterval(before))


def leave_everything_at_the_end() -> None:
    """For the process of a command: the system takes back what it holds when it ends."""
    atexit.register(gc.freeze)
