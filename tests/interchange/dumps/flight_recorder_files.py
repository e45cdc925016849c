"""Dumps as torch's flight recorder writes them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

EPOCH = 1_724_779_239_000_000_000
DP = ("1", "DATA_PARALLEL_GROUP")
PP = ("2", "PIPELINE_MODEL_PARALLEL_GROUP")


def entry(seq: int, created: int, *, name: str = "nccl:all_reduce", state: str = "completed", **other: Any) -> Any:
    completed = created + 500 if state == "completed" else None
    return {
        "record_id": seq,
        "pg_id": 1,
        "process_group": DP,
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": name,
        "time_created_ns": EPOCH + created,
        "duration_ms": None,
        "input_sizes": ((3, 4),),
        "input_dtypes": ["BFloat16"],
        "output_sizes": ((3, 4),),
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": completed and EPOCH + completed,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
        "frames": [{"name": "train_step", "filename": "train.py", "line": 42}],
        **other,
    }


def write_dump(path: Path, *entries: Any) -> Path:
    groups = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": DP[1], "ranks": "[1, 3]"},
        "2": {"name": "2", "desc": PP[1], "ranks": "[1, 3]"},
    }
    dump = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": list(entries)}
    path.write_bytes(pickle.dumps(dump, protocol=2))
    return path


def gloo_dump(path: Path, *entries: Any) -> Path:
    """As torch 2.13 writes it for gloo: without members, times of ends and states."""
    content = {
        "version": "2.10",
        "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_completed_collective": "3"}},
        "entries": [
            {**given, "state": "scheduled", "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0}
            for given in entries
        ],
    }
    path.write_text(json.dumps(content))
    return path


def gloo_entry(seq: int, created: int, *, retired: bool = True, group: tuple[str, str] = ("0", "default_pg")) -> Any:
    return entry(seq, created, name="gloo:all_reduce", retired=retired, process_group=list(group))


def gloo_hang(folder: Path) -> list[Path]:
    """Rank 2 of 3 never called the fourth all_reduce of the world."""
    sub = ("7", "sub")
    return [
        gloo_dump(
            folder / f"gloo_dump_rank_{rank}",
            *(gloo_entry(seq, 1_000 * seq + rank) for seq in (1, 2, 3)),
            *([gloo_entry(1, 3_500 + rank, group=sub)] if rank < 2 else []),
            *([gloo_entry(4, 4_000 + rank, retired=False)] if rank < 2 else []),
        )
        for rank in range(3)
    ]
