"""The kernel of the extension for the buckets of a reducer, with stand-ins for torch's dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commtrace.trace.schema import COLLECTIVE
from tests.capture.simulated_nccl import SimulatedTensor, tensor
from tests.native.bare_core import BareCore, ProcessGroup

pytestmark = pytest.mark.timeout(60)

KEYS, BACKENDS = 0b111, 0b011


class RefusedError(Exception):
    """Of a backend."""


class Work:
    def is_completed(self) -> bool:
        return False


class Dispatcher:
    """Calls the kernel as C++ does in a backward pass. A box is a tuple of what is in it."""

    def __init__(self, core: BareCore) -> None:
        self.core = core
        self.task = 1
        self.passed: list[tuple[Any, ...]] = []
        self.slow: list[tuple[Any, ...]] = []
        self.begun: list[int] = []
        self.within: Callable[[], None] = lambda: None
        self.work_of: Callable[[Any], Any] = lambda box: box[0]
        core.core.configure_hooks(
            failed=core.errors.append, graph_task=lambda: self.task, current_node=None,
            begin_backward=self.begun.append, all_reduce=-1, operation=0, name=0,
        )  # fmt: skip
        core.core.watch_reducer(True, False)
        self.kernel = core.core.BucketKernel(
            self.redispatch, BACKENDS, self.slow_kernel, lambda box: box[0], lambda box: self.work_of(box)
        )

    def redispatch(self, keys: int, *arguments: Any) -> Any:
        self.passed.append((keys, *arguments))
        self.within()
        return arguments[0], (Work(),)

    def slow_kernel(self, *arguments: Any, **keywords: Any) -> Any:
        self.slow.append(arguments)
        return self.redispatch(arguments[0] & BACKENDS, *arguments[1:])

    def call(self, *tensors: Any, group: object = None, **keywords: Any) -> Any:
        box = (self.core.process_group if group is None else group,)
        return self.kernel(KEYS, list(tensors) or [tensor(8, "cpu")], box, "sum", **keywords)

    def rows(self) -> list[dict[str, Any]]:
        self.core.core.forget_buckets()
        return self.core.take(COLLECTIVE)


def references(core: BareCore) -> int:
    """Return how many references there are to the counters of the group."""
    return sys.getrefcount(core.counters)


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    core = BareCore()
    core.configure(tensor_types=(SimulatedTensor,))
    yield Dispatcher(core)
    core.core.end_hooks()
    core.core.end()


def test_a_bucket_is_recorded_and_goes_on_to_its_backend(dispatcher: Dispatcher) -> None:
    before = references(dispatcher.core)
    given = [tensor(24, "cpu")]
    result = dispatcher.kernel(KEYS, given, (dispatcher.core.process_group,), "sum")
    assert dispatcher.passed == [(KEYS & BACKENDS, given, (dispatcher.core.process_group,), "sum")]
    assert result[0] is given
    facts, _ = dispatcher.core.core.latest_bucket(1)
    assert dispatcher.core.core.take_bucket(facts[0]) is result[1][0]
    dispatcher.call()
    assert (dispatcher.begun, dispatcher.slow, dispatcher.core.errors) == ([1], [], [])
    assert [(row["bytes"], row["seq"], row["is_async"]) for row in dispatcher.rows()] == [(8, 1, 1)]
    assert references(dispatcher.core) == before


def two_tensors(dispatcher: Dispatcher) -> None:
    dispatcher.call(tensor(8, "cpu"), tensor(8, "cpu"))


def an_unknown_group(dispatcher: Dispatcher) -> None:
    dispatcher.call(group=ProcessGroup())


def outside_of_a_backward(dispatcher: Dispatcher) -> None:
    dispatcher.task = -1
    dispatcher.call()


def in_a_function_that_waits(dispatcher: Dispatcher) -> None:
    dispatcher.core.core.set_waits_in_cpp(True)
    dispatcher.call()
    dispatcher.core.core.set_waits_in_cpp(False)


def while_a_graph_is_captured(dispatcher: Dispatcher) -> None:
    dispatcher.core.core.set_capturing(True)
    dispatcher.call()
    dispatcher.core.core.set_capturing(False)


def in_a_bracket(dispatcher: Dispatcher) -> None:
    dispatcher.core.counters.is_slow = True
    dispatcher.call()


def without_a_reducer(dispatcher: Dispatcher) -> None:
    dispatcher.core.core.watch_reducer(False, False)
    dispatcher.call()


def a_tensor_of_another_class(dispatcher: Dispatcher) -> None:
    dispatcher.call("a tensor")


def counted_but_with_a_future_to_wait_for(dispatcher: Dispatcher) -> None:
    dispatcher.core.core.watch_reducer(True, True)
    dispatcher.core.core.set_inside(True)
    dispatcher.call()
    dispatcher.core.core.set_inside(False)


@pytest.mark.parametrize(
    "call",
    [
        two_tensors, an_unknown_group, outside_of_a_backward, in_a_function_that_waits, while_a_graph_is_captured,
        in_a_bracket, without_a_reducer, a_tensor_of_another_class, counted_but_with_a_future_to_wait_for,
    ],
)  # fmt: skip
def test_calls_that_are_no_bucket_are_left_to_python(
    dispatcher: Dispatcher, call: Callable[[Dispatcher], None]
) -> None:
    call(dispatcher)
    assert [len(calls) for calls in (dispatcher.slow, dispatcher.passed, dispatcher.core.errors)] == [1, 1, 0]
    assert dispatcher.core.counters.launched == 0
    assert dispatcher.rows() == []


def test_other_forms_of_a_call_are_left_to_python(dispatcher: Dispatcher) -> None:
    dispatcher.call(timeout=3)
    with pytest.raises(IndexError):  # as Python's says of it
        dispatcher.kernel()
    assert (len(dispatcher.slow), dispatcher.core.errors, dispatcher.rows()) == (2, [], [])


def test_counted_calls_pass_by(dispatcher: Dispatcher) -> None:
    dispatcher.core.core.set_inside(True)
    dispatcher.call()
    dispatcher.core.core.set_inside(False)
    assert (len(dispatcher.passed), dispatcher.slow, dispatcher.core.counters.launched) == (1, [], 0)


def test_a_refused_call_takes_no_number(dispatcher: Dispatcher) -> None:
    refused = RefusedError("no")

    def refuse() -> None:
        raise refused

    dispatcher.within = refuse
    with pytest.raises(RefusedError) as raised:
        dispatcher.call()
    assert raised.value is refused
    assert dispatcher.core.counters.launched == 0
    dispatcher.within = lambda: None
    dispatcher.call()
    assert [row["seq"] for row in dispatcher.rows()] == [0]


def test_outside_of_the_window_and_of_skipped_groups_buckets_are_only_counted(dispatcher: Dispatcher) -> None:
    dispatcher.core.core.set_recording(False)
    dispatcher.call()
    dispatcher.core.core.set_recording(True)
    dispatcher.core.counters.is_skipped = True
    dispatcher.call()
    assert (dispatcher.core.counters.launched, dispatcher.slow, dispatcher.rows()) == (2, [], [])


def test_a_recording_may_end_within_a_call(dispatcher: Dispatcher) -> None:
    before = references(dispatcher.core)
    seen: list[bool] = []

    def stop() -> None:
        seen.append(dispatcher.core.core.is_in_hook())
        dispatcher.core.core.end_hooks()
        dispatcher.core.core.end()

    dispatcher.within = stop
    assert dispatcher.call()[0]
    assert (seen, dispatcher.core.core.is_in_hook()) == ([True], False)
    assert dispatcher.rows() == []
    dispatcher.within = lambda: None
    dispatcher.call()
    assert len(dispatcher.slow) == 1
    assert references(dispatcher.core) == before


def test_errors_of_ours_are_reported_and_those_that_end_the_program_go_through(dispatcher: Dispatcher) -> None:
    broken, ending = ValueError("broken"), KeyboardInterrupt()

    def raising(error: BaseException) -> Callable[[Any], Any]:
        def work_of(_box: Any) -> Any:
            raise error

        return work_of

    dispatcher.work_of = raising(broken)
    dispatcher.call()
    assert dispatcher.core.errors == [broken]
    dispatcher.work_of = raising(ending)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.call()
    assert dispatcher.core.errors == [broken]
    assert [row["is_unfinished"] for row in dispatcher.rows()] == [1, 1]
