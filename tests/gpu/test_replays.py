"""The comparison of recorded replays with kernels, on a run made by hand: it needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commtrace.trace import schema
from tests.gpu import replays
from tests.gpu.replays import CONTAINED, EAGER_STEPS, PROFILED_FROM, STEPS
from tests.graphed_runs import GRAPH, WORLD, graph_mark, replay
from tests.trace import rows as trace_rows

MS = 1_000_000


def write(folder: Path, *, kernel_ms: int = 1, results: str = "0x1p0", lost_step: int = -1) -> Path:
    """What a rank writes of the program: a replay takes 5 ms, and its three kernels ``kernel_ms`` each."""
    contained = [
        [name, 0, at, 0, size, -1, None, -1, False, -1, -1, -1, ""] for at, (name, size) in enumerate(CONTAINED.items())
    ]
    rows, events, seq = [graph_mark(operations=contained)], list[dict[str, Any]](), 0
    for step in range(STEPS):
        start = step * 10 * MS
        sent = [*CONTAINED.items(), ("all_reduce", 4)]
        if step >= EAGER_STEPS:
            if step != lost_step:
                rows.append(replay(step, start, start + 5 * MS, seq, op_in_seq=3, id=GRAPH))
            seq, sent = seq + 3, sent[3:]
        for name, size in sent:
            rows.append(
                trace_rows.row(
                    kind=schema.COLLECTIVE, name=name, lane=schema.COMMUNICATION, step=step, start=start + 6 * MS,
                    group=WORLD.id, seq=seq, op_in_seq=0, bytes=size,
                )
            )  # fmt: skip
            seq += 1
        if step >= PROFILED_FROM:
            for number in range(4):
                begin = (start + number * kernel_ms * MS) / 1000
                kernel = {"cat": "kernel", "name": "ncclDevKernel", "ts": begin, "dur": kernel_ms * 1000}
                events.append(kernel | {"args": {"correlation": len(events)}})
    trace_rows.write_rank(folder, rows, rank=0, world_size=2)
    (folder / "trace-0.json").write_text(json.dumps({"traceEvents": events}))
    (folder / "rank-0.json").write_text(json.dumps([results]))
    return folder


def test_a_run_as_it_should_be_misses_nothing(tmp_path: Path) -> None:
    good = write(tmp_path / "good")

    assert replays.misses(good, good, 0) == []
    assert replays.figures(good, 0) == "9 replays, 5.00 ms in the median"


@pytest.mark.parametrize(
    ("changed", "miss"),
    [
        ({"results": "0x1p1"}, "results differ"),
        ({"kernel_ms": 2}, "its kernels 6000000 ns"),
        ({"lost_step": 5}, "replays are in the steps [3, 4, 6"),
    ],
)
def test_what_is_wrong_is_found(changed: dict[str, Any], miss: str, tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", **changed)

    assert any(miss in found for found in replays.misses(bad, good, 0))
