"""Lives on without a word, and does not end when it is asked to."""

from __future__ import annotations

import signal
import time


def main(descriptor: int, parent: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)
