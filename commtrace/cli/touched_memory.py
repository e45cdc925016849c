"""Touches memory before it is needed, on a core that has nothing else to do.

The kernel zeroes each page when it is first touched. Done ahead and many at once, that costs half as much, and none of
it is waited for. In virtual machines whose host takes back what was freed it costs twenty times as much, for huge pages
most of all: there the rest of the heap gets small ones.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

_POPULATE_WRITE: Final = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14: touches pages and changes nothing in them; earlier kernels refuse."""

_HUGE_PAGE: Final = 2 << 20
_AT_ONCE: Final = 8 << 20
"""Of small pages."""

_SLOW_S: Final = 0.001
_MOST_SLOW: Final = 4
"""A huge page takes 0.1 to 0.3 ms. Where the host had taken its memory back, it took 4.5 ms."""

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Heap:
    """Address space of this process that glibc takes memory from, from its begin on.

    Args:
        madvise: ``madvise(2)``: address, length, advice; gives 0 when it has done it.
        parts: addresses, in ascending order; the first part is the one that is touched.
        clock_s: the time that the calling thread has had of a core.
    """

    def __init__(
        self,
        madvise: Callable[[int, int, int], int],
        parts: Sequence[range],
        clock_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._madvise = madvise
        self._parts = parts
        self._clock_s = clock_s
        self._touched = -(-parts[0].start // _HUGE_PAGE) * _HUGE_PAGE if parts else 0
        self._wanted = 0
        self._is_refused = False
        self._is_huge = True
        self._num_slow = 0
        self._thread: threading.Thread | None = None
        self._changes = threading.Lock()

    def advise(self, advice: int) -> None:
        """About what was not touched yet."""
        for part in self._parts:
            begin = max(part.start, self._touched)
            if begin < part.stop:
                self._madvise(begin, part.stop - begin, advice)

    def touch(self, num_bytes: int) -> None:
        """So much of it from its begin on, in a thread of its own; less where it is not as large."""
        if not self._parts or self._is_refused:
            return
        with self._changes:
            self._wanted = max(self._wanted, min(self._parts[0].start + num_bytes, self._parts[0].stop))
            if self._thread is None:
                thread = threading.Thread(target=self._touch_all, name="commtrace-memory", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: whoever needs the memory touches it
                    return
                self._thread = thread

    def _touch_all(self) -> None:
        while length := self._next_length():
            self._touch_next(length)

    def _next_length(self) -> int:
        """How much to touch next; 0 where nothing is left, and this thread ends."""
        with self._changes:
            at_once = _HUGE_PAGE if self._is_huge else _AT_ONCE
            if self._wanted - self._touched >= at_once and not self._is_refused:
                return at_once
            self._thread = None
            return 0

    def _touch_next(self, length: int) -> None:
        begin_s = self._clock_s()
        if self._madvise(self._touched, length, _POPULATE_WRITE):
            self._is_refused = True
            return
        self._touched += length
        if self._is_huge:
            self._num_slow += self._clock_s() - begin_s > _SLOW_S
            if self._num_slow == _MOST_SLOW:
                self._is_huge = False
                self.advise(mmap.MADV_NOHUGEPAGE)


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that neither the system nor a limit of a container or job keeps from this process; 0 where nothing tells.

    Args:
        proc: where ``proc(5)`` is mounted.
        cgroups: where ``cgroups(7)`` are, of version 2 or 1.
    """
    try:
        told = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        available = int(told["MemAvailable"].split()[0]) << 10
        groups = (proc / "self" / "cgroup").read_text().splitlines()
        return min([available, *chain.from_iterable(_left_by(cgroups, group) for group in groups)])
    except (OSError, KeyError, ValueError):
        return 0


def _left_by(cgroups: Path, group: str) -> Iterator[int]:
    """What the limits of a group that this process is in, and those of the groups around it, leave."""
    _, controllers, path = group.split(":", 2)
    if not controllers:  # version 2
        root, names = cgroups, ("memory.max", "memory.current")
    elif "memory" in controllers.split(","):
        root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    else:
        return
    inner = root / path.strip("/")
    # In a container the path may be that of the host, and what is mounted the container's own group.
    for folder in {root, inner, *(parent for parent in inner.parents if parent.is_relative_to(root))}:
        limit, used = (folder / name for name in names)
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            yield int(most) - int(used.read_text())
