"""One of the ranks that the monitor names, and what a device is."""

from __future__ import annotations

from dataclasses import dataclass

from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class NamedRank:
    """One of the ranks that a finding of the monitor names."""

    rank: int
    host: str
    excess_ms_per_step: float  # of its work over normal
    share_ms_per_step: float | None = None  # as in a finding
    alone_ms_per_step: float | None = None


def on_gpu(run: Run) -> bool:
    """Return whether the job ran on GPUs, as far as was recorded."""
    return is_gpu(run.any_metadata.device)


def is_gpu(device: str) -> bool:
    """Return whether the name of a rank's device is that of a GPU."""
    return bool(device) and not device.endswith("cpu") and not device.startswith("simulated")
