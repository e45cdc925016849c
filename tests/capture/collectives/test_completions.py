"""At the end of a process, callbacks that are still to come are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from commtrace.capture.collectives.completions import CompletionCallbacks


def listener(callbacks: CompletionCallbacks, heard: list[Any]) -> Callable[[Any], None]:
    return partial(lambda _alive, future: heard.append(future.value()), callbacks.alive)


def test_a_callback_that_has_run_is_not_waited_for() -> None:
    callbacks, heard, future = CompletionCallbacks(), [], torch.futures.Future[int]()

    callbacks.add(future, listener(callbacks, heard))
    future.set_result(7)

    assert heard == [7]
    assert callbacks.wait(timeout_seconds=0)


def test_a_callback_that_is_to_come_is_waited_for() -> None:
    callbacks, heard, future = CompletionCallbacks(), [], torch.futures.Future[int]()
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
