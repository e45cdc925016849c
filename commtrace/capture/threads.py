"""Looks at the threads of this process.

>>> frames_by_thread()[threading.get_ident()].f_code.co_name  # doctest: +SKIP
'<module>'
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

_lock = threading.Lock()
_was_enabled = False


def frames_by_thread() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by ident.

    Python 3.11 makes frame objects while it holds the lock of its list of threads. If that starts a garbage collection
    that frees a ``threading.local``, the collection waits for the same lock, for ever and with the GIL
    (https://github.com/python/cpython/issues/106883). So nothing is collected meanwhile.
    """
    if sys.version_info[:2] != (3, 11):
        return sys._current_frames()
    global _was_enabled
    with _lock:  # else one thread enables what another one has just disabled
        _was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if _was_enabled:
                gc.enable()


def _after_fork() -> None:
    """Do in a forked child what the thread would have done that is not there."""
    global _lock
    if _lock.locked():
        _lock = threading.Lock()
        if _was_enabled:
            gc.enable()


os.register_at_fork(after_in_child=_after_fork)
