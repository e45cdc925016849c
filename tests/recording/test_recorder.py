"""A sink fails: training goes on, every loss is counted, and no mark is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

import commtrace.recording.recorder as recorder_module
from commtrace.recording.recorder import Recorder, Sink
from commtrace.trace import schema
from commtrace.trace.schema import Row, mark_row
from commtrace.trace.spans import RowBatch

LIMIT_SECONDS = 30.0


class Disk:
    """A sink that can be full."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.error: Exception | None = None

    def write(self, rows: RowBatch) -> None:
        if self.error is not None:
            raise self.error
        self.rows += rows

    def close(self) -> None:
        pass

    def details(self, name: str) -> list[Any]:
        return [json.loads(row.detail or "") for row in self.rows if row.kind == schema.MARK and row.name == name]


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("commtrace.recording.recorder.time.monotonic", lambda: self.now)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def entry(name: str = "work") -> tuple[Any, ...]:
    row = mark_row(name, {})._replace(kind=schema.USER)
    return (lambda _entry: [row], schema.USER)


def bad_entry() -> tuple[Any, ...]:
    def fail(_entry: Any) -> list[Row]:
        raise ZeroDivisionError

    return (fail, schema.FORWARD)


def tell_once(*marks: tuple[str, Any]) -> Any:
    remaining = list(marks)

    def before_pass() -> Iterator[tuple[str, Any]]:
        while remaining:
            yield remaining.pop(0)

    return before_pass


def test_losses_of_a_full_disk_are_told_when_there_is_room_again(disk: Disk, time: Time) -> None:
    recorder = Recorder(lambda: [disk])
    disk.error = OSError("No space left on device")
    recorder.append(entry())
    recorder.flush()
    time.now = 5.0
    recorder.append(entry())
    recorder.flush()

    disk.error = None
    time.now = 20.0
    recorder.append(entry())
    recorder.flush()

    assert [row[1] for row in disk.rows] == ["work", "dropped"]
    assert disk.details("dropped") == [{"user": 2}]


def test_marks_that_are_given_once_survive_a_full_disk(disk: Disk, time: Time) -> None:
    recorder = Recorder(lambda: [disk], before_pass=tell_once(("process_group", {"id": 1}), ("clock_anchor", {})))
    disk.error = OSError("No space left on device")
    for time.now in (0.0, 1.0, 2.0):
        recorder.flush()

    disk.error = None
    time.now = 20.0
    recorder.flush()
    recorder.flush()

    assert [row[1] for row in disk.rows] == ["process_group"]


