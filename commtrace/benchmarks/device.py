"""The device of this process: which one, what it is, and how long a call takes on it.

A call is timed by the events of a GPU, and by the clock of the host on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from commtrace.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from commtrace.benchmarks.operations import Call


class BenchmarkDevice(NamedTuple):
    """A device as it describes itself."""

    name: str
    id: str = ""  # equal for ranks that share it; empty on a CPU
    pci: str = ""  # its address on the bus; empty on a CPU


def own_device(local_rank: int) -> torch.device:
    """Return the GPU of this process, or the CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_of_backend(backend: str, local_rank: int) -> torch.device:
    """Return the GPU of this process for NCCL, the CPU for other backends.

    Raises:
        ConfigurationError: NCCL was asked for, and there is no GPU.
    """
    import torch

    if backend != "nccl":
        return torch.device("cpu")
    device = own_device(local_rank)
    if device.type != "cuda":
        raise ConfigurationError("NCCL needs GPUs, and this process sees none: use --backend gloo")
    return device


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def describe_device(device: torch.device) -> BenchmarkDevice:
    import torch

    if device.type != "cuda":
        return BenchmarkDevice("cpu")
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in parts if part is not None]
    pci = "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == len(parts) else ""
    return BenchmarkDevice(device_name(device), str(getattr(properties, "uuid", "")), pci)


def nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def timed(call: Call, device: torch.device) -> int:
    """Return how long a call took on its device, ns."""
    if device.type != "cuda":
        start = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - start
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return round(milliseconds * 1e6)


def timed_iterations(
    call: Call, device: torch.device, warmup: int, iterations: int, goes_on: Callable[[], bool] = lambda: True
) -> list[int]:
    """Return the times of the iterations after the warm-up, ns, 1 at least.

    Args:
        goes_on: called before each iteration, warm-up included; False ends the measurement.
    """
    times = []
    for number in range(warmup + iterations):
        if not goes_on():
            break
        duration_ns = timed(call, device)
        if number >= warmup:
            times.append(max(duration_ns, 1))
    return times
