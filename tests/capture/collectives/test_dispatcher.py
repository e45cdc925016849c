"""Kernels stay in torch's dispatcher, where other threads may run them at any moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # has the kernels of traced tensors

from commtrace.capture.collectives.dispatcher import Kernel
from commtrace.capture.collectives.functional import FunctionalCapture, FunctionalWaits
from tests.capture.recording import Recording, fake_backend

OPERATIONS: Any = torch.ops._c10d_functional
TURNS = 300


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_backend():
        yield


def test_an_operator_that_torch_does_not_have_has_no_kernel() -> None:
    assert functional_kernel("all_reduce_twice") is None


def test_an_operator_has_one_kernel_however_often_it_is_asked_for() -> None:
    kernel = functional_kernel("all_reduce")

    assert kernel is not None
    assert functional_kernel("all_reduce") is kernel
    assert kernel.overload is OPERATIONS.all_reduce.default


def test_what_nobody_captures_passes_through_also_when_it_is_traced() -> None:
    kernel = functional_kernel("all_reduce")
    assert kernel is not None
    assert kernel.capture is None

    assert communicate().tolist() == [1.0, 1.0]
    assert OPERATIONS.all_reduce(torch.ones(2, device="meta"), "sum", world()).is_meta


def test_a_tensor_that_does_not_say_whether_it_is_traced_passes_through() -> None:
    class Silent(torch.Tensor):
        @property
        def is_meta(self) -> bool:
            raise NotImplementedError("unheard of")

    assert functional_kernel("all_reduce") is not None

    result = OPERATIONS.all_reduce(torch.ones(2).as_subclass(Silent), "sum", world())
    assert OPERATIONS.wait_tensor(result).tolist() == [1.0, 1.0]


def test_a_capture_is_released_only_by_itself() -> None:
    kernel = Kernel(OPERATIONS.all_reduce.default, lambda _: None)
    one, other = (lambda *_: "one"), (lambda *_: "other")
    kernel.capture = one
    kernel.release(other)
    assert kernel.call() == "one"
    kernel.release(one)
    assert kernel.capture is None


def test_a_recording_may_end_while_a_call_of_another_thread_is_in_its_capture() -> None:
    recording, is_inside, may_go_on = Recording(), threading.Event(), threading.Event()
    capture = FunctionalCapture(recording.tracer, FunctionalWaits(recording.tracer))
    capture.install()
    kernel = functional_kernel("all_reduce")
    assert kernel is not None
    assert kernel.capture is not None
    inner, results = kernel.capture, []

    def slow(*arguments: Any) -> Any:
        is_inside.set()
        assert may_go_on.wait(10)
        return inner(*arguments)

    kernel.capture = slow
    other = threading.Thread(target=lambda: results.append(communicate()))
    other.start()
    assert is_inside.wait(10)
    kernel.capture = inner
    capture.uninstall()
    may_go_on.set()
    other.join(10)

    assert [result.tolist() for result in results] == [[1.0, 1.0]]
    assert recording.warnings() == []


def test_recordings_start_and_stop_while_other_threads_communicate() -> None:
    ended, failures = threading.Event(), []

    def go_on_communicating() -> None:
        try:
            while not ended.is_set():
                communicate()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=go_on_communicating) for _ in range(3)]
    for thread in threads:
        thread.start()
    seen, warnings = 0, []
    for _ in range(TURNS):
        recording = Recording()
        capture = FunctionalCapture(recording.tracer, FunctionalWaits(recording.tracer))
        capture.install()
        ended.wait(0.0003)
        capture.uninstall()
        seen += len(recording.communications())
        warnings += recording.warnings()
    ended.set()
    for thread in threads:
        thread.join(10)

    assert (failures, warnings) == ([], [])
    assert seen > 0


def communicate() -> torch.Tensor:
    result: torch.Tensor = OPERATIONS.wait_tensor(OPERATIONS.all_reduce(torch.ones(2), "sum", world()))
    return result


def world() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)
