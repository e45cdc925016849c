"""How much of the accelerators' arithmetic a job uses: MFU, HFU and MAMFU.

* MFU = FLOPs of the model / (time · devices · peak), without what is computed again (https://arxiv.org/abs/2204.02311,
  appendix B).
* HFU: the same with recomputed forward passes: 4/3 of it if every forward pass is computed twice.
* MAMFU: MFU with the rate of matrix multiplications that was measured on the device in the place of its peak.

>>> peak_flops("NVIDIA A100-SXM4-80GB") / 1e12
312.0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from commtrace.trace.json_values import JsonObject

Recompute = Literal["none", "full"]

FORWARD_AND_BACKWARD: Final = 3
"""Passes in units of a forward pass: the backward pass is two; computing the forward pass again is one more."""

_PEAKS: Final[tuple[tuple[str, float], ...]] = (
    # Dense bfloat16 on tensor or matrix cores, TFLOP/s, from the vendors' data sheets. The first that fits counts.
    (r"\bGB200\b", 2500),
    (r"\bB200\b", 2250),
    (r"\bH100 PCIe\b", 756),
    (r"\bH100 NVL\b", 835),
    (r"\bH100\b.*\bHBM3\b|\bH100[ -]SXM5?\b|\bH200\b(?! NVL)|\bGH200\b|\bH800\b(?! PCIe)", 989),
    (r"\bH20\b", 148),
    (r"\bA100\b|\bA800\b", 312),
    (r"\bL40S\b", 362),
    (r"\bL4\b", 121),
    (r"\bA30\b", 165),
    (r"\bA10\b", 125),
    (r"\bMI300X\b|\bMI325X\b", 1307),
    (r"\bMI250X\b", 383),
    (r"\bMI210\b", 181),
)


def peak_flops(device: str) -> float | None:
    """Return the peak of a device by the name that its driver gives, FLOP/s in dense bfloat16; None if unknown."""
    return next((teraflops * 1e12 for name, teraflops in _PEAKS if re.search(name, device)), None)


@dataclass(frozen=True, slots=True)
class Utilization:
    """FLOPs of a job over a time; shares are None where something they need is not known."""

    model_flops: float  # per step, of the whole job
    formula: str  # where they are from
    devices: int
    device: str
    step_ns: float  # mean of the steps that count
    run_ns: float | None  # wall time of the whole run; None if only some steps were looked at
    run_steps: int | None  # steps that were kept in it
    peak: float | None  # of one device, FLOP/s
    achievable: float | None  # of one device as measured, FLOP/s
    recompute: Recompute | None  # None if it is not known how much is computed again

    @property
    def flops_per_second(self) -> float:
        """Return the model's FLOPs per second of a step, of one device."""
        return self.model_flops / (self.step_ns / 1e9) / self.devices

    @property
    def mfu(self) -> float | None:
        return None if self.peak is None else self.flops_per_second / self.peak

    @property
    def run_mfu(self) -> float | None:
        """Return the MFU over the wall time: checkpoints, evaluation, restarts and repeated steps lower it."""
        if self.peak is None or not self.run_ns or self.run_steps is None:
            return None
        return self.model_flops * self.run_steps / (self.run_ns / 1e9) / self.devices / self.peak

    @property
    def hfu(self) -> float | None:
        if self.mfu is None or self.recompute is None:
            return None
        again = self.recompute == "full"
        return self.mfu * (FORWARD_AND_BACKWARD + again) / FORWARD_AND_BACKWARD

    @property
    def mamfu(self) -> float | None:
        return None if self.achievable is None else self.flops_per_second / self.achievable

    def to_json(self) -> JsonObject:
        return {
            "flops_per_step": self.model_flops,
            "formula": self.formula,
            "devices": self.devices,
            "device": self.device,
            "flops_per_second": self.flops_per_second,
            "peak_flops_per_second": self.peak,
            "achievable_flops_per_second": self.achievable,
            "recompute": self.recompute,
            "mfu": self.mfu,
            "run_mfu": self.run_mfu,
            "hfu": self.hfu,
            "mamfu": self.mamfu,
        }
