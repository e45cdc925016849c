"""Read the state of a rank's process, on its own host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from commtrace.trace.metadata import RankMetadata

RUNS: Final = "runs"
SUSPENDED: Final = "suspended"
IN_KERNEL: Final = "in_kernel"
GONE: Final = "gone"


class Process(Protocol):
    """A process and the epoch time, in ns, at which it was there for certain."""

    @property
    def host(self) -> str: ...

    @property
    def boot_id(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def session(self) -> int: ...


AskProcess = Callable[[RankMetadata], "str | None"]
"""Returns the state of a rank's process; None if it is unknown, as from another host."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_STATE, _USER, _SYSTEM, _START = 0, 11, 12, 19
"""Fields of /proc/PID/stat after the name: state, CPU times in clock ticks, and start in those since boot (proc(5))."""

_OF_LETTER: Final = {"Z": GONE, "X": GONE, "T": SUSPENDED, "t": SUSPENDED, "D": IN_KERNEL}


def unknown_process(metadata: RankMetadata) -> str | None:
    return None


def process_state(process: Process) -> str | None:
    """Return ``runs``, ``suspended`` (SIGSTOP, debugger), ``in_kernel`` or ``gone``; None on another host or boot."""
    if not process.boot_id or not _BOOT_ID.exists() or _BOOT_ID.read_text().strip() != process.boot_id:
        return None
    if process.host != socket.gethostname():
        return None  # A container of the same machine: its process numbers are others.
    try:
        after_name = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return GONE
    if _started_ns(int(after_name[_START])) > process.session:
        return GONE
    return _OF_LETTER.get(after_name[_STATE], RUNS)


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process of this host so far, to 10 ms; 0 where that is not known."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    ticks = int(after_name[_USER]) + int(after_name[_SYSTEM])
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _started_ns(ticks: int) -> int:
    """Return epoch ns. A process that began after the recording is another one with the same number."""
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int((int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")) * 1e9)
