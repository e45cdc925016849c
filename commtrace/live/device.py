"""The device that this process trains on, without torch being imported for it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Device(NamedTuple):
    """Facts about a device.

    Attributes:
        name: as the driver says.
        peak_memory_bytes: that torch's allocator has held at most since the process began or since the script reset it.
    """

    name: str
    peak_memory_bytes: int


def training_device() -> Device | None:
    """Return the device on which torch's allocator has held most; None where no device is in use.

    Reads the allocator's own statistics and what torch has noted about the device: nothing waits for the device.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    # The harvester's current device need not be the training thread's; a rank allocates on one device.
    # Only of devices that are in use: with some allocators, asking would begin to use the others.
    in_use = torch._C._cuda_hasPrimaryContext
    peaks = [
        int(torch.cuda.max_memory_allocated(number)) if in_use(number) else 0
        for number in range(torch.cuda.device_count())
    ]
    if not any(peaks):
        return None
    number = peaks.index(max(peaks))
    return Device(str(torch.cuda.get_device_name(number)), peaks[number])
