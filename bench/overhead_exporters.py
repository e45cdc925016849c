"""What live exporters add to the training thread, per communication: Prometheus, OTLP, monitor; alone and together.

    python bench/overhead_exporters.py

Steps of 800 all_reduces on the fake backend and 400 ms of pure Python (``--calls``, ``--milliseconds``): a training
thread that holds the GIL all the time, the worst that exporters can meet, as their threads run in the same interpreter.
A second process receives OTLP, scrapes /metrics once a second, and serves the monitor's store. The variants take turns
within each round.

*CPU* is what the training thread itself needs for an all_reduce. *GIL* is how long it stands still over the whole step,
for whatever reason but that other processes have the cores: wall time less CPU time less the time that the kernel had
it in a run queue (Linux' schedstat). Nothing else in this loop can block, so that is what other threads of the process
cost; on a busy machine more, as one that holds the GIL is put aside for other processes, too.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

WARM_UP_SECONDS: Final = 1.0
ALL_SPANS: Final = " communication"
"""Behind a variant: OTLP sends every communication and stall, not only phases, which is the default."""

VARIANTS: Final = (
    "plain", "files", "prometheus", "otlp", "monitor", "prometheus,otlp,monitor", f"otlp{ALL_SPANS}",
)  # fmt: skip


TOKEN = "the-token-of-the-bench"


class Cost(NamedTuple):
    """Of one communication in one burst, ns."""

    cpu: float
    gil: float
    threads: float


def serve(otlp: int, metrics: int, store: int) -> None:
    """The other process: what exporters send to, and what asks them."""
    from commtrace.exporters.monitor.exchange import MonitorServer
    from commtrace.exporters.monitor.rendezvous import Address
    from commtrace.exporters.monitor.store import MonitorStore

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not on the table's terminal."""

    monitor = MonitorStore()
    MonitorServer(Address("127.0.0.1", store), TOKEN, monitor.answer)
    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", otlp), Receiver).serve_forever, daemon=True).start()
    print("ready", flush=True)
    assert monitor.job is None
    while True:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=1).read()
        time.sleep(1)


def spin_of(milliseconds: float) -> int:
    """How many rounds of an empty loop last so long."""
    count = 100_000
    best = min(_spin_ns(count) for _ in range(5))
    return int(count * milliseconds * 1_000_000 / best)


def _spin_ns(count: int) -> int:
    start = time.thread_time_ns()
    for _ in range(count):
        pass
    return time.thread_time_ns() - start


class Shape(NamedTuple):
    """A step: so many communications, then so many rounds of an empty loop."""

    calls: int
    spin: int


def burst(operation: Callable[[], object], step: Callable[[int], Any], shape: Shape, seconds: float) -> Cost:
    """Train for so many seconds."""
    number = counted = cpu = blocked = others = 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < WARM_UP_SECONDS + seconds or not counted:
        before, before_of_others = blocked_ns(), others_ns()
        with step(number):
            start = time.thread_time_ns()
            for _ in range(shape.calls):
                operation()
            took = time.thread_time_ns() - start
            for _ in range(shape.spin):
                pass
        number += 1
        if elapsed > WARM_UP_SECONDS:
            cpu += took
            blocked += blocked_ns() - before
            others += others_ns() - before_of_others
            counted += shape.calls
    return Cost(cpu / counted, blocked / counted, others / counted)


def blocked_ns() -> int:
    """How long this thread has neither run nor been ready to run, from an arbitrary point in time."""
    running, ready = Path("/proc/thread-self/schedstat").read_text().split()[:2]
    return time.perf_counter_ns() - int(running) - int(ready)


def others_ns() -> int:
    """CPU time so far of all other threads of this process."""
    return time.process_time_ns() - time.thread_time_ns()


class Nothing:
    """A step without commtrace."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def measured(
    variant: str, operation: Callable[[], object], shape: Shape, seconds: float, ports: Mapping[str, int]
) -> tuple[Cost, dict[str, int]]:
    """One burst; and what the recorder had to drop in it."""
    import commtrace
    from commtrace.config import MonitorConfig, OtlpConfig, PrometheusConfig
    from commtrace.recording import session

    if variant == "plain":
        return burst(operation, lambda number: Nothing(), shape, seconds), {}
    with tempfile.TemporaryDirectory() as directory:
        config = commtrace.Config(
            dir=directory,
            export="" if variant == "files" else variant.removesuffix(ALL_SPANS),
            prometheus=PrometheusConfig(port=ports["metrics"]),
            otlp=OtlpConfig(level="communication" if variant.endswith(ALL_SPANS) else "phases"),
            monitor=MonitorConfig(store=f"127.0.0.1:{ports['store']}", token=TOKEN),
        )
        commtrace.start(config)
        cost = burst(operation, commtrace.step, shape, seconds)
        assert session._current is not None
        dropped = dict(session._current.recorder.dropped)
        commtrace.stop()
    return cost, dropped


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each burst, after a second of warm-up")
    parser.add_argument("--calls", type=int, default=800, help="all_reduces of a step")
    parser.add_argument("--milliseconds", type=float, default=400.0, help="of pure Python in a step")
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
    ports = dict(zip(("otlp", "metrics", "store"), free_ports(3), strict=True))
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{ports['otlp']}"
    command = [sys.executable, __file__, "--serve", *map(str, ports.values())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            measure(options, ports)
        finally:
            other.kill()


def measure(options: argparse.Namespace, ports: Mapping[str, int]) -> None:
    """All variants, taking turns."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.ones(1024)
    shape = Shape(options.calls, spin_of(options.milliseconds))
    rounds, seconds = options.rounds, options.seconds
    costs: dict[str, list[Cost]] = {variant: [] for variant in VARIANTS}
    dropped: dict[str, int] = dict.fromkeys(VARIANTS, 0)
    for _ in range(rounds):
        for variant in VARIANTS:
            cost, lost = measured(variant, lambda: dist.all_reduce(tensor), shape, seconds, ports)
            costs[variant].append(cost)
            dropped[variant] += sum(lost.values())
    print(f"torch {torch.__version__}, fake backend, {rounds} rounds of {seconds:g} s, load {os.getloadavg()[0]:.1f}")
    print("µs per all_reduce with its stall; medians over rounds; in brackets against recording to files alone\n")
    print(f"{'variant':26}{'CPU':>8}{'added':>20}{'GIL':>8}{'added':>20}{'threads':>9}{'added':>20}{'dropped':>9}")
    for variant in VARIANTS:
        line = f"{variant:26}"
        for clock in Cost._fields:
            own, plain, files = (
                [getattr(cost, clock) / 1000 for cost in costs[one]] for one in (variant, "plain", "files")
            )
            added, more = (statistics.median(a - b for a, b in zip(own, one, strict=True)) for one in (plain, files))
            width = 9 if clock == "threads" else 8
            line += f"{statistics.median(own):>{width}.2f}{f'{added:+.2f} ({more:+.2f})':>20}"
        print(f"{line}{dropped[variant]:>9}")
    dist.destroy_process_group()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    main()
