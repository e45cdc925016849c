"""The extension in the midst of what a job may do: stops and restarts within calls, signals, forks, lack of memory."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from commtrace.capture.collectives.groups import PythonCounters
from commtrace.capture.device import clock
from commtrace.capture.native import NativeClock
from commtrace.trace import schema
from commtrace.trace.schema import COLLECTIVE
from tests.capture.recording import native
from tests.capture.simulated_nccl import SimulatedTensor, tensor
from tests.native.bare_core import (
    ASYNCHRONOUS,
    NO_PLACE,
    SYNCHRONOUS,
    BareCore,
    ProcessGroup,
    Slow,
)
from tests.native.forked import in_child
from tests.native.simulated_driver import SimulatedDriver
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)

TENSORS = [torch.zeros(4)]


class Slotted:
    """Has no weak references."""

    __slots__ = ()


def nothing(*_arguments: object) -> None:
    return None


@pytest.fixture
def core() -> Iterator[BareCore]:
    bare = BareCore()
    yield bare
    assert bare.errors == []
    bare.core.end()


# a recording ends while a call is under way


def test_a_work_of_an_earlier_recording_is_no_row_of_the_next(core: BareCore) -> None:
    def restart(*_arguments: object) -> None:
        core.core.end()
        core.core.reset(10)
        core.configure()

    core.method(restart)(core.process_group, TENSORS, SYNCHRONOUS)

    assert core.take() == []
    assert core.core.pending() == []


def test_a_wait_that_began_in_an_earlier_recording_is_no_row_of_the_next_one(core: BareCore) -> None:
    class Work:
        pass

    work = Work()

    def restart(*_arguments: object) -> None:
        core.core.end()
        core.core.reset(10)
        core.configure()
        core.method(lambda *_: work)(core.process_group, TENSORS, SYNCHRONOUS)

    core.method(lambda *_: work)(core.process_group, TENSORS, SYNCHRONOUS)
    core.wait(restart)(work)

    assert core.take() == []
    assert len(core.core.pending()) == 1  # the next recording's


def test_nothing_is_blocked_in_a_new_recording(core: BareCore) -> None:
    blocked: list[object] = []

    def restart(*_arguments: object) -> None:
        blocked.append(core.core.blocked() is None)
        core.core.end()
        core.configure()
        blocked.append(core.core.blocked() is None)

    core.method(restart)(core.process_group, TENSORS, SYNCHRONOUS)

    assert blocked == [False, True]


def test_counters_live_as_long_as_the_calls_that_have_a_number_of_them(core: BareCore) -> None:
    references: list[int] = []

    def refuse(*_arguments: object) -> None:
        references.append(sys.getrefcount(core.counters))
        raise RuntimeError("refused")

    before = sys.getrefcount(core.counters)
    for recording in (True, False):
        core.core.set_recording(recording)
        with pytest.raises(RuntimeError, match="refused"):
            core.method(refuse)(core.process_group, TENSORS, SYNCHRONOUS)

    after = sys.getrefcount(core.counters)
    assert (references, after) == ([before + 1] * 2, before)
    assert core.counters.launched == 0


def test_codes_are_those_of_the_schema(core: BareCore) -> None:
    folder = Path(__file__).parents[2] / "commtrace" / "_native"
    names = ("MODULE", "COLLECTIVE", "P2P", "STALL", "COMPUTE", "COMMUNICATION", "HOST_TIMING", "CUDA_EVENT_TIMING")
    leads = ("UNKNOWN_LEAD", "SYNCHRONIZED_LEAD", "LEAST_LEAD_US", "MOST_LEAD_US")
    declared = re.findall(
        r"\b([A-Z_0-9]+) = (-?\d+)", (folder / "core.h").read_text() + (folder / "rows.c").read_text()
    )

    assert {name: int(code) for name, code in declared if name in (*names, *leads)} == {
        name: getattr(schema, name) for name in (*names, *leads)
    }
    limits = re.findall(r"static const int64_t ([A-Z_]+) = (\d+);", (folder / "marks.c").read_text())
    assert {name: int(value) for name, value in limits if hasattr(clock, name)} == {
        "LONGEST_RECORD_NS": clock.LONGEST_RECORD_NS,
        "WIDEST_BRACKET_NS": clock.WIDEST_BRACKET_NS,
        "DRIFT_PPM": clock.DRIFT_PPM,
    }
    assert len(core.core.dropped()) == len(schema.KINDS)


def test_calls_that_python_handles_hold_no_counters(core: BareCore) -> None:
    before = sys.getrefcount(core.counters)

    core.method(nothing)(core.process_group, [*TENSORS, *TENSORS], SYNCHRONOUS)
    core.method(nothing)(core.process_group, TENSORS, object())
    core.method(nothing)(core.process_group, TENSORS, ASYNCHRONOUS)

    after = sys.getrefcount(core.counters)
    assert after == before


def test_while_a_graph_is_captured_python_handles_every_call(core: BareCore) -> None:
    slow: list[object] = []
    method = core.method(nothing, lambda *arguments: slow.append(arguments))
    core.core.set_capturing(True)
    method(core.process_group, TENSORS, SYNCHRONOUS)
    core.core.set_capturing(False)
    method(core.process_group, TENSORS, SYNCHRONOUS)

    assert len(slow) == 1
    assert core.counters.launched == 1

    core.core.set_capturing(True)
    core.configure()  # by the next recording
    core.method(nothing)(core.process_group, TENSORS, SYNCHRONOUS)
    assert core.counters.launched == 2


def test_several_numbers_are_taken_at_once_as_in_python(core: BareCore) -> None:
    for counters in (core.group(ProcessGroup()), PythonCounters()):
        assert next(counters) == 0
        assert counters.take(3) == 1
        assert next(counters) == 4
        assert counters.launched == 5
        assert counters.next_message(True, 2, 7) == 7 << 32
        assert counters.take_messages(True, 2, 7, 3) == (7 << 32) + 1
        assert counters.take_messages(False, 2, 7, 2) == 7 << 32
        assert counters.next_message(True, 2, 7) == (7 << 32) + 4
        assert sorted(counters.messages()) == [(False, 2, 7, 2), (True, 2, 7, 5)]
    with pytest.raises(TypeError):
        core.group(ProcessGroup()).take("one")
    with pytest.raises(TypeError):
        core.group(ProcessGroup()).take_messages(True, 2)


def test_codes_of_dtypes_are_asked_for_in_each_recording(core: BareCore) -> None:
    codes = [1]

    def code_of_dtype(_dtype: object) -> int:
        return codes[0]

    def recorded() -> list[int]:
        core.method(nothing)(core.process_group, TENSORS, SYNCHRONOUS)
        return [row["dtype"] for row in core.take(COLLECTIVE)]

    core.configure(code_of_dtype=code_of_dtype)
    assert recorded() == [1]
    core.configure()  # a recording without communication
    codes[0] = 2
    core.configure(code_of_dtype=code_of_dtype)  # as a function that got the address of the earlier one
    assert recorded() == [2]


def test_a_harvester_that_outlives_its_recording_takes_nothing_of_the_next_one() -> None:
    earlier, latest = native(100), native(100)
    name = latest.code("forward")
    latest.core.span(0, name, 1, NO_PLACE, 1, 2)

    earlier.gather()
    earlier.give_up()
    assert (earlier.num_added, earlier.num_waiting, sum(earlier.dropped())) == (0, 0, 0)
    assert len(earlier.take()[0]) == 0
    latest.gather()
    assert len(latest.take()[0]) == 1


# exceptions of signals


@pytest.mark.parametrize("ends_program", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("recording", [True, False])
def test_an_exception_that_ends_the_program_goes_through(
    core: BareCore, ends_program: type[BaseException], recording: bool
) -> None:
    class Signalled(TorchFunctionMode):
        """Its Python runs while an attribute is read, which is when a signal's handler may raise."""

        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            raise ends_program

    calls: list[object] = []

    def original(*arguments: object) -> None:
        calls.append(arguments)

    core.core.set_recording(recording)
    method = core.method(original)
    before = sys.getrefcount(core.counters)
    with Signalled(), pytest.raises(ends_program):
        method(core.process_group, TENSORS, SYNCHRONOUS)
    after = sys.getrefcount(core.counters)

    assert calls == []
    assert core.counters.launched == 0
    assert core.core.blocked() is None
    assert after == before


