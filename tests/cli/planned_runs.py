"""Recorded runs of a job that is planned, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import make_plan
from commtrace.trace import schema
from tests.trace.rows import mark, row, write_rank

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
LAYOUT = {"microbatch": 2, "parameter_bytes": 2, "gradient_bytes": 4, "distributed_optimizer": True}


def recorded(folder: Path, missing: str = "", peaks: Sequence[tuple[int, int]] = (), **facts: Any) -> str:
    """Write a run of two ranks that sent what is planned for the sizes in ``facts``, without one operation.

    ``peaks``: bytes allocated and reserved on each rank.
    """
    model = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128)
    layout = Layout(dp=2, microbatches=3, microbatch=2, distributed_optimizer=True)
    traffic = [row for row in make_plan(model, layout).stages[0].traffic if row.operation != missing]
    groups = {"dp-cp": (1, "dp"), "dist-opt": (2, "dist-opt"), "tp": (3, "tp")}
    for rank in (0, 1):
        rows = [
            mark("process_group", {"id": number, "ranks": [rank] if role == "tp" else [0, 1], "ordinal": 0,
                                   "role": role, "name": role, "description": "", "backend": "gloo"})
            for number, role in groups.values()
        ]  # fmt: skip
        parallel = {"tp": 1, "pp": 1, "dp": 2, "cp": 1, "ep": 1}
        rows += [
            mark("topology", {"coordinates": {"dp": rank}, "parallel": parallel, "microbatches": 3, "chunks": 1}),
            mark("topology", facts),
            row(kind=schema.STEP, name="step", step=0, start=0, end=100_000),
            row(kind=schema.OPTIMIZER, name="adam", step=0, start=90_000, end=91_000),
        ]
        if peaks:
            allocated, reserved = peaks[rank]
            rows.append(mark("peak_memory", {"step": 0, "allocated": allocated, "reserved": reserved}))
        calls = [call for call in traffic for _ in range(call.count)]
        rows += [
            row(kind=schema.COLLECTIVE, name=call.operation, lane=schema.COMMUNICATION, step=0, id=number, seq=number,
                group=groups[call.role][0], start=100 * number, end=100 * number + 50, bytes=call.bytes_per_call)
            for number, call in enumerate(calls, 1)
        ]  # fmt: skip
        write_rank(folder, [*rows, mark("end", {})], rank=rank, world_size=2)
    return str(folder)
