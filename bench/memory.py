"""How much memory a command and the processes that it starts hold at most, and the time that they take.

    python bench/memory.py commtrace summary commtrace-runs/my-run --workers 2

Twice a second the proportional set sizes (PSS) of all its processes are added up: a page shared by n of them counts as
1/n of a page in each. Linux only.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

PERIOD_S: Final = 0.5


def processes_of(pid: int) -> list[int]:
    """Return a process and all that it has started, and they in turn, as far as they live."""
    found = [pid]
    for one in found:
        try:
            children = [task.read_text().split() for task in Path(f"/proc/{one}/task").glob("*/children")]
        except OSError:  # it has ended meanwhile
            continue
        found += [int(child) for own in children for child in own]
    return found


def pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Memory(threading.Thread):
    """Watches the memory of a process and of those that it starts."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.peak: tuple[int, ...] = ()  # PSS of each process when the sum was largest

    def run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            now = tuple(map(pss_bytes, processes_of(self._pid)))
            self.peak = max(self.peak, now, key=sum)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def main() -> None:
    command = sys.argv[1:]
    if not command:
        sys.exit(__doc__)
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    memory = Memory(process.pid)
    memory.start()
    _, status, used = os.wait4(process.pid, 0)
    memory.stop()
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - begin
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    each = " + ".join(f"{one / 1e6:.0f}" for one in memory.peak)
    print(f"{wall:.1f} s of wall time, {used.ru_utime + used.ru_stime:.1f} s of the cores, children included")
    print(f"sum of PSS {sum(memory.peak) / 1e6:.0f} MB ({each}); the command itself, RSS {used.ru_maxrss / 1e3:.0f} MB")
    print(f"the largest process, RSS {largest:.0f} MB")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
