"""Look at the threads of this process."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

_lock = threading.RLock()  # re-entrant: a signal's handler may stop the recording while its thread is in here
_is_paused = False


def frames_by_thread() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by ident."""
    # Python 3.11 makes frame objects while it holds the lock of its list of threads. If that starts a garbage
    # collection that frees a threading.local, the collection waits for the same lock, for ever and with the GIL
    # (https://github.com/python/cpython/issues/106883). So nothing is collected meanwhile.
    if sys.version_info[:2] != (3, 11):
        return sys._current_frames()
    global _is_paused
    with _lock:  # else one thread enables what another one has just disabled
        if not gc.isenabled():  # by the program, or by this thread further up
            return sys._current_frames()
        try:
            _is_paused = True
            gc.disable()
            return sys._current_frames()
        finally:
            gc.enable()
            _is_paused = False


def _after_fork() -> None:  # does what the thread would have done that a child does not have
    global _lock, _is_paused
    _lock = threading.RLock()
    if _is_paused:
        _is_paused = False
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
