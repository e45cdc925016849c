"""Several ranks on the first GPU. Importing it starts no recording: the tests import it, too."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.distributed as dist

WARM_UP_STEPS: Final = 3


def share_one_gpu() -> None:
    """Let NCCL have several ranks on one GPU. It allows that to ranks that it takes for different hosts."""
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"
    os.environ["NCCL_MAX_CTAS"] = "1"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # without effect before NCCL 2.30


def start_distributed(backend: str = "nccl") -> torch.device:
    """Every rank on the first GPU."""
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    share_one_gpu()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device)
    return device


def profiler(device: torch.device) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)
