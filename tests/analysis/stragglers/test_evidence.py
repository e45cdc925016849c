"""Sentences on a device, from readings that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from commtrace.analysis.stragglers.evidence import DeviceEvidence, device_evidence
from commtrace.trace.metadata import DeviceState
from commtrace.trace.run import Run
from tests.factory import make_run, span


def run_of(*states: list[DeviceState]) -> Run:
    """One rank for each list of readings."""
    return make_run(
        {rank: [span("forward", 0, 10)] for rank in range(len(states))},
        device_states=lambda rank: tuple(states[rank]),
    )


def readings(count: int, **values: Any) -> list[DeviceState]:
    return [DeviceState(at_ns=at, **values) for at in range(count)]


HEALTHY = readings(60, clock_mhz=1980, most_clock_mhz=1980, temperature_c=62, power_mw=650_000)
HOT = [
    *readings(2, clock_mhz=1980, temperature_c=80, power_mw=640_000, serial="165"),
    *readings(58, clock_mhz=1095, temperature_c=91, power_mw=401_400, slowdowns=("thermal slowdown",), serial="165"),
]


def test_a_device_that_is_held_down_is_compared_with_those_of_the_other_ranks() -> None:
    assert device_evidence(run_of(HEALTHY, HOT, HEALTHY), 1) == DeviceEvidence(
        is_throttled=True,
        sentence=(
            "Its device: 1095 MHz (the others 1980 MHz), held down by thermal slowdown in 58 of 60 readings; "
            "91 °C (the others 62 °C); 401 W (the others 650 W)."
        ),
        serial="165",
    )


def test_a_limit_that_all_devices_are_at_makes_nobody_slow() -> None:
    capped = readings(10, clock_mhz=1700, most_clock_mhz=1980, slowdowns=("power cap",))
    evidence = device_evidence(run_of(capped, capped), 0)

    assert evidence == DeviceEvidence(
        False, "Its device: 1700 MHz (the others 1700 MHz), held down by power cap in 10 of 10 readings.", ""
    )


def test_without_others_a_device_is_compared_with_what_it_can() -> None:
    capped = readings(10, clock_mhz=1700, most_clock_mhz=1980, slowdowns=("power brake",))
    evidence = device_evidence(run_of(capped, []), 0)

    assert evidence is not None
    assert evidence.is_throttled


def test_a_low_clock_that_nothing_holds_down_is_a_device_that_waits() -> None:
    idle = readings(10, clock_mhz=345, most_clock_mhz=1980)
    evidence = device_evidence(run_of(idle, HEALTHY), 0)

    assert evidence is not None
    assert not evidence.is_throttled


def test_errors_are_reported_with_how_many_came_during_the_run() -> None:
    states = [
        DeviceState(0, uncorrected_errors=1, corrected_errors=100, nvlink_errors=0, pcie_replays=5),
        DeviceState(1, uncorrected_errors=1, corrected_errors=140, nvlink_errors=14, pcie_replays=5),
    ]
    evidence = device_evidence(run_of(states), 0)

    assert evidence is not None
    assert evidence.sentence == (
        "Its errors: 1 uncorrectable memory errors, 0 of them during the run; 140 corrected memory errors, 40 of them "
        "during the run; 14 NVLink errors, 14 of them during the run; 5 PCIe replays, 0 of them during the run."
    )


@pytest.mark.parametrize("states", [[], readings(3)])
def test_a_device_without_readings_gives_no_evidence(states: list[DeviceState]) -> None:
    assert device_evidence(run_of(states), 0) is None