def test_an_exception_that_ends_the_program_comes_out_of_a_wait_that_failed(core: BareCore) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    def fail(*_arguments: object) -> None:
        raise RuntimeError("timeout")

    core.configure(wait_failed=interrupted)
    work = ProcessGroup()
    core.method(lambda *_: work)(core.process_group, TENSORS, SYNCHRONOUS)
    with pytest.raises(KeyboardInterrupt):
        core.wait(fail)(work)


def test_a_wait_that_fails_is_reported_with_the_time_of_the_launch(core: BareCore) -> None:
    told: list[tuple[Any, ...]] = []

    def fail(*_arguments: object) -> None:
        raise RuntimeError("timeout")

    core.configure(wait_failed=lambda facts, error: told.append((facts[-1], str(error))))
    work = ProcessGroup()
    before = core.core.host_ns()
    core.method(lambda *_: work)(core.process_group, TENSORS, SYNCHRONOUS)
    after = core.core.host_ns()
    with pytest.raises(RuntimeError, match="timeout"):
        core.wait(fail)(work)

    [(launched_at, error)] = told
    assert before <= launched_at <= after
    assert error == "timeout"


# Python that runs within a call


def test_a_list_may_lose_its_tensor_while_it_is_read(core: BareCore) -> None:
    class Empties(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            tensors.clear()
            gc.collect()
            return function(*arguments, **(keywords or {}))

    tensors = [torch.zeros(1_000)]
    with Empties():
        core.method(nothing)(core.process_group, tensors, SYNCHRONOUS)

    assert [row["bytes"] for row in core.take(COLLECTIVE)] == [4_000]


def test_finalizers_that_communicate_within_a_call_are_recorded_too(core: BareCore) -> None:
    method = core.method(nothing)

    class Communicates:
        def __del__(self) -> None:
            method(core.process_group, TENSORS, SYNCHRONOUS)

    def collect(*_arguments: object) -> None:
        cycle: list[Any] = [Communicates()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    core.method(collect)(core.process_group, TENSORS, SYNCHRONOUS)

    assert sorted(row["seq"] for row in core.take(COLLECTIVE)) == [0, 1]
    assert core.core.blocked() is None


def test_garbage_that_waits_may_be_collected_while_the_watch_for_hangs_looks(core: BareCore) -> None:
    works = [ProcessGroup() for _ in range(64)]
    remaining = iter(works)
    launch, wait = core.method(lambda *_: next(remaining)), core.wait(nothing)
    for _ in works:
        launch(core.process_group, TENSORS, SYNCHRONOUS)

    class Waits:
        def __init__(self, work: object) -> None:
            self.work, self.itself = work, self

        def __del__(self) -> None:
            wait(self.work)

    garbage = [Waits(work) for work in works]
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        garbage.clear()
        known = core.core.pending()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()

    assert len({facts[0] for facts in known}) == len(known)
    assert len(core.take(COLLECTIVE)) == len(works)


# groups


def test_groups_come_and_go_without_end(core: BareCore) -> None:
    calls = Slow(nothing)
    method = core.method(nothing, calls)
    kept: list[object] = []
    for _ in range(5_000):
        process_group = ProcessGroup()
        kept.append(process_group)  # another address each time
        counters = core.group(process_group)
        method(process_group, TENSORS, SYNCHRONOUS)
        del counters

    assert calls.calls == []
    assert len(core.take(COLLECTIVE)) == 5_000


def test_a_group_at_the_address_of_an_earlier_one_has_its_own_numbers(core: BareCore) -> None:
    method = core.method(nothing)
    for _ in range(3):
        method(core.process_group, TENSORS, SYNCHRONOUS)
    later = core.group(core.process_group)
    core.counters.detach()  # the earlier one is told late
    method(core.process_group, TENSORS, SYNCHRONOUS)

    assert [row["seq"] for row in core.take(COLLECTIVE)] == [0, 1, 2, 0]
    assert (later.launched, core.counters.launched) == (1, 3)


# Works


def test_a_work_at_the_address_of_one_that_died_has_no_wait_of_its(core: BareCore) -> None:
    work = ProcessGroup()
    recorded, wait = core.method(lambda *_: work), core.wait(nothing)
    recorded(core.process_group, TENSORS, SYNCHRONOUS)
    core.core.set_recording(False)
    recorded(core.process_group, TENSORS, SYNCHRONOUS)  # another one, as far as the address tells
    core.core.set_recording(True)
    wait(work)

    [row] = core.take(COLLECTIVE)
    assert row["is_unfinished"]


def test_a_wait_for_a_work_that_nobody_saw_is_not_one_for_a_work_that_had_its_address(core: BareCore) -> None:
    class Work:
        pass

    launch, waits = core.method(lambda *_: Work()), Slow(nothing)
    wait = core.wait(nothing, waits)
    address = id(launch(core.process_group, TENSORS, SYNCHRONOUS))  # its Work dies at once
    unseen = [Work() for _ in range(100)]
    assert address in map(id, unseen)
    for work in unseen:
        wait(work)

    assert core.take(COLLECTIVE) == []
    core.core.end()
    [row] = core.take(COLLECTIVE)
    assert row["is_unfinished"]


def test_a_work_is_referred_to_until_it_was_waited_for(core: BareCore) -> None:
    work = ProcessGroup()
    launch, wait = core.method(lambda *_: work), core.wait(nothing)
    launch(core.process_group, TENSORS, SYNCHRONOUS)
    assert weakref.getweakrefcount(work) == 1
    wait(work)
    assert weakref.getweakrefcount(work) == 0

    for end in (core.core.end, lambda: core.core.surrender(work)):
        core.configure()
        core.method(lambda *_: work)(core.process_group, TENSORS, SYNCHRONOUS)
        end()
        assert weakref.getweakrefcount(work) == 0


def test_works_without_weak_references_are_known_by_their_addresses(core: BareCore) -> None:
    work = Slotted()
    core.method(lambda *_: work)(core.process_group, TENSORS, SYNCHRONOUS)
    core.wait(nothing)(work)

    [row] = core.take(COLLECTIVE)
    assert not row["is_unfinished"]


def test_one_of_several_threads_that_wait_for_a_work_records_it(core: BareCore) -> None:
    work, waiting = ProcessGroup(), threading.Barrier(4)
    core.method(lambda *_: work)(core.process_group, TENSORS, SYNCHRONOUS)
    wait = core.wait(lambda *_: waiting.wait(10))
    threads = [threading.Thread(target=wait, args=(work,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    rows = core.take()
    assert [row["is_unfinished"] for row in rows if row["kind"] == COLLECTIVE] == [0]
    assert len(rows) == 2


def test_works_beyond_what_can_be_remembered_are_counted(core: BareCore) -> None:
    works = [ProcessGroup() for _ in range(5_000)]
    remaining = iter(works)
    launch = core.method(lambda *_: next(remaining))
    for _ in works:
        launch(core.process_group, TENSORS, SYNCHRONOUS)

    assert len(core.core.pending()) + core.num_dropped(COLLECTIVE) == 5_000
    core.core.end()
    assert len(core.take(COLLECTIVE)) + core.num_dropped(COLLECTIVE) == 5_000


# capacity


def test_calls_beyond_the_ring_are_counted(core: BareCore) -> None:
    method = core.method(nothing)
    for _ in range(70_000):
        method(core.process_group, TENSORS, SYNCHRONOUS)

    num_recorded = len(core.take(COLLECTIVE))
    assert num_recorded == 1 << 16
    assert num_recorded + core.num_dropped(COLLECTIVE) == 70_000


def test_calls_beyond_the_capacity_are_counted_until_there_is_room_again() -> None:
    core = BareCore(capacity=10)
    method = core.method(nothing)
    for _ in range(25):
        method(core.process_group, TENSORS, SYNCHRONOUS)
    assert (len(core.take(COLLECTIVE)), core.num_dropped(COLLECTIVE)) == (10, 15)
    for _ in range(5):
        method(core.process_group, TENSORS, SYNCHRONOUS)
    assert (len(core.take(COLLECTIVE)), core.num_dropped(COLLECTIVE)) == (5, 15)
    core.core.end()


def test_rows_for_which_there_is_no_memory_are_counted(core: BareCore) -> None:
    memory = pytest.importorskip("_testcapi")
    method = core.method(nothing)
    for _ in range(1_000):
        method(core.process_group, TENSORS, SYNCHRONOUS)
    take = core.core.take
    memory.set_nomemory(0)
    try:
        take()
    except MemoryError:
        memory.remove_mem_hooks()
    else:
        memory.remove_mem_hooks()
        pytest.fail("there was memory")

    assert core.take() == []
    assert core.num_dropped(COLLECTIVE) == 1_000


def test_a_kind_that_is_unknown_does_no_harm() -> None:
    core = BareCore(capacity=0)
    core.core.span(200, 0, 1, NO_PLACE, 1, 2)
    assert core.num_dropped() == 0
    core.core.end()


def test_a_phase_ends_with_its_place_and_takes_that_of_the_latest_stall() -> None:
    core = BareCore()
    core.method(nothing)(core.process_group, TENSORS, SYNCHRONOUS)
    assert core.core.latest_end() is not None
    core.core.end_phase(2, 0, 1, (7, 3, -1, -1), 10, 20, (7, -1, -1, -1))
    assert core.core.latest_end() is None
    core.method(nothing)(core.process_group, TENSORS, SYNCHRONOUS)
    with pytest.raises(TypeError, match="a place is a tuple"):
        core.core.end_phase(2, 0, 1, NO_PLACE, 10, 20, (7,))
    with pytest.raises(TypeError):
        core.core.end_phase(2, 0, 1, NO_PLACE, 10, 20)
    assert core.core.latest_end() is not None

    before, phase, after = core.take(COLLECTIVE, 2)
    assert (phase["start"], phase["end"], phase["step"], phase["microbatch"]) == (10, 20, 7, 3)
    assert [(row["step"], row["microbatch"]) for row in (before, after)] == [(-1, -1), (7, -1)]
    core.core.end()


# the device


@pytest.fixture
def device(driver: SimulatedDriver) -> Iterator[BareCore]:
    """A recording of a job that computes on device 0, in real time."""
    driver.use_real_time()
    stream = driver.create_stream()
    bare = BareCore()
    bare.use_driver(driver, lambda _device: stream)
    yield bare
    driver.release("cuEventQuery")
    bare.core.end()
    bare.core.close_device(5_000)


def test_a_mark_after_the_end_does_not_open_the_device_again(device: BareCore) -> None:
    assert isinstance(device.core.mark(), device.core.Mark)
    device.core.end()
    device.core.close_device(5_000)

    assert isinstance(device.core.mark(), int)
    assert device.core.device_state()[0] == 0


def test_a_driver_that_is_stuck_is_left_alone_until_it_goes_on(device: BareCore, driver: SimulatedDriver) -> None:
    device.resolved(device.core.mark())
    driver.hold("cuEventQuery")
    mark = device.core.mark()
    until(driver.held_calls)
    began = time.monotonic()
    assert device.core.close_device(200) is False
    assert time.monotonic() - began < 5
    assert device.core.resolve(mark) is None

    with pytest.raises(OSError, match="still holds the thread of an earlier recording"):
        device.core.open_driver(str(driver.path), True)
    driver.release("cuEventQuery")
    device.core.reset(100)
    device.core.open_driver(str(driver.path), True)
    device.resolved(device.core.mark())


def test_a_clock_is_not_off_because_another_thread_closes_the_device(device: BareCore, driver: SimulatedDriver) -> None:
    stream = driver.create_stream()
    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0, raw_stream=lambda _device: stream)
    clock = NativeClock(device.core, cuda, driver=str(driver.path))
    device.configure(times_devices=True, **clock.of_torch)
    device.resolved(clock.mark(0))
    driver.hold("cuEventQuery")
    clock.mark(0)
    until(driver.held_calls)
    closing = threading.Thread(target=device.core.close_device, args=(10_000,))
    closing.start()
    until(lambda: not device.core.device_state()[0])
    assert isinstance(clock.mark(0), int)
    assert not clock.is_off

    driver.release("cuEventQuery")
    closing.join()
    device.resolved(clock.mark(0))
    assert device.core.device_state()[0]


def test_marks_are_taken_while_the_device_is_opened_and_closed(device: BareCore) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def take_marks() -> None:
        try:
            while not stop.is_set():
                for _ in range(50):
                    device.core.mark(0)
                time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=take_marks) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        time.sleep(0.005)
        device.core.close_device(5_000)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_recordings_leave_nothing_in_the_driver(device: BareCore, driver: SimulatedDriver) -> None:
    before = len(driver.live_streams())
    for _ in range(5):
        marks = [device.core.mark() for _ in range(100)]
        device.resolved(marks[-1])
        del marks
        device.core.close_device(5_000)

    assert (len(driver.live_events()), len(driver.live_streams())) == (0, before)


def test_a_call_without_room_for_its_mark_began_when_it_was_called(device: BareCore, driver: SimulatedDriver) -> None:
    stream = driver.create_stream()
    device.use_driver(driver, lambda _device: stream, (SimulatedTensor,))
    driver.hold("cuEventQuery")
    while device.core.mark(0).taken_at:
        pass
    blocked: list[tuple[Any, ...]] = []
    before = device.core.host_ns()
    device.method(lambda *_: blocked.append(device.core.blocked()))(device.process_group, [tensor(8)], SYNCHRONOUS)

    [facts] = blocked
    assert before <= facts[-1] <= device.core.host_ns()


def voluntary_switches(thread_name: str) -> int:
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text()
        if status.startswith(f"Name:\t{thread_name}\n"):
            return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    raise AssertionError(f"no thread {thread_name}")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_after_a_failure_of_the_driver_its_thread_is_as_quiet_as_without_marks(
    device: BareCore, driver: SimulatedDriver
) -> None:
    device.resolved(device.core.mark())
    driver.fail("cuEventQuery", 700)
    marks = [device.core.mark() for _ in range(10)]
    until(lambda: device.core.device_state()[1])
    with pytest.raises(RuntimeError, match="failed"):
        device.core.resolve(marks[-1])
    time.sleep(0.05)
    before = voluntary_switches("commtrace-marks")
    time.sleep(0.5)
    assert voluntary_switches("commtrace-marks") - before <= 150  # every 5 ms, not every 1 ms


def test_a_forked_child_begins_with_nothing_and_can_record(device: BareCore, driver: SimulatedDriver) -> None:
    method = device.method(nothing)
    mark = device.core.mark()
    for number in range(100):
        device.core.span(0, 0, 1, NO_PLACE, number, mark)

    def records() -> bool:
        begins_empty = device.core.num_waiting() == 0
        inherited = device.take() == []
        device.core.reset(100)
        device.configure()
        device.core.set_recording(True)
        group = ProcessGroup()
        counters = device.group(group)
        later = device.core.Method(nothing, nothing, operation=0, name=0).function()
        method(group, TENSORS, SYNCHRONOUS)  # of the parent's recording: passed on
        later(group, TENSORS, SYNCHRONOUS)
        return (
            begins_empty
            and inherited
            and [row["seq"] for row in device.take(COLLECTIVE)] == [0]
            and counters.launched == 1
        )

    assert in_child(records)
    assert driver.calls_in_children() == {}
    device.resolved(mark)
