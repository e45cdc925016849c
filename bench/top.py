"""How long a look of ``commtrace top`` takes at a running job of many ranks, against reading all of its files.

    python bench/top.py --ranks 1024 --steps 60

The job is simulated, its files are written as a recorder writes them: a batch every two steps, no end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from commtrace.cli.commands.top import draw
from commtrace.live.top.from_files import FileSource
from commtrace.synth import Job, synthesize
from commtrace.synth.synthesis import _marks
from commtrace.trace.files.reader import load_newest
from commtrace.trace.files.tail import RunTail
from commtrace.trace.files.writer import SegmentWriter

STEPS_PER_BATCH = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", type=Path, help="written there and kept; used as it is if it is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.run or Path(scratch) / "run"
        if not directory.exists():
            num_rows = write_running(directory, arguments.ranks, arguments.steps)
            print(f"{arguments.ranks} ranks, {arguments.steps} steps, {num_rows:,} rows")
        measure(directory, arguments.last, arguments.repeats)


def write_running(directory: Path, ranks: int, steps: int) -> int:
    """Files of a job that still runs; returns how many rows they hold."""
    tp, pp = min(8, ranks), min(8, max(1, ranks // 8))
    job = Job(tp=tp, pp=pp, dp=max(1, ranks // (tp * pp)), microbatches=8, steps=steps, layers=pp, gpus_per_host=8)
    synthetic = synthesize(job)
    total = 0
    for rank in range(job.world_size):
        trace = synthetic.rank_trace(rank)
        spans = trace.spans.take(np.argsort(trace.spans.step, kind="stable"))
        metadata = replace(trace.metadata, session=1, run_id="bench")
        writer = SegmentWriter(directory, metadata)
        writer.write(_marks(synthetic, trace))
        for first in range(0, steps, STEPS_PER_BATCH):
            chosen = (spans.step >= first) & (spans.step < first + STEPS_PER_BATCH)
            writer.write_spans(spans.take(chosen), synthetic.names)
        writer.close()
        total += len(spans)
    return total


def measure(directory: Path, last: int, repeats: int) -> None:
    source = FileSource(directory, last)
    tail = RunTail(directory)
    kinds: dict[str, Callable[[], Any]] = {
        "read the newest steps": lambda: tail.read(last),
        "one look (read, analyse, judge)": source.look,
        "read all newest segments": lambda: load_newest(directory),
    }
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, call in kinds.items():
            began = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - began)
    for name, seconds in took.items():
        print(f"{name:<34} first {seconds[0]:7.2f} s   median {statistics.median(seconds):7.2f} s")
    frame = source.look()
    began = time.perf_counter()
    lines = draw(frame, 120, height=50, refresh=2.0)
    print(f"{'draw':<34} {time.perf_counter() - began:13.3f} s   {len(lines)} lines")


if __name__ == "__main__":
    main()
