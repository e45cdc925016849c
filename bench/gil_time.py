"""CPU time that a thread spends while it holds the GIL, seen by a thread of C that never takes it.

Only with Python 3.11, where another thread can read who holds the GIL, and with a C compiler.
"""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.thread_time import cpu_clock

_SOURCE = r"""
#include <Python.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

static PyThreadState *thread;
static clockid_t clock_of_thread;
static _Atomic int is_to_run;
static _Atomic long long held_ns, free_ns;
static pthread_t watcher;

static long long cpu_ns(void) {
    struct timespec now = {0, 0};
    clock_gettime(clock_of_thread, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void *watch(void *unused) {
    long long before = cpu_ns();
    while (is_to_run) {
        nanosleep(&(struct timespec){0, 5000}, NULL);
        int holds = _PyThreadState_UncheckedGet() == thread;
        long long now = cpu_ns();
        *(holds ? &held_ns : &free_ns) += now - before;
        before = now;
    }
    return unused;
}

int watch_thread(unsigned long native_id, int clock) {
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    for (thread = PyInterpreterState_ThreadHead(interpreter); thread; thread = PyThreadState_Next(thread)) {
        if (thread->native_thread_id == native_id) {
            clock_of_thread = clock;
            held_ns = free_ns = 0;
            is_to_run = 1;
            return pthread_create(&watcher, NULL, watch, NULL);
        }
    }
    return -1;
}

void stop_watching(long long *held, long long *not_held) {
    is_to_run = 0;
    pthread_join(watcher, NULL);
    *held = held_ns;
    *not_held = free_ns;
}
"""


class GilTime:
    """CPU time of a thread, ns: with the GIL, and without."""

    held_ns = 0
    free_ns = 0


@contextmanager
def gil_time_of(native_id: int) -> Iterator[GilTime | None]:
    """Measure the thread while the block runs; None where that cannot be done. Read the result after the block."""
    library = _library()
    if library is None:
        yield None
        return
    if library.watch_thread(ctypes.c_ulong(native_id), ctypes.c_int(cpu_clock(native_id))) != 0:
        raise RuntimeError(f"Python has no thread {native_id}")
    measured = GilTime()
    try:
        yield measured
    finally:
        held, free = ctypes.c_longlong(), ctypes.c_longlong()
        library.stop_watching(ctypes.byref(held), ctypes.byref(free))
        measured.held_ns, measured.free_ns = held.value, free.value


def _library() -> Any:
    if not (3, 11) <= sys.version_info < (3, 12):
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "gil.c", Path(folder) / "gil.so"
        source.write_text(_SOURCE)
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
        include = f"-I{sysconfig.get_path('include')}"
        try:
            subprocess.run(
                [*compiler, "-O2", "-shared", "-fPIC", "-pthread", include, str(source), "-o", str(built)], check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return ctypes.PyDLL(str(built))
