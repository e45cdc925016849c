"""What becomes of spans when the sink fails: training goes on, every loss is counted, and nothing told once is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import commtrace.recorder as recorder_module
from commtrace.recorder import Recorder, mark_row
from commtrace.trace import schema
from commtrace.trace.writer import Row


class Disk:
    """A sink that can be full."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.error: Exception | None = None

    def write(self, rows: list[Row]) -> None:
        if self.error is not None:
            raise self.error
        self.rows += rows

    def close(self) -> None:
        pass

    def told(self, name: str) -> list[Any]:
        return [json.loads(row[-1]) for row in self.rows if row[0] == schema.MARK and row[1] == name]


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(recorder_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def entry(name: str = "work") -> tuple[Any, ...]:
    row = (schema.USER, name, *mark_row("", {})[2:])
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
    assert disk.told("dropped") == [{"user": 2}]


def test_what_is_told_once_survives_a_full_disk(disk: Disk, time: Time) -> None:
    recorder = Recorder(lambda: [disk], before_pass=tell_once(("process_group", {"id": 1}), ("clock_anchor", {})))
    disk.error = OSError("No space left on device")
    for time.now in (0.0, 1.0, 2.0):
        recorder.flush()

    disk.error = None
    time.now = 20.0
    recorder.flush()
    recorder.flush()

    assert [row[1] for row in disk.rows] == ["process_group"]


def test_a_full_disk_is_said_once(disk: Disk, time: Time, caplog: pytest.LogCaptureFixture) -> None:
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
    assert disk.told("dropped") == [{"forward": 2}]
    assert len(caplog.records) == 1


def test_rows_that_a_sink_cannot_take_are_counted_whatever_the_reason(disk: Disk, time: Time) -> None:
    recorder = Recorder(lambda: [disk])
    disk.error = ValueError("integer out of range")
    recorder.append(entry())
    recorder.flush()

    assert recorder.dropped == {"user": 1}
