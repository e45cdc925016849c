"""Has a command that analyses runs keep the memory that it frees, for the next column.

An analysis makes and drops thousands of columns. glibc gives each that is larger than 128 kB back to the kernel, which
then zeroes new pages for the next: a quarter of the time of ``commtrace summary`` on two million spans. Only for
processes that end soon; what they hold at most hardly grows. Never called in a training process.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLDS: Final = (1 << 30, 32 << 20)
"""Columns up to this size come from the heap, which is kept. Older glibc takes no more than 32 MiB."""

_SETTINGS: Final = (
    (-1, (1 << 31) - 1),  # M_TRIM_THRESHOLD: and give nothing of it back
    (-2, 64 << 20),  # M_TOP_PAD: it grows by 64 MiB at a time
    (-8, 1),  # M_ARENA_MAX: threads share it
)
"""Parameters of ``mallopt(3)``, with their numbers in glibc's malloc.h."""

_ENVIRONMENT: Final = {
    # Read by pyarrow as it is imported: its own pool would hold apart what numpy could use.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # Read by numpy as it is imported. A huge page is zeroed whole; on virtual machines, whose hosts back such pages
    # only as they are touched, that took three times as long as the small pages that were needed.
    "NUMPY_MADVISE_HUGEPAGE": "0",
}


def keep_freed_memory() -> None:
    """Call it before numpy and pyarrow are imported. Without glibc only those two are told; what a user set stays."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # statically linked; Windows
        return
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    # Any setting stops glibc from raising that threshold by itself: without it, the others would do harm.
    if any(libc.mallopt(_MMAP_THRESHOLD, threshold) for threshold in _MMAP_THRESHOLDS):
        for parameter, setting in _SETTINGS:
            libc.mallopt(parameter, setting)
