"""Looking at threads is safe whatever is collected meanwhile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from commtrace.capture import threads
from commtrace.capture.threads import CompletionCallbacks, frames_by_thread

COLLECTS_A_THREAD_LOCAL = """
import gc, sys, threading
from commtrace.capture.threads import frames_by_thread

class Node: pass

for _ in range(30):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
gc.collect()
node = Node()
node.itself, node.local = node, threading.local()
node.local.x = 1
del node
gc.set_threshold(gc.get_count()[0] + 8)  # a collection begins after some of the threads
frames_by_thread()
print(gc.isenabled())
"""


def test_every_thread_has_its_frame() -> None:
    frame = frames_by_thread()[threading.get_ident()]
    while frame.f_back is not None and frame.f_code.co_name != "test_every_thread_has_its_frame":
        frame = frame.f_back

    assert frame.f_code.co_name == "test_every_thread_has_its_frame"


def test_a_collection_that_frees_what_belongs_to_threads_does_not_stop_python() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECTS_A_THREAD_LOCAL], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "True\n"


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        frames_by_thread()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="this Python needs no lock")
def test_a_child_that_is_forked_meanwhile_collects_and_can_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_is_paused", True)
    with threads._lock:
        gc.disable()
        child = os.fork()
        if child == 0:
            try:
                frames_by_thread()
            finally:
                os._exit(0 if gc.isenabled() else 1)
        gc.enable()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="this Python needs no lock")
@pytest.mark.timeout(30)
def test_a_handler_of_a_signal_can_look_while_its_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[bool] = []

    def interrupt() -> dict[int, FrameType]:
        if not interrupted:
            interrupted.append(gc.isenabled())
            frames_by_thread()
            interrupted.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", interrupt)
    frames_by_thread()

    assert (interrupted, gc.isenabled()) == ([False, False], True)


def listener(callbacks: CompletionCallbacks, heard: list[Any]) -> Callable[[Any], None]:
    return partial(lambda _alive, future: heard.append(future.value()), callbacks.alive)


def test_a_callback_that_has_run_is_not_waited_for() -> None:
    callbacks, heard, future = CompletionCallbacks(), list[int](), torch.futures.Future[int]()

    callbacks.add(future, listener(callbacks, heard))
    future.set_result(7)

    assert heard == [7]
    assert callbacks.wait(timeout_seconds=0)


def test_a_callback_that_is_to_come_is_waited_for() -> None:
    callbacks, heard, future = CompletionCallbacks(), list[int](), torch.futures.Future[int]()
    callbacks.add(future, listener(callbacks, heard))
    assert not callbacks.wait(timeout_seconds=0)

    timer = threading.Timer(0.05, future.set_result, [7])
    timer.start()

    assert callbacks.wait(timeout_seconds=30)
    assert heard == [7]
    timer.join()


def test_a_tensor_of_cpp_is_waited_for_until_it_is_gone() -> None:
    callbacks = CompletionCallbacks()
    tensors = [torch.ones(4), torch.ones(2)]
    callbacks.add_temporaries(tensors)

    assert callbacks.unsettled
    assert not callbacks.pending
    assert not callbacks.settle(timeout_seconds=0)
    tensors.clear()

    assert callbacks.settle(timeout_seconds=0)
    assert not callbacks.unsettled


def test_a_tensor_that_comes_again_is_not_compared_with_itself() -> None:
    callbacks, tensor = CompletionCallbacks(), torch.ones(4)
    for _ in range(2):
        callbacks.add_temporaries([tensor])

    del tensor
    assert not callbacks.unsettled
