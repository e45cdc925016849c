"""The peak of a fake allocator, as it grows and as the script resets it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.capture.device.peak_memory import PART, PeakMemoryReader
from commtrace.trace import schema
from tests.capture.recording import Recording


class Allocator:
    """torch.cuda with these peaks on device 3, which is the one that is used."""

    used_device: int | None = 3

    def __init__(self) -> None:
        self.peaks = {"allocated_bytes": 0, "reserved_bytes": 0}
        self.readings = 0
        self.is_empty = False

    def hold(self, allocated: int, reserved: int) -> None:
        self.peaks = {"allocated_bytes": allocated, "reserved_bytes": reserved}

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert device == 3, "asking for another device's memory would make a context there"
        self.readings += 1
        return {} if self.is_empty else {name: {"all": {"peak": peak}} for name, peak in self.peaks.items()}


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


@pytest.fixture
def recording(allocator: Allocator) -> Recording:
    return installed(Recording(), allocator)


def installed(recording: Recording, allocator: Any) -> Recording:
    memory = PeakMemoryReader(recording.tracer, allocator, allocator)
    recording.tracer.guard.on_failure(PART, memory.uninstall)
    memory.install()
    return recording


def recorded(recording: Recording) -> list[tuple[int, dict[str, int]]]:
    recording.recorder.flush()
    marks = [row for row in recording.sink.rows if row.kind == schema.MARK]
    assert {row.name for row in marks} <= {"peak_memory"}
    return [(row.step, json.loads(row.detail or "")) for row in marks]


def test_the_peak_is_recorded_at_the_end_of_the_step_that_raised_it(recording: Recording, allocator: Allocator) -> None:
    for peaks in ((700, 1000), (700, 1000), (900, 1000), (200, 1000), (300, 2000)):  # the script resets its peak
        recording.tracer.begin_step()
        allocator.hold(*peaks)
    recording.tracer.end_step()

    assert recorded(recording) == [
        (0, {"step": 0, "allocated": 700, "reserved": 1000}),
        (2, {"step": 2, "allocated": 900, "reserved": 1000}),
        (4, {"step": 4, "allocated": 900, "reserved": 2000}),
    ]


def test_steps_that_are_not_recorded_are_not_read(allocator: Allocator) -> None:
    recording = installed(Recording(steps="1:2"), allocator)
    allocator.hold(1, 2)
    for _ in range(4):
        recording.tracer.begin_step()
    recording.tracer.end_step()

    assert (recorded(recording), allocator.readings) == ([(1, {"step": 1, "allocated": 1, "reserved": 2})], 1)


def test_nothing_is_asked_before_a_device_is_used(recording: Recording, allocator: Allocator) -> None:
    allocator.used_device = None
    recording.tracer.begin_step()
    recording.tracer.end_step()

    assert (recorded(recording), allocator.readings) == ([], 0)


def test_an_allocator_that_was_not_asked_for_anything_has_no_peak(recording: Recording, allocator: Allocator) -> None:
    allocator.is_empty = True
    recording.tracer.begin_step()
    recording.tracer.end_step()

    assert recorded(recording) == []


def test_an_allocator_without_statistics_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(device: int) -> None:
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    recording = installed(Recording(), SimpleNamespace(used_device=0, memory_stats_as_nested_dict=refuse))
    for _ in range(3):
        recording.tracer.begin_step()
    recording.tracer.end_step()

    assert (asked, recorded(recording)) == ([0], [])
    assert [record.message.split(" is switched off")[0] for record in caplog.records] == ["commtrace: the peak memory"]
    assert len(recording.rows(schema.STEP)) == 3
