"""Ends a command whose reader has closed the pipe, as ``head`` does: quietly, and with a status of its own."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

CLOSED_PIPE: Final = 128 + signal.SIGPIPE
"""Exit status, as of a program that the signal ended; 1 has a meaning of its own in many commands."""


def discard_output() -> None:
    """Let nothing more be written, also not what is buffered, which Python would write at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
