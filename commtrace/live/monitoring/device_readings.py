"""The newest readings of all devices, which tell a slow device from a slow rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from commtrace.analysis.stragglers.evidence import DeviceEvidence, compare_devices
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.rank import MOST_READINGS
from commtrace.trace.metadata import DeviceState


@dataclass(slots=True)
class _ReadDevice:
    model: str = ""
    # with the time at which they were reported, epoch seconds
    states: deque[tuple[float, DeviceState]] = field(default_factory=lambda: deque(maxlen=MOST_READINGS))

    def since(self, time: float) -> list[DeviceState]:
        return [state for at, state in self.states if at > time]


class DeviceReadings:
    """Readings by rank. Not thread-safe."""

    def __init__(self) -> None:
        self._devices: dict[int, _ReadDevice] = {}

    def take(self, report: WindowReport, now: float) -> None:
        device = self._devices.setdefault(report.rank, _ReadDevice())
        device.model = report.device_model or device.model
        device.states.extend((now, state) for state in report.device_states)

    def compare(self, rank: int, since: float) -> DeviceEvidence | None:
        """Compare the device of a rank with others of its model, by readings since a time in epoch seconds."""
        slow = self._devices[rank]
        others = (device for device in self._devices.values() if device is not slow and device.model == slow.model)
        return compare_devices(slow.since(since), [device.since(since) for device in others])
