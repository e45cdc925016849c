"""Readings of the device, from a library that answers as NVIDIA's does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from commtrace.capture.device.device_watch import DeviceWatch, read_device
from commtrace.trace.metadata import DeviceState


class NotSupportedError(Exception):
    pass


def nvml(**answers: Any) -> Any:
    """The module pynvml of a device that tells just this."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = NotSupportedError
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU, module.NVML_VOLATILE_ECC = 1, 0, 0
    module.NVML_MEMORY_ERROR_TYPE_CORRECTED, module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    module.NVML_NVLINK_MAX_LINKS, module.NVML_FEATURE_ENABLED = 4, 1
    for number, counter in enumerate(("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA")):
        setattr(module, f"NVML_NVLINK_ERROR_DL_{counter}", number)
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


def refused(*_arguments: Any) -> Any:
    raise NotSupportedError("not supported")


def test_everything_that_a_device_tells_is_read() -> None:
    library = nvml(
        nvmlDeviceGetClockInfo=lambda device, which: 1095,
        nvmlDeviceGetMaxClockInfo=lambda device, which: 1980,
        nvmlDeviceGetTemperature=lambda device, sensor: 91,
        nvmlDeviceGetPowerUsage=lambda device: 401_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda device: 700_000,
        nvmlDeviceGetCurrentClocksEventReasons=lambda device: 0x20 | 0x4 | 0x1,
        nvmlDeviceGetTotalEccErrors=lambda device, kind, counter: (7, 2)[kind],
        nvmlDeviceGetNvLinkState=lambda device, link: int(link < 2),
        nvmlDeviceGetNvLinkErrorCounter=lambda device, link, counter: 10 * link + counter,
        nvmlDeviceGetPcieReplayCounter=lambda device: 3,
        nvmlDeviceGetSerial=lambda device: "165",
    )

    assert read_device(library, "GPU-1", 5) == DeviceState(
        at_ns=5,
        clock_mhz=1095,
        most_clock_mhz=1980,
        temperature_c=91,
        power_mw=401_000,
        power_limit_mw=700_000,
        slowdowns=("power cap", "thermal slowdown"),
        corrected_errors=7,
        uncorrected_errors=2,
        nvlink_errors=0 + 1 + 2 + 3 + 10 + 11 + 12 + 13,
        pcie_replays=3,
        serial="165",
    )


def test_readings_that_a_device_lacks_are_unknown() -> None:
    library = nvml(
        nvmlDeviceGetClockInfo=refused,
        nvmlDeviceGetTotalEccErrors=refused,
        nvmlDeviceGetNvLinkState=refused,
        nvmlDeviceGetTemperature=lambda device, sensor: 40,
    )

    assert read_device(library, "GPU-1", 5) == DeviceState(at_ns=5, temperature_c=40)


def test_an_older_library_has_another_name_for_the_reasons() -> None:
    library = nvml(nvmlDeviceGetCurrentClocksThrottleReasons=lambda device: 0x80)

    assert read_device(library, "GPU-1", 5).slowdowns == ("power brake",)


def watched(library: Any, monkeypatch: pytest.MonkeyPatch, uuid: str, readings: int) -> tuple[DeviceWatch, list[Any]]:
    """A watch whose thread has ended, after so many readings, and what it said had failed."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    failures: list[Any] = []
    left = iter([False] * readings)
    wait: Callable[[float], bool] = lambda seconds: next(left, True)  # noqa: E731
    watch = DeviceWatch(lambda part, error: failures.append(error), now=lambda: 7, wait=wait)
    watch.start(uuid)
    assert watch._thread is not None
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    return watch, failures


@pytest.mark.parametrize(("uuid", "asked"), [("a-b", "GPU-a-b"), ("GPU-a-b", "GPU-a-b"), ("MIG-a-b", "MIG-a-b")])
def test_the_device_is_found_by_its_uuid_and_each_reading_is_taken_once(
    uuid: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = nvml(nvmlDeviceGetSerial=lambda device: device)
    watch, failures = watched(library, monkeypatch, uuid, readings=2)

    assert watch.take() == [DeviceState(at_ns=7, serial=asked)] * 2
    assert watch.take() == []
    assert failures == []


def test_without_the_library_or_its_driver_nothing_is_read_and_nobody_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for library in (None, nvml(nvmlInit=refused), nvml(nvmlDeviceGetHandleByUUID=refused)):
        watch, failures = watched(library, monkeypatch, "a", readings=1)
        assert (watch.take(), failures) == ([], [])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_fault_of_our_own_ends_the_watch_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    library = nvml(nvmlDeviceGetSerial=lambda device: 1 / 0)
    watch, failures = watched(library, monkeypatch, "a", readings=3)

    assert watch.take() == []
    assert [type(error) for error in failures] == [ZeroDivisionError]
