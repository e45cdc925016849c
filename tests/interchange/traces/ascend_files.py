"""Traces as the profiler of Ascend writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
START = 1736405443000000
HOST, DEVICE, COMMUNICATION, OVERLAP = 3016828, 3089232288, 3089232352, 3089232608


def named(kind: str, pid: int, name: str, tid: int = 0) -> Event:
    key = "labels" if kind == "process_labels" else "name"
    return {"name": kind, "pid": pid, "tid": tid, "args": {key: name}, "ph": "M"}


def event(name: str, pid: int, tid: int, start: float, duration: float, **arguments: Any) -> Event:
    """Times in µs; the start is text, as torch_npu writes it."""
    return {
        "name": name, "pid": pid, "tid": tid, "ts": f"{START + start:.3f}", "dur": duration, "args": arguments,
        "ph": "X",
    }  # fmt: skip


def task(name: str, start: float, duration: float, task_type: str = "AI_CORE", stream: int = 2) -> Event:
    return event(name, DEVICE, stream, start, duration, **{"Task Type": task_type, "Physic Stream Id": stream})


def operation(name: str, start: float, duration: float, tid: int = 0, **arguments: Any) -> Event:
    described = {"data_type": "FP32", "alg_type": "MESH-RING", "count": 1_000, **arguments}
    return event(name, COMMUNICATION, tid, start, duration, **described)


def names(process: str = "Communication", group: str = "Group tcp://a_0 Communication") -> list[Event]:
    return [
        named("process_name", DEVICE, "Ascend Hardware"),
        named("process_labels", DEVICE, "NPU 3"),
        named("process_name", COMMUNICATION, process),
        named("thread_name", COMMUNICATION, group, 0),
        named("thread_name", COMMUNICATION, "Plane 0", 1),
        named("process_name", OVERLAP, "Overlap Analysis"),
    ]


def write(folder: Path, events: Sequence[Event], rank: int | None = None, metadata: Any = None) -> Path:
    """Write a trace, and what torch_npu puts beside it."""
    output = folder / f"host_{folder.name}_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    if rank is not None:
        (output.parent / f"profiler_info_{rank}.json").write_text("{}")
    if metadata is not None:
        (output.parent / "profiler_metadata.json").write_text(json.dumps(metadata))
    path = output / "trace_view.json"
    path.write_text(json.dumps(list(events)))
    return path


def two_ranks(folder: Path, *, rank_size: int | None = None, metadata: bool = False) -> list[Path]:
    """Compute for 100 and 140 µs, then reduce until 200 µs; twice."""
    extra = {} if rank_size is None else {"rank_size": rank_size}
    files = []
    for rank in (0, 1):
        events = names()
        for number in (0, 1):
            begin, works = 200 * number, 140 if rank else 100
            events += [
                task("aclnnMatmul_MatMulV2", begin, works),
                operation(f"hcom_allReduce__868_{number}_1", begin + works, 200 - works, **extra),
            ]
        beside = {
            "distributed_args": {"rank": rank, "world_size": 2, "tensor_model_parallel_size": 2},
            "parallel_group_info": {"tcp://a_0": {"group_name": "tp", "group_rank": rank, "global_ranks": [0, 1]}},
        }
        files.append(write(folder / str(rank), events, rank, beside if metadata else None))
    return files
