"""Read clocks, temperature, power and errors of this process's device through NVML, on a thread that may block."""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Final

from commtrace.capture.device.clock import now_ns
from commtrace.trace.metadata import SLOWDOWNS, DeviceState

PART: Final = "watching the device"

READ_SECONDS: Final = 5.0

_MOST_UNREAD: Final = 64
_LINK_ERRORS: Final = (
    "NVML_NVLINK_ERROR_DL_REPLAY",
    "NVML_NVLINK_ERROR_DL_RECOVERY",
    "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "NVML_NVLINK_ERROR_DL_CRC_DATA",
)

_logger = logging.getLogger("commtrace")


class DeviceWatch:
    """Gather readings of one device; ``failed`` gets, once, its own failure, and ``wait`` returns True to end it."""

    def __init__(
        self,
        failed: Callable[[str, BaseException], None],
        *,
        now: Callable[[], int] = now_ns,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._failed = failed
        self._now = now
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._unread: deque[DeviceState] = deque(maxlen=_MOST_UNREAD)
        self._thread: threading.Thread | None = None

    def start(self, uuid: str) -> None:
        """Begin to read the device with this UUID, if pynvml (``pip install nvidia-ml-py``) is there and knows it."""
        if self._thread is not None or not uuid:
            return
        self._thread = threading.Thread(target=self._run, args=(uuid,), name="commtrace-device-watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # since Python 3.12 none starts once Python ends
            if threading.main_thread().is_alive():
                self._failed(PART, error)

    def stop(self) -> None:
        """Have the thread end. It is not joined: it may never return from the driver."""
        self._stop.set()

    def take(self) -> list[DeviceState]:
        return [self._unread.popleft() for _ in range(len(self._unread))]

    def _run(self, uuid: str) -> None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            device = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except nvml.NVMLError as error:
            _logger.info("commtrace: clocks, temperature and power of the device are not recorded: %s", error)
            return
        try:
            while not self._wait(READ_SECONDS):
                self._unread.append(read_device(nvml, device, self._now()))
        except Exception as error:
            self._failed(PART, error)


def read_device(nvml: ModuleType, device: object, at_ns: int) -> DeviceState:
    def query(name: str, *arguments: object) -> int | None:
        ask = getattr(nvml, name, None)  # older ones lack some
        try:
            answer: int | None = None if ask is None else ask(device, *arguments)
            return answer
        except nvml.NVMLError:
            return None  # this device does not say, or not to this user

    reasons = query("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = query("nvmlDeviceGetCurrentClocksThrottleReasons")  # its name in drivers before 535
    volatile = nvml.NVML_VOLATILE_ECC
    return DeviceState(
        at_ns=at_ns,
        clock_mhz=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        most_clock_mhz=query("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        temperature_c=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_mw=query("nvmlDeviceGetPowerUsage"),
        power_limit_mw=query("nvmlDeviceGetEnforcedPowerLimit"),
        slowdowns=tuple(word for word, bit in SLOWDOWNS.items() if (reasons or 0) & bit),
        corrected_errors=query("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
        uncorrected_errors=query("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile),
        nvlink_errors=_sum(_link_errors(nvml, query)),
        pcie_replays=query("nvmlDeviceGetPcieReplayCounter"),
        serial=str(query("nvmlDeviceGetSerial") or ""),
    )


def _link_errors(nvml: ModuleType, query: Callable[..., int | None]) -> Iterator[int]:
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if query("nvmlDeviceGetNvLinkState", link) != nvml.NVML_FEATURE_ENABLED:
            continue
        for counter in _LINK_ERRORS:
            count = query("nvmlDeviceGetNvLinkErrorCounter", link, getattr(nvml, counter))
            if count is not None:
                yield count


def _sum(counts: Iterator[int]) -> int | None:
    known = list(counts)
    return sum(known) if known else None
