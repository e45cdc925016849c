"""How long the monitor needs for one window of many ranks: to take their reports over real connections, to find who is
slow and the least times in flight of all groups, and to write monitor.json.

python bench/monitor.py [--ranks 10000] [--windows 20]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.exchange import MonitorClient, MonitorServer
from commtrace.exporters.monitor.messages import Report, WatchedJob, encoded
from commtrace.exporters.monitor.rendezvous import Address
from commtrace.exporters.monitor.sinks import FileSink
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.live.monitoring.waits import BlockReport, BlockTime
from commtrace.live.monitoring.window import WindowReport

MILLISECOND = 1_000_000
TOKEN = "the-token-of-the-bench"


def main() -> None:
    parser = argparse.ArgumentParser(description="Join windows of made reports.")
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--windows", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure(options.ranks, options.windows, Path(directory))


def measure(ranks: int, windows: int, directory: Path) -> None:
    job = WatchedJob("bench", 0, ranks, 4.0)
    store = MonitorStore(job)
    server = MonitorServer(Address("127.0.0.1", 0), TOKEN, store.answer)
    aggregator = Aggregator(job, [FileSink(directory)])
    taken: list[float] = []
    joined: list[float] = []
    for window in range(windows):
        taken.append(seconds_to_take([Report(job, report(rank, window)) for rank in range(ranks)], server))
        begin = time.perf_counter()
        aggregator.join(store, 4.0 * window)
        joined.append(time.perf_counter() - begin)
    server.close()
    sizes = [len(encoded(Report(job, report(rank, 0)))) for rank in range(ranks)]
    print(f"ranks                        {ranks}")
    print(f"bytes of a report            {statistics.median(sizes):.0f} (at most {max(sizes)})")
    print(f"exchange, server's CPU       {1e6 * statistics.median(taken) / ranks:.0f} µs (median of the windows)")
    print(f"join of a window             {statistics.median(joined):.3f} s (at most {max(joined):.3f} s)")
    print(f"named                        {[finding.line() for finding in aggregator.watch.findings]}")


def seconds_to_take(reports: Sequence[Report], server: MonitorServer) -> float:
    """CPU time that the server needs for one exchange with each rank, which are in another process."""
    sender = multiprocessing.get_context("fork").Process(target=send, args=(reports, server))
    begin = time.process_time()
    sender.start()
    sender.join()
    return time.process_time() - begin


def send(reports: Sequence[Report], server: MonitorServer) -> None:
    client = MonitorClient(server.address, TOKEN)
    for one in reports:
        client.exchange(one)


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
        work_ns=(work * MILLISECOND, 5 * MILLISECOND, 0, 0, 0, 3 * MILLISECOND),
        error_ns=MILLISECOND // 10,
        block=BlockReport(64, window, groups(rank)),
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
