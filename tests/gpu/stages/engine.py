"""Does the native engine load, record and resolve, and does it record what the Python engine records?

    python -m tests.gpu.stages.engine OUTPUT

The first stage: if this fails, the rest is of the Python engine.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import commtrace
from bench.engines import engines, faults_of_recording, recorded_rows, why_not_native
from commtrace.recording.options import NATIVE, PYTHON
from tests.gpu.kernels import is_exact
from tests.gpu.stages.stage import Answers, run_stage, start_one_rank, synchronize

STEPS: Final = 5
_FACTS: Final = ("kind", "name", "step", "group", "seq", "op_in_seq", "bytes", "dtype", "peer", "is_async")


def main(answers: Answers) -> None:
    device = start_one_rank()
    if why_not_native():
        answers.add("the engine loads and records", "", NATIVE, misses=[why_not_native()])
    recorded: dict[str, list[tuple[Any, ...]]] = {}
    for engine in engines():
        rows = record(engine, answers, device)
        recorded[engine] = [tuple(row[fact] for fact in _FACTS) for row in rows if row["kind"] != "stall"]
    if NATIVE in recorded:
        native, python = recorded[NATIVE], recorded[PYTHON]
        differing = [pair for pair in zip(native, python, strict=False) if pair[0] != pair[1]]
        (answers.output / "differing_rows.json").write_text(json.dumps(differing))
        same = native == python
        answers.add(
            "both engines record the same",
            f"{len(native)} and {len(python)} rows of communication",
            misses=[] if same else [f"{len(differing)} rows differ, the first are {differing[:1]}"],
        )
    dist.destroy_process_group()


def record(engine: str, answers: Answers, device: torch.device) -> list[dict[str, Any]]:
    """Record a few steps; return the rows of communication and stalls, by launch."""
    directory = answers.output / engine
    begin = time.perf_counter()
    commtrace.start(commtrace.Config(dir=str(directory), engine=engine))
    started = time.perf_counter()
    for step in range(STEPS):
        with commtrace.step(step):
            communicate(device)
    synchronize()
    before_stop = time.perf_counter()
    commtrace.stop()
    stopped = time.perf_counter()
    return told(engine, directory, (started - begin, stopped - before_stop), answers, device)


def told(
    engine: str, directory: Path, seconds: tuple[float, float], answers: Answers, device: torch.device
) -> list[dict[str, Any]]:
    """Answer what became of a recording; return its communication and stalls."""
    rows = recorded_rows(directory)
    kept = [row for row in rows if row["kind"] in ("collective", "p2p", "stall") and row["step"] >= 0]
    calls = [row for row in kept if row["kind"] != "stall"]
    timings = sorted({row["timing"] for row in calls})
    misses = faults_of_recording(rows, engine)
    if device.type == "cuda" and timings == ["host"]:
        misses.append("no call was timed by the device")
    exact = [sum(is_exact(row, side) for row in calls) for side in ("start", "end")]
    answers.add(
        "the engine loads and records",
        f"{len(calls)} calls and {len(kept) - len(calls)} stalls; {exact[0]} starts and {exact[1]} ends exact; timing "
        f"{', '.join(timings)}; started in {seconds[0] * 1e3:.0f} ms, stopped in {seconds[1] * 1e3:.0f} ms",
        engine,
        misses=misses,
    )
    return sorted(kept, key=lambda row: (row["group"], row["seq"], row["op_in_seq"]))


def communicate(device: torch.device) -> None:
    """Call once what a job of one rank can call."""
    tensor, gathered = torch.ones(1024, device=device), torch.ones(1024, device=device)
    for _ in range(5):
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
    dist.broadcast(tensor, 0)
    dist.all_gather([gathered], tensor)
    first, second = dist.all_reduce(tensor, async_op=True), dist.all_reduce(gathered, async_op=True)
    assert first is not None
    assert second is not None
    first.wait()
    second.wait()
    dist.barrier()


if __name__ == "__main__":
    run_stage(main, __doc__)
