"""Has a command that analyses runs keep the memory that it frees, for the next column.

An analysis makes and drops thousands of columns. glibc gives each that is larger than 128 kB back to the kernel, which
then zeroes new pages for the next: a quarter of the time of ``commtrace summary`` on two million spans. Only for
processes that end soon; what they hold at most hardly grows. Never called in a training process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from commtrace.cli.touched_memory import Heap, available_memory

_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLDS: Final = (1 << 30, 32 << 20)
"""Columns up to this size come from the heap, which is kept. Older glibc takes no more than 32 MiB."""

_SETTINGS: Final = (
    (-1, -1),  # M_TRIM_THRESHOLD: and give nothing of it back, however much it is
    (-2, 64 << 20),  # M_TOP_PAD: it grows by 64 MiB at a time
    (-8, 1),  # M_ARENA_MAX: threads share it
)
"""Parameters of ``mallopt(3)``, with their numbers in glibc's malloc.h."""

_RESERVED: Final = 4
"""So many GiB of the heap, none of them touched, are to be backed by huge pages: 2 M spans need 1 GB, in 250,000 small
pages otherwise, each of them a fault and an entry in the processor's table of pages."""

_PAGE: Final = mmap.PAGESIZE

_LEAST_OF_BYTE: Final = 25
_LEAST_OF_ROW: Final = 400
"""What an analysis takes at least for each byte of a run's files, and for each of its spans. Measured: 54 and 80 bytes,
460 and 470 bytes."""

_MOST_OF_FILES: Final = 512 << 20
"""Some of them may be of earlier attempts, which nobody reads."""

_MARGIN: Final = 4
"""So many times what is touched ahead must be available."""

_ENVIRONMENT: Final = {
    # Read by pyarrow as it is imported: its own pool would hold apart what numpy could use.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # Read by numpy as it is imported. It would ask for huge pages column by column, whatever part of them is needed; on
    # virtual machines, whose hosts back such pages only as they are touched, that took three times as long as the small
    # ones.
    "NUMPY_MADVISE_HUGEPAGE": "0",
}


_heap: Heap | None = None


def keep_freed_memory() -> None:
    """Call it before numpy and pyarrow are imported. Without glibc only those two are told; what a user set stays."""
    global _heap
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # statically linked; Windows
        return
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    # Any setting stops glibc from raising that threshold by itself: without it, the others would do harm.
    accepted = next((largest for largest in _MMAP_THRESHOLDS if libc.mallopt(_MMAP_THRESHOLD, largest)), None)
    if accepted is not None:
        for parameter, setting in _SETTINGS:
            libc.mallopt(parameter, setting)
    if accepted == _MMAP_THRESHOLDS[0]:  # what is reserved would not be of the heap otherwise
        _heap = _reserved_heap(libc)


def expect_run(directory: Path) -> None:
    """All of it is about to be read and replayed: the memory that this takes at least is touched meanwhile."""
    with suppress(RuntimeError):  # no more threads: whoever needs the memory touches it
        threading.Thread(target=_expect_files, args=(directory,), name="commtrace-memory", daemon=True).start()


def expect_rows(count: int) -> None:
    """So many spans are about to be analysed."""
    _expect(count * _LEAST_OF_ROW)


def _expect_files(directory: Path) -> None:
    try:
        with os.scandir(directory) as folders:
            ranks = [folder.path for folder in folders if folder.is_dir()]
        sizes = [file.stat().st_size for rank in ranks for file in os.scandir(rank) if file.name.endswith(".arrows")]
    except OSError:
        return  # whoever reads them says what is wrong
    _expect(min(sum(sizes) * _LEAST_OF_BYTE, _MOST_OF_FILES))


def _expect(num_bytes: int) -> None:
    if _heap is not None and num_bytes * _MARGIN < available_memory():
        _heap.touch(num_bytes)


def _reserved_heap(libc: Any) -> Heap | None:
    """Grow the heap, tell the kernel how to back it once it is touched, and free it; as far as the system allows."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not hasattr(libc, "madvise"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = (1 << 30) - (1 << 20)  # below what malloc would take from elsewhere
    blocks = [block for block in (libc.malloc(size) for _ in range(_RESERVED)) if block]
    heap = Heap(libc.madvise, [range(-(-block // _PAGE) * _PAGE, block + size - _PAGE) for block in blocks])
    heap.advise(mmap.MADV_HUGEPAGE)
    for block in blocks:
        libc.free(block)
    return heap
