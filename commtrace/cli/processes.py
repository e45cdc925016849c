"""Whether the process that recorded a rank still lives, where that can be told: on its own host."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from commtrace.trace.metadata import RankMetadata

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_STATE, _START = 0, 19
"""Of /proc/PID/stat, counted from behind the name: the state, and the start in clock ticks since boot (proc(5))."""


def process_lives(metadata: RankMetadata) -> bool | None:
    """True or False for a process of this boot of this host; None for one of another, or of another container."""
    if not metadata.boot_id or not _BOOT_ID.exists() or _BOOT_ID.read_text().strip() != metadata.boot_id:
        return None
    if metadata.host != socket.gethostname():
        return None  # A container of the same machine: its process numbers are others.
    try:
        after_name = Path(f"/proc/{metadata.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return after_name[_STATE] not in "ZX" and _started_ns(int(after_name[_START])) <= metadata.session


def _started_ns(ticks: int) -> int:
    """Epoch ns of a start: a process that began after the recording did is another one by the same number."""
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int((int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")) * 1e9)
