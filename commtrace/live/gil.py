"""Long work beside training, in pieces."""

from __future__ import annotations

import time


def let_go_of_the_gil() -> None:
    """Let a training thread that waits for the GIL have it: otherwise it waits a whole switch interval, 5 ms."""
    time.sleep(0)
