"""State of an accelerator as its driver reports it: clock, temperature, power and errors."""

from __future__ import annotations

from typing import Final, NamedTuple

SLOWDOWNS: Final = {
    "power cap": 0x4,
    "hardware slowdown": 0x8,
    "sync boost": 0x10,
    "thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "power brake": 0x80,
}
"""Why a device runs below its clock, by NVML's bits; idleness and what users have set are left out."""


class DeviceState(NamedTuple):
    """One reading. A field that the device does not report is None.

    Attributes:
        at_ns: on the rank's monotonic clock.
        clock_mhz: of its multiprocessors, at this moment.
        most_clock_mhz: that it can have.
        temperature_c: of the chip, °C.
        power_mw, power_limit_mw: drawn, and the limit that is enforced, mW.
        slowdowns: why its clock is held down: words of :data:`SLOWDOWNS`.
        corrected_errors, uncorrected_errors: of its memory (ECC), since the driver was loaded.
        nvlink_errors: replays, recoveries and CRC errors of all its links, since they were last reset.
        pcie_replays: since the device was last reset.
        serial: of the board; empty where it has none.
    """

    at_ns: int
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    slowdowns: tuple[str, ...] = ()
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    nvlink_errors: int | None = None
    pcie_replays: int | None = None
    serial: str = ""
