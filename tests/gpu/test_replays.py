"""The comparison of recorded replays with kernels, on a run made by hand: it needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commtrace.trace import schema
from tests.gpu import replays
from tests.gpu.replays import CONTAINED, EAGER_STEPS, PROFILED_FROM, STEPS
from tests.graphed_runs import GRAPH, WORLD, graph_mark, replay, stamped_detail
from tests.trace import rows as trace_rows

MS = 1_000_000


def write(
    folder: Path, *, kernel_ms: int = 1, results: str = "0x1p0", lost_step: int = -1, late_us: float | None = None
) -> Path:
    """What a rank writes of the program: a replay takes 5 ms, and its three kernels ``kernel_ms`` each.

    Stamps are ``late_us`` late, alternately; there are none without.
    """
    contained = [
        [name, 0, at, 0, size, -1, None, -1, False, -1, -1, -1, ""] for at, (name, size) in enumerate(CONTAINED.items())
    ]
    stamps = [[at, 2 * at, 2 * at + 1, 2 * at, 2 * at + 1, True, True, True] for at in range(3)]
    of_stamps = {} if late_us is None else {"stamps": stamps, "unstamped": {}}
    rows, events, seq = [graph_mark(operations=contained, **of_stamps)], list[dict[str, Any]](), 0
    for step in range(STEPS):
        start = step * 10 * MS
        sent = [*CONTAINED.items(), ("all_reduce", 4)]
        if step >= EAGER_STEPS:
            if step != lost_step:
                replayed = replay(step, start, start + 5 * MS, seq, op_in_seq=3, id=GRAPH)
                if late_us is not None:
                    late = [round(late_us * 1_000) if at % 2 else 0 for at in range(3)]
                    offsets = [(at + is_end) * MS + late[at] for at in range(3) for is_end in range(2)]
                    replayed = replayed._replace(detail=stamped_detail(start, seq, offsets, 100 * step))
                rows.append(replayed)
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
    (folder / "steps-0.json").write_text(json.dumps([0.01] * STEPS))
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


def test_stamps_are_compared_with_kernels(tmp_path: Path) -> None:
    good = write(tmp_path / "good", late_us=2)

    assert replays.misses(good, good, 0) == []
    assert replays.stamps_against_kernels(good, 0) == (
        "95 % of the starts are within 2.0 µs, 95 % of the ends are within 2.0 µs",
        [],
    )
    assert replays.step_ms(good, 0) == 10.0


def test_stamps_that_are_late_or_missing_are_found(tmp_path: Path) -> None:
    late = replays.stamps_against_kernels(write(tmp_path / "late", late_us=30), 0)
    assert late.misses == [
        "95 % of the starts are within 30.0 µs only", "95 % of the ends are within 30.0 µs only",
    ]  # fmt: skip
    assert replays.stamps_against_kernels(write(tmp_path / "none"), 0).misses == ["0 calls have stamps, not 27"]
