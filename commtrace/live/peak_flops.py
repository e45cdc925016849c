"""Peak FLOPs of GPUs, the reference of MFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
    """Model FLOPs utilisation, ``model FLOPs / (time · peak)``; None for a GPU that is not known: no guess."""
    peak = PEAK_BF16_FLOPS.get(device)
    return model_flops / (seconds * peak) if peak and model_flops and seconds > 0 else None