def test_a_full_disk_is_reported_once(disk: Disk, time: Time, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(lambda: [disk])
    disk.error = OSError("No space left on device")
    for time.now in (0.0, 1.0, 20.0, 40.0):
        recorder.append(entry())
        recorder.flush()

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot write its trace (No space left on device)" in caplog.text


def test_an_entry_that_cannot_be_made_into_rows_costs_only_itself(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(lambda: [disk])
    for queued in (entry("before"), bad_entry(), entry("after"), bad_entry()):
        recorder.append(queued)
    recorder.flush()

    assert [row[1] for row in disk.rows] == ["before", "after", "dropped"]
    assert disk.details("dropped") == [{"forward": 2}]
    assert len(caplog.records) == 1


def test_rows_that_are_made_at_the_end_of_a_pass_are_written_in_it(disk: Disk) -> None:
    recorder = Recorder(lambda: [disk])
    asked: list[bool] = []

    def end_pass(last: bool) -> list[Row]:
        asked.append(last)
        return [Row(schema.USER, "together", schema.HOST, 1, 2)]

    recorder.end_pass = end_pass
    recorder.append(entry("alone"))
    recorder.flush()
    recorder._guarded_pass(last=True)

    assert [row[1] for row in disk.rows] == ["alone", "together", "together", "end"]
    assert asked == [False, True]


def test_a_failure_at_the_end_of_a_pass_costs_nothing_else(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    def end_pass(last: bool) -> list[Row]:
        raise ArithmeticError

    recorder = Recorder(lambda: [disk])
    recorder.end_pass = end_pass
    for name in ("before", "after"):
        recorder.append(entry(name))
        recorder.flush()

    assert [row[1] for row in disk.rows] == ["before", "after"]
    assert len(caplog.records) == 1


def test_rows_that_a_sink_cannot_take_are_counted_whatever_the_reason(disk: Disk, time: Time) -> None:
    recorder = Recorder(lambda: [disk])
    disk.error = ValueError("integer out of range")
    recorder.append(entry())
    recorder.flush()

    assert recorder.dropped == {"user": 1}


def test_a_full_disk_takes_nothing_from_the_other_sinks(disk: Disk, time: Time) -> None:
    live = Disk()
    recorder = Recorder(lambda: [live, disk])
    disk.error = OSError("No space left on device")
    for time.now in (0.0, 1.0, 2.0):
        recorder.append(entry())
        recorder.flush()

    assert names(live) == ["work"] * 3
    assert recorder.dropped == {"user": 3}


def test_a_sink_is_told_of_passes_without_rows(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    monkeypatch.setattr(disk, "write", lambda rows: passes.append(len(rows)))
    recorder = Recorder(lambda: [disk])
    recorder.append(entry())
    for _ in range(3):
        recorder.flush()

    assert passes == [1, 0, 0]


class Device:
    """Entries resolve once the device has reached them."""

    def __init__(self) -> None:
        self.reached = -1

    def entry(self, number: int, kind: int = schema.USER) -> tuple[Any, ...]:
        def make_rows(_entry: Any) -> list[Row] | None:
            return [mark_row(str(number), {})._replace(kind=kind)] if number <= self.reached else None

        return (make_rows, kind)


def names(disk: Disk) -> list[str]:
    return [row[1] for row in disk.rows if row[0] != schema.MARK]


@pytest.fixture
def started(disk: Disk) -> Iterator[Recorder]:
    recorder = Recorder(lambda: [disk], capacity=1_000)
    recorder.start()
    yield recorder
    recorder.stop()


def test_drops_are_counted_exactly_by_kind_whatever_the_threads_do(disk: Disk) -> None:
    recorder = Recorder(lambda: [disk], capacity=100)
    for _ in range(100):
        recorder.append(entry())

    def fill(kind: int) -> None:
        for _ in range(5_000):
            recorder.append((entry()[0], kind))

    kinds = [schema.COLLECTIVE, schema.COLLECTIVE, schema.P2P, schema.STALL]
    threads = [threading.Thread(target=fill, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert recorder.dropped == {"collective": 10_000, "p2p": 5_000, "stall": 5_000}
    assert recorder.dropped == {"collective": 10_000, "p2p": 5_000, "stall": 5_000}  # reading changes nothing
    recorder.flush()
    assert len(names(disk)) == 100
    assert disk.details("dropped") == [{"collective": 10_000, "p2p": 5_000, "stall": 5_000}]


def test_an_entry_of_several_rows_is_counted_as_all_of_them(disk: Disk) -> None:
    recorder = Recorder(lambda: [disk], capacity=0)
    recorder.append((entry()[0], (schema.COLLECTIVE, schema.STALL)))

    assert recorder.dropped == {"collective": 1, "stall": 1}


def test_drops_are_reported_once(disk: Disk) -> None:
    recorder = Recorder(lambda: [disk], capacity=0)
    recorder.append(entry())
    recorder.flush()
    recorder.flush()
    recorder.append(entry())
    recorder.flush()

    assert disk.details("dropped") == [{"user": 1}, {"user": 1}]


def test_entries_become_rows_in_order_as_the_device_reaches_them(disk: Disk) -> None:
    device = Device()
    recorder = Recorder(lambda: [disk])
    for number in range(6):
        recorder.append(device.entry(number))
    seen = []
    for device.reached in (-1, 1, 1, 4, 5):
        recorder.flush()
        seen.append(len(names(disk)))

    assert seen == [0, 2, 2, 5, 6]
    assert names(disk) == ["0", "1", "2", "3", "4", "5"]


def test_a_device_that_stands_still_does_not_make_the_recorder_grow(disk: Disk) -> None:
    device = Device()
    recorder = Recorder(lambda: [disk], capacity=1_000)
    for number in range(5_000):
        recorder.append(device.entry(number))
        if number % 100 == 0:
            recorder.flush()
    kept = 5_000 - recorder.dropped["user"]
    assert 1_000 <= kept <= 1_300

    device.reached = 5_000
    recorder.flush()
    recorder.flush()

    assert names(disk) == [str(number) for number in range(kept)]


def test_entries_behind_the_device_are_written_when_it_moves_on(disk: Disk) -> None:
    device = Device()
    recorder = Recorder(lambda: [disk])
    for number in range(2_000):
        recorder.append(device.entry(number))
    recorder.flush()
    device.reached = 999
    recorder.flush()
    assert names(disk) == [str(number) for number in range(1_000)]

    device.reached = 1_999
    recorder.flush()
    assert names(disk) == [str(number) for number in range(2_000)]


def test_stopping_writes_all_that_was_recorded(started: Recorder, disk: Disk) -> None:
    for number in range(1_000):
        started.append(entry(str(number)))

    assert started.stop()

    assert names(disk) == [str(number) for number in range(1_000)]
    assert disk.rows[-1][1] == "end"
    assert disk.details("end") == [{}]
    assert started.dropped == {}


def test_stopping_waits_for_the_device(started: Recorder, disk: Disk) -> None:
    device = Device()
    started.append(device.entry(0))
    finish = threading.Timer(0.7, lambda: setattr(device, "reached", 0))
    finish.start()
    started.stop()
    finish.join()

    assert names(disk) == ["0"]


def test_entries_that_the_device_never_reaches_are_counted(
    started: Recorder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_LAST_WORK_SECONDS", 0.1)
    device = Device()
    for number in range(600):
        started.append(device.entry(number, schema.STALL))
    started.append(entry("host"))
    started.stop()

    assert started.dropped == {"stall": 600}
    assert disk.details("dropped") == [{"stall": 600}]
    assert names(disk) == ["host"]


def test_stopping_twice_is_stopping_once(started: Recorder, disk: Disk) -> None:
    started.append(entry())
    started.stop()
    started.stop()

    assert disk.details("end") == [{}]


def test_nothing_is_written_before_the_rank_is_known(disk: Disk) -> None:
    known = False
    recorder = Recorder(lambda: [disk], ready=lambda last: known)
    recorder.append(entry("early"))
    recorder.flush()
    assert disk.rows == []

    known = True
    recorder.flush()
    assert names(disk) == ["early"]


def test_a_rank_that_is_known_at_the_end_alone_has_files_without_a_span(disk: Disk) -> None:
    recorder = Recorder(lambda: [disk], ready=lambda last: last)
    recorder.start()
    recorder.stop()

    assert disk.details("end") == [{}]


def test_a_directory_that_cannot_be_made_is_tried_again(disk: Disk, time: Time) -> None:
    attempts = []

    def open_sinks() -> list[Sink]:
        attempts.append(time.now)
        if len(attempts) == 1:
            raise PermissionError("read-only file system")
        return [disk]

    recorder = Recorder(open_sinks)
    recorder.append(entry("early"))
    for time.now in (0.0, 1.0, 11.0):
        recorder.flush()

    assert attempts == [0.0, 11.0]
    assert names(disk) == ["early"]  # it waited in the buffer


def test_a_directory_is_tried_once_more_at_the_end(disk: Disk, time: Time) -> None:
    errors = [PermissionError("not yet")]

    def open_sinks() -> list[Sink]:
        if errors:
            raise errors.pop()
        return [disk]

    recorder = Recorder(open_sinks)
    recorder.append(entry("early"))
    recorder.flush()
    time.now = 1.0
    recorder._guarded_pass(last=True)

    assert names(disk) == ["early"]


def test_a_pass_that_fails_leaves_what_was_recorded_in_the_buffer(disk: Disk, time: Time) -> None:
    errors = [ZeroDivisionError()]

    def open_sinks() -> list[Sink]:
        if errors:
            raise errors.pop()
        return [disk]

    recorder = Recorder(open_sinks)
    for time.now in (0.0, 4.0, 8.0, 12.0):
        recorder.append(entry(f"at {time.now}"))
        recorder._guarded_pass(last=False)

    assert names(disk) == ["at 0.0", "at 4.0", "at 8.0", "at 12.0"]
    assert recorder.dropped == {}


def test_spans_are_written_while_what_describes_the_run_fails(
    disk: Disk, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [ZeroDivisionError(), ZeroDivisionError()]

    def before_pass() -> Iterator[tuple[str, Any]]:
        yield "topology", {"at": time.now}
        if errors:
            raise errors.pop()
        yield "clock_anchor", {"at": time.now}

    recorder = Recorder(lambda: [disk], before_pass=before_pass)
    for time.now in (0.0, 4.0, 11.0, 22.0):
        recorder.append(entry(f"at {time.now}"))
        recorder._guarded_pass(last=False)

    assert names(disk) == ["at 0.0", "at 4.0", "at 11.0", "at 22.0"]
    assert disk.details("topology") == [{"at": 0.0}, {"at": 11.0}, {"at": 22.0}]
    assert disk.details("clock_anchor") == [{"at": 22.0}]
    assert recorder.dropped == {}
    assert caplog.text.count("the metadata of the run could not be collected") == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_silent(started: Recorder, disk: Disk) -> None:
    started.append(entry("parent"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        started.abandon_after_fork()
        started.append(entry("child"))
        started.flush()
        silent = started.stop() and "child" not in names(disk)
        os.write(write, b"silent" if silent else b"loud")
        os._exit(0)
    os.waitpid(child, 0)

    assert os.read(read, 10) == b"silent"
    started.stop()
    assert names(disk) == ["parent"]


def test_the_trace_is_closed_before_those_who_may_wait_for_somebody() -> None:
    closed: list[str] = []

    class Closing(Disk):
        def __init__(self, name: str, error: Exception | None = None) -> None:
            super().__init__()
            self.name, self.error_at_close = name, error

        def close(self) -> None:
            closed.append(self.name)
            if self.error_at_close is not None:
                raise self.error_at_close

    recorder = Recorder(lambda: [Closing("metrics"), Closing("trace", ValueError("not an OSError"))])
    recorder.start()
    assert recorder.stop(60.0)
    assert closed == ["trace", "metrics"]


def test_what_is_to_be_written_soon_is_in_a_pass_that_began_after_that(disk: Disk) -> None:
    """And not in one that was under way, which the machine may have kept from going on for a second."""
    facts: list[tuple[str, dict[str, object]]] = []
    begun, goes_on = threading.Event(), threading.Event()

    def before_pass() -> list[tuple[str, dict[str, object]]]:
        known = [*facts]
        begun.set()
        assert goes_on.wait(10)
        return known

    recorder = Recorder(lambda: [disk], before_pass=before_pass)
    recorder.start()
    assert begun.wait(10)
    facts.append(("fact", {}))
    threading.Timer(0.1, goes_on.set).start()

    recorder.harvest_soon(10)

    assert disk.details("fact") == [{}]
    facts.clear()
    recorder.stop()


def test_a_harvester_that_is_stuck_holds_nobody_up_for_longer_than_asked(disk: Disk) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def before_pass() -> list[tuple[str, dict[str, object]]]:
        begun.set()
        assert goes_on.wait(LIMIT_SECONDS)
        return []

    recorder = Recorder(lambda: [disk], before_pass=before_pass)
    recorder.start()
    assert begun.wait(LIMIT_SECONDS)

    asked_at = monotonic()
    recorder.harvest_soon(0.1)
    assert 0.1 <= monotonic() - asked_at < LIMIT_SECONDS / 2

    goes_on.set()
    recorder.stop(LIMIT_SECONDS)


def test_the_harvester_does_not_wait_for_itself(disk: Disk) -> None:
    waited: list[float] = []

    def before_pass() -> list[tuple[str, dict[str, object]]]:
        asked_at = monotonic()
        recorder.harvest_soon(LIMIT_SECONDS)
        waited.append(monotonic() - asked_at)
        return []

    recorder = Recorder(lambda: [disk], before_pass=before_pass)
    recorder.start()
    assert recorder.stop(LIMIT_SECONDS)
    assert max(waited) < LIMIT_SECONDS / 2


def test_the_handler_of_a_signal_may_ask_for_what_it_has_interrupted_somebody_asking_for(disk: Disk) -> None:
    asked = threading.Event()

    def before_pass() -> list[tuple[str, dict[str, object]]]:
        assert asked.wait(LIMIT_SECONDS)
        return []

    def handle(*_: object) -> None:
        asked.set()
        recorder.harvest_soon(LIMIT_SECONDS)

    recorder = Recorder(lambda: [disk], before_pass=before_pass)
    recorder.start()
    original = signal.signal(signal.SIGUSR1, handle)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        asked_at = monotonic()
        recorder.harvest_soon(LIMIT_SECONDS)
        assert monotonic() - asked_at < LIMIT_SECONDS / 2
    finally:
        signal.signal(signal.SIGUSR1, original)
        asked.set()
        recorder.stop(LIMIT_SECONDS)
