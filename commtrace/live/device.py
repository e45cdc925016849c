"""The device that this process trains on, and the peak FLOPs that MFU refers to. Nothing here imports torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Device(NamedTuple):
    """Facts about a device.

    Attributes:
        name: as the driver says.
        peak_memory_bytes: the most that torch's allocator has held since the process began or the script reset it.
    """

    name: str
    peak_memory_bytes: int


def training_device() -> Device | None:
    """Return the device on which torch's allocator has held most; None where no device is in use. Never waits for the
    device.
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


PEAK_BF16_FLOPS: Final[Mapping[str, float]] = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "AMD Instinct MI300X": 1300e12,
}
"""Dense bf16 FLOP/s by the name that the driver gives to the GPU, from the makers' data sheets."""


def mfu(model_flops: float, seconds: float, device: str) -> float | None:
    """Return ``model FLOPs / (time · peak)``; None for a GPU that is not known: no guess."""
    peak = PEAK_BF16_FLOPS.get(device)
    return model_flops / (seconds * peak) if peak and model_flops and seconds > 0 else None
