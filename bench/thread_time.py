"""CPU time of commtrace's own threads in this process: of those that may hold the GIL, and of those that never do."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def python_threads_ns() -> int:
    """Return the CPU time of commtrace's Python threads so far, ns."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("commtrace")]
    return sum(_cpu_ns(thread.native_id) for thread in threads if thread.native_id is not None)


def native_threads_ns() -> int:
    """Return the CPU time of commtrace's threads that Python does not know, ns."""
    known = {thread.native_id for thread in threading.enumerate()}
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) not in known]
    return sum(_cpu_ns(int(task.name)) for task in tasks if (task / "comm").read_text().startswith("commtrace"))


def _cpu_ns(native_id: int) -> int:
    """Return the CPU time of a thread so far, ns. /proc has ticks of 10 ms only, and not everywhere schedstat."""
    return time.clock_gettime_ns(cpu_clock(native_id))


def cpu_clock(native_id: int) -> int:
    """Return the number of the clock of a thread's CPU time: Linux's MAKE_THREAD_CPUCLOCK(thread, CPUCLOCK_SCHED)."""
    return (~native_id << 3) | 6
