"""Traces as the what-if analysis of stragglers publishes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Operation = dict[str, Any]
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")


def operation(stage: int, optype: str, start: float, end: float, *, step: int = 7, seq: int = 0) -> Operation:
    compute = optype.endswith("compute")
    place = {"dp_rank": 0, "stage": stage, "rank": stage, "step": step, "optype": optype}
    chunk = {"mc": 0, "mb_id": seq, "gmc": stage} if compute else {"mc": -1, "mb_id": -1, "gmc": -1}
    return {**place, "start_ts": start, "duration": end - start, "seq_id": seq, **chunk}


def two_stages(step: int = 7) -> list[Operation]:
    """Stage 1 is not ready before 2.0 s, though its input is sent at 1.0 s; its backward ends at 5.0 s."""
    return [
        operation(0, "forward-compute", 0.0, 1.0, step=step),
        operation(0, "forward-send", 1.0, 1.5, step=step),
        operation(0, "backward-recv", 1.0, 5.5, step=step),
        operation(0, "backward-compute", 5.5, 7.5, step=step),
        operation(1, "forward-recv", 0.0, 1.5, step=step),
        operation(1, "forward-compute", 2.0, 3.0, step=step),
        operation(1, "backward-compute", 3.0, 5.0, step=step),
        operation(1, "backward-send", 5.0, 5.5, step=step),
        operation(1, "optimizer", 7.0, 8.0, step=step),
    ]


def write_trace(path: Path, operations: list[Operation]) -> Path:
    pq.write_table(pa.table({name: [one[name] for one in operations] for name in COLUMNS}), path)
    return path
