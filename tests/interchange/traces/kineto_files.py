"""Traces of torch.profiler made by hand; times in µs, as in such files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(start: Any, duration: Any, name: str = "gemm", stream: int = 7, **arguments: Any) -> Event:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": duration,
        "args": {"stream": stream, "device": 0, **arguments},
    }


def nccl(start: Any, duration: Any, name: str = NCCL, stream: int = 20, **arguments: Any) -> Event:
    """A communication kernel; ``ranks=[0, 1], seq=3, …`` describe it as torch does."""
    words = {
        "collective": "Collective name",
        "group": "Process Group Name",
        "ranks": "Process Group Ranks",
        "description": "Process Group Description",
        "seq": "Seq",
        "sent": "In msg nelems",
        "received": "Out msg nelems",
        "source": "Src Rank",
        "destination": "Dst Rank",
    }
    described = {words.get(key, key): value for key, value in arguments.items()}
    if isinstance(described.get("Process Group Ranks"), list):
        described["Process Group Ranks"] = json.dumps(described["Process Group Ranks"])
    return kernel(start, duration, name, stream, **described)


def copy(
    start: Any, duration: Any, name: str = "Memcpy HtoD (Pinned -> Device)", category: str = "gpu_memcpy"
) -> Event:
    return {**kernel(start, duration, name, 8, bytes=4096), "cat": category}


def annotation(name: str, start: Any, duration: Any) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}


def write_trace(path: Path, events: Sequence[Event], *, rank: int | None = 0, world_size: int = 1, **top: Any) -> Path:
    """Write a file; gzip where its name ends with gz. ``rank=None``: without distributedInfo."""
    head: dict[str, Any] = {"schemaVersion": 1}
    if rank is not None:
        head["distributedInfo"] = {
            "backend": "nccl",
            "rank": rank,
            "world_size": world_size,
            **top.pop("distributed", {}),
        }
    text = json.dumps({**head, "traceEvents": list(events), "traceName": path.name, **top}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
