"""How long the monitor needs to join one window of many ranks, reading of the reports included: who is slow, and the
least times in flight of all groups.

python bench/monitor.py [--ranks 10000] [--windows 20]
"""

from __future__ import annotations

import argparse
import statistics
import time

from commtrace.live.waits import Block, BlockTime, LeastTimes
from commtrace.live.watch import Watch
from commtrace.live.window import WindowReport

MILLISECOND = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Join windows of made reports.")
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--windows", type=int, default=20)
    options = parser.parse_args()
    watch, least, found = Watch(options.ranks, 4.0), LeastTimes(4.0), 0
    seconds: list[float] = []
    processor: list[float] = []
    sizes: list[int] = []
    for window in range(options.windows):
        told = [report(rank, window).to_bytes() for rank in range(options.ranks)]
        sizes += map(len, told)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        reports = [WindowReport.from_bytes(one) for one in told]
        watch.join(reports, now=4.0 * window)
        found += len(least.join((one.rank, one.block) for one in reports))
        least.size_blocks(watch.step_ns)
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - begin_cpu)
    print(f"ranks                    {options.ranks}")
    print(f"bytes of a report        {statistics.median(sizes):.0f} (at most {max(sizes)})")
    print(f"join of a window, median {statistics.median(seconds):.3f} s (at most {max(seconds):.3f} s)")
    print(f"processor time, median   {statistics.median(processor):.3f} s")
    print(f"least times of groups    {found / options.windows:.0f} per window")
    print(f"named                    {[straggler.rank for straggler in watch.stragglers]}")


def report(rank: int, window: int) -> WindowReport:
    """A rank of a job with 8 stages; rank 4321 is slow."""
    work = 80 if rank == 4321 else 60
    return WindowReport(
        rank=rank,
        host=f"node{rank // 8:05}",
        stage=rank % 8,
        window=window,
        steps=40,
        last_step=40 * window,
        age_ns=50 * MILLISECOND,
        duration_ns=100 * MILLISECOND,
        work_ns=(work * MILLISECOND, 5 * MILLISECOND, 0, 3 * MILLISECOND),
        error_ns=MILLISECOND // 10,
        block=Block(64, window, groups(rank)),
        exposed_ns={"dp": (92 - work) * MILLISECOND // 2, "pp": (92 - work) * MILLISECOND // 2},
    )


def groups(rank: int) -> tuple[BlockTime, ...]:
    """Of 8 tensor-parallel ranks, and of the 100 next ones that have the same stage."""
    tensor, replicas = rank // 8, 10**6 + rank // 800 * 8 + rank % 8
    return (
        *(BlockTime(2**60 + tensor, operation, 8, 6_400, (50 * MILLISECOND + rank,) * 8) for operation in (0, 1)),
        *(BlockTime(2**60 + replicas, operation, 100, 640, (9 * MILLISECOND + rank,) * 8) for operation in (1, 2)),
    )


if __name__ == "__main__":
    main()
