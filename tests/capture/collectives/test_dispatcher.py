"""Kernels in torch's dispatcher: other threads may run them at any moment, and they go where nothing can be in one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # has the kernels of traced tensors

from commtrace.capture import threads
from commtrace.capture.collectives import dispatcher
from commtrace.capture.collectives.dispatcher import Captures, Kernel, kernel_for, take_out
from commtrace.capture.collectives.functional import FunctionalCapture, FunctionalWaits
from commtrace.capture.threads import CallingThread
from tests.capture.recording import Recording, fake_backend
from tests.process_groups import world_group
from tests.unreadable import unreadable

OPERATIONS: Any = torch.ops._c10d_functional
TURNS = 300


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_backend():
        yield
    for kernel, _ in dispatcher._kernels.values():
        kernel.capture = None
    take_out()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process with one thread: pytest has others."""
    monkeypatch.setattr(threads, "other_threads", lambda: set[int]())


def all_reduce_kernel() -> Kernel:
    kernel = kernel_for("_c10d_functional", "all_reduce")
    assert kernel is not None
    return kernel


def is_registered() -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_reduce", "BackendSelect"))


def passing(original: Any, arguments: Any, keywords: Any) -> Any:
    return original(*arguments, **keywords)


def test_an_operator_that_torch_does_not_have_has_no_kernel() -> None:
    assert kernel_for("_c10d_functional", "all_reduce_twice") is None


def test_an_operator_has_one_kernel_however_often_it_is_asked_for() -> None:
    kernel = all_reduce_kernel()

    assert all_reduce_kernel() is kernel
    assert kernel.overload is OPERATIONS.all_reduce.default


def test_uncaptured_calls_pass_through_even_when_traced() -> None:
    assert all_reduce_kernel().capture is None

    assert communicate().tolist() == [1.0, 1.0]
    assert OPERATIONS.all_reduce(torch.ones(2, device="meta"), "sum", world()).is_meta


def test_a_tensor_that_does_not_say_whether_it_is_traced_passes_through() -> None:
    class Silent(torch.Tensor):
        is_meta = unreadable(NotImplementedError("unheard of"))

    all_reduce_kernel()

    result = OPERATIONS.all_reduce(torch.ones(2).as_subclass(Silent), "sum", world())
    assert OPERATIONS.wait_tensor(result).tolist() == [1.0, 1.0]


def test_a_capture_is_released_only_by_itself() -> None:
    kernel = all_reduce_kernel()
    kernel.capture = passing
    kernel.release(lambda *_: None)
    assert kernel.capture is passing
    kernel.release(passing)
    assert kernel.capture is None


def test_a_kernel_goes_when_its_capture_is_released(alone: None) -> None:
    captures = Captures(CallingThread(set()))
    captures.take(all_reduce_kernel(), passing)
    communicate()
    assert is_registered()

    captures.release()

    assert not is_registered()
    assert communicate().tolist() == [1.0, 1.0]


def test_a_kernel_that_another_recording_has_taken_stays(alone: None) -> None:
    first, second = Captures(CallingThread(set())), Captures(CallingThread(set()))
    first.take(all_reduce_kernel(), passing)
    second.take(all_reduce_kernel(), lambda original, arguments, keywords: original(*arguments, **keywords))

    first.release()
    assert is_registered()
    second.release()
    assert not is_registered()


def from_another_thread(thread: CallingThread) -> None:
    other = threading.Thread(target=lambda: thread.threads)
    other.start()
    other.join()


@pytest.mark.parametrize(
    "happens",
    [
        from_another_thread,
        lambda thread: setattr(thread, "has_counted", True),
        lambda thread: thread.issuing.append("an operation between torch's hooks"),
    ],
)
def test_a_kernel_stays_and_passes_through_where_something_may_be_in_it(
    alone: None, happens: Callable[[CallingThread], object]
) -> None:
    thread = CallingThread(set())
    captures = Captures(thread)
    captures.take(all_reduce_kernel(), passing)
    happens(thread)

    captures.release()

    assert is_registered()
    assert communicate().tolist() == [1.0, 1.0]


def test_a_kernel_stays_while_another_thread_runs() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    captures = Captures(CallingThread(set()))
    captures.take(all_reduce_kernel(), passing)
    try:
        captures.release()
        assert is_registered()
    finally:
        done.set()
        other.join()


def test_a_kernel_stays_if_it_is_released_within_itself(alone: None) -> None:
    """As a signal's handler does, or a failure of ours."""
    captures = Captures(CallingThread(set()))

    def releasing(original: Any, arguments: Any, keywords: Any) -> Any:
        captures.release()
        return original(*arguments, **keywords)

    captures.take(all_reduce_kernel(), releasing)

    assert communicate().tolist() == [1.0, 1.0]
    assert is_registered()


def test_a_recording_may_end_while_a_call_of_another_thread_is_in_its_capture() -> None:
    recording, is_inside, may_go_on = Recording(), threading.Event(), threading.Event()
    capture = capture_with_kernels(recording)
    kernel = all_reduce_kernel()
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

    others = [threading.Thread(target=go_on_communicating) for _ in range(3)]
    for thread in others:
        thread.start()
    seen, warnings = 0, []
    for _ in range(TURNS):
        recording = Recording()
        capture = capture_with_kernels(recording)
        ended.wait(0.0003)
        capture.uninstall()
        seen += len(recording.communications())
        warnings += recording.warnings()
    ended.set()
    for thread in others:
        thread.join(10)

    assert (failures, warnings) == ([], [])
    assert seen > 0


def capture_with_kernels(recording: Recording) -> FunctionalCapture:
    capture = FunctionalCapture(recording.tracer, FunctionalWaits(recording.tracer))
    capture.install()
    capture.capture_calls_of_cpp()
    return capture


def communicate() -> torch.Tensor:
    result: torch.Tensor = OPERATIONS.wait_tensor(OPERATIONS.all_reduce(torch.ones(2), "sum", world()))
    return result


def world() -> str:
    return str(world_group().group_name)
