"""How long the monitor needs to join one window of many ranks: to read their reports from a real TCPStore, find who is
slow and the least times in flight of all groups, and to tell the ranks and write monitor.json.

python bench/monitor.py [--ranks 10000] [--windows 20]
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import time
from pathlib import Path

from commtrace.exporters.monitor.board import Board
from commtrace.exporters.monitor.joiner import Joiner
from commtrace.exporters.monitor.outlets import FileOutlet
from commtrace.live.waits import Block, BlockTime
from commtrace.live.window import WindowReport

MILLISECOND = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Join windows of made reports.")
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--windows", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure(options.ranks, options.windows, Path(directory))


def measure(ranks: int, windows: int, directory: Path) -> None:
    board = Board.serve(f"127.0.0.1:{free_port()}", "bench/0")
    joiner = Joiner(ranks, 4.0, [FileOutlet(directory)])
    seconds: list[float] = []
    processor: list[float] = []
    sizes: list[int] = []
    for window in range(windows):
        for rank in range(ranks):
            told = report(rank, window).to_bytes()
            sizes.append(len(told))
            board.put(rank, told)
        board.get([0])  # a store does not acknowledge what it is told, but answers in order
        begin, begin_cpu = time.perf_counter(), time.process_time()
        joiner.join(board, 4.0 * window)
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - begin_cpu)
    groups = {time.group for rank in range(ranks) for time in report(rank, 0).block.times}
    print(f"ranks                    {ranks}")
    print(f"bytes of a report        {statistics.median(sizes):.0f} (at most {max(sizes)})")
    print(f"join of a window, median {statistics.median(seconds):.3f} s (at most {max(seconds):.3f} s)")
    print(f"processor time, median   {statistics.median(processor):.3f} s, the store's included")
    print(f"least times told         {len(board.least(groups))} of the last window")
    print(f"typical work of a stage  {board.yardstick().work_ns}")
    print(f"named                    {[straggler.rank for straggler in joiner.watch.stragglers]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


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
