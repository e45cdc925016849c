"""Train on 4 ranks for half an hour with everything on at once, and watch for what grows, drifts or hangs.

    python bench/soak.py                 # 30 minutes
    SOAK_MINUTES=5 python bench/soak.py

Steps are throttled by sleeps, so that the four ranks together need less than a core. Every rank notes, once a second,
its resident memory, threads, open files and step time. The verdict compares the end with the beginning, after a warm-up
of a fifth of the run:

* memory: the least-squares line through resident memory rises by less than ``MOST_GROWTH_MIB`` over the rest;
* threads (the most) and open files (the median): as many at the end as at the beginning;
* no span dropped;
* step time: the median of the last quarter against that of the first one, beside the scatter of the medians between;
* the OpenTelemetry collector was sent something;
* no step takes longer than ``HANG_SECONDS``: a rank that does prints the stacks of its threads and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.collector import collecting

RANKS: Final = 4
WARM_UP: Final = 0.2
SLEEP_SECONDS: Final = 0.05
HANG_SECONDS: Final = 120
REQUEST_SECONDS: Final = 60
MOST_GROWTH_MIB: Final = 8.0
MOST_DRIFT: Final = 1.05
SCATTERS: Final = 3.0
BLOCKS: Final = 8


class Sample(NamedTuple):
    """A rank at one second: ``step_ns`` is the median of the steps since the sample before."""

    seconds: float
    memory_mib: float
    threads: int
    files: int
    step_ns: float


class Verdict(NamedTuple):
    """What became of one rank; ``problems`` is empty if all is well."""

    growth_mib: float
    threads: tuple[int, int]
    files: tuple[int, int]
    dropped: int
    drift: float
    problems: tuple[str, ...]


def judge(samples: Sequence[Sample], dropped: int = 0) -> Verdict:
    """Compare the end of a run with its beginning.

    Args:
        samples: of one rank, in order.
        dropped: spans that its trace lacks.

    Raises:
        ValueError: there are too few samples for a verdict.
    """
    first = samples[0].seconds + WARM_UP * (samples[-1].seconds - samples[0].seconds)
    kept = [sample for sample in samples if sample.seconds >= first]
    if len(kept) < 2 * BLOCKS:
        raise ValueError(f"{len(kept)} samples after the warm-up are too few for a verdict: let it run longer")
    size = len(kept) // BLOCKS
    blocks = [kept[number * size : (number + 1) * size] for number in range(BLOCKS)]
    early, late = kept[: 2 * size], kept[-2 * size :]
    growth = slope([(sample.seconds, sample.memory_mib) for sample in kept]) * (kept[-1].seconds - kept[0].seconds)
    threads = (max(sample.threads for sample in early), max(sample.threads for sample in late))
    # Not the most: a connection or a file that is open for a moment counts by luck.
    files = tuple(int(statistics.median_high(sample.files for sample in part)) for part in (early, late))
    medians = [statistics.median(sample.step_ns for sample in block) for block in blocks]
    before, after = (statistics.median(sample.step_ns for sample in part) for part in (early, late))
    center = statistics.median(medians)
    scatter = statistics.median(abs(median - center) for median in medians)
    problems = []
    if growth > MOST_GROWTH_MIB:
        problems.append(f"memory grew by {growth:.1f} MiB")
    if threads[1] > threads[0]:
        problems.append(f"threads grew from {threads[0]} to {threads[1]}")
    if files[1] > files[0]:
        problems.append(f"open files grew from {files[0]} to {files[1]}")
    if dropped:
        problems.append(f"{dropped} spans were dropped")
    if after > MOST_DRIFT * before and after - before > SCATTERS * scatter:
        problems.append(f"steps became {after / before - 1:.1%} longer")
    return Verdict(growth, threads, (files[0], files[1]), dropped, after / before, tuple(problems))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def train(folder: Path, seconds: float) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import commtrace

    torch.set_num_threads(1)
    faulthandler.enable()
    dist.init_process_group("gloo")
    commtrace.start()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    value, received = torch.ones(1024), torch.zeros(1024)
    begin, noted, step_times = time.monotonic(), 0.0, [0]
    go_on = torch.ones(1)
    number = 0
    with (folder / f"rank-{rank}.jsonl").open("w") as file:
        while go_on.item():
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            start = time.perf_counter_ns()
            with commtrace.step(number), commtrace.span("work"):
                model(torch.ones(16, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                work = dist.all_reduce(value, async_op=True)
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, value, (rank + 1) % size),
                        dist.P2POp(dist.irecv, received, (rank - 1) % size),
                    ]
                )
                for each in (work, *works):
                    assert each is not None
                    each.wait()
                value.fill_(1.0)
            step_times.append(time.perf_counter_ns() - start)
            number += 1
            time.sleep(SLEEP_SECONDS)
            now = time.monotonic() - begin
            if now - noted >= 1.0:
                file.write(json.dumps(sample(now, statistics.median(step_times))) + "\n")
                file.flush()
                noted, step_times = now, []
            if number % 20 == 0:
                go_on = torch.tensor([float(now < seconds)])
                dist.broadcast(go_on, src=0)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    commtrace.stop()


def sample(seconds: float, step_ns: float) -> Sample:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Sample(seconds, memory, threading.active_count(), len(os.listdir("/proc/self/fd")), step_ns)


def main() -> int:
    """Run the job, print the table; 1 if something grew, drifted, hung or was dropped."""
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    with tempfile.TemporaryDirectory() as name, collecting() as collector:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        job = subprocess.Popen(
            [*command, __file__, str(folder), str(60 * minutes)], env=everything_on(folder, collector.url)
        )
        try:
            requests = ask_for_detail(job, folder / "run", time.monotonic() + 60 * minutes + 3 * HANG_SECONDS)
        finally:
            job.kill()
            job.wait()
        if job.returncode:
            print(f"the job ended with status {job.returncode}; stacks of a rank that hung are above")
            return 1
        failed = report(folder, minutes)
        sent = f"{collector.requests} posts of spans and metrics, {collector.bytes} bytes"
        print(f"\n{requests} requests for detail; {sent}")
        print("The monitor said:", *(findings(folder / "run") or ["nothing"]), sep="\n  ")
        return 1 if failed or not collector.requests else 0


def everything_on(folder: Path, collector: str) -> dict[str, str]:
    """The environment of a job that uses all of commtrace at once."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COMMTRACE_DIR": str(folder / "run"),
        "COMMTRACE_MODULES": "depth=2",
        "COMMTRACE_SAMPLE": "2",
        "COMMTRACE_KEEP_BYTES": "2M",
        "COMMTRACE_EXPORT": "monitor,prometheus,otlp",
        "COMMTRACE_PROMETHEUS_PORT": "0",
        "COMMTRACE_OTLP_LEVEL": "modules",
        "COMMTRACE_OTLP_SAMPLE": "10",
        "COMMTRACE_OTLP_METRICS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "COMMTRACE_TRIGGER_SIGNAL": "SIGUSR2",
    }


def ask_for_detail(job: subprocess.Popen[bytes], run: Path, deadline: float) -> int:
    """Until the job ends, ask it every ``REQUEST_SECONDS`` to record some steps in detail. How often that was."""
    requests = 0
    while True:
        try:
            job.wait(min(REQUEST_SECONDS, deadline - time.monotonic()))
            return requests
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                raise
        command = [sys.executable, "-m", "commtrace", "trigger", str(run), "--num-steps", "5"]
        requests += not subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode


def findings(run: Path) -> list[str]:
    """What the monitor put down, one line each."""
    events = run / "monitor.jsonl"
    return events.read_text().splitlines() if events.exists() else []


def report(folder: Path, minutes: float) -> int:
    """Print a line for each rank."""
    from commtrace.trace.files.reader import load_run

    print(f"{minutes:g} minutes, {RANKS} ranks; the first {WARM_UP:.0%} are warm-up\n")
    print(f"{'rank':>4}{'memory growth':>16}{'threads':>12}{'open files':>14}{'dropped':>10}{'step time':>12}  verdict")
    recorded = load_run(folder / "run")
    failed = 0
    for rank in range(RANKS):
        lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
        verdict = judge([Sample(*json.loads(line)) for line in lines], sum(recorded.ranks[rank].dropped.values()))
        failed += bool(verdict.problems)
        threads, files = ("{} → {}".format(*pair) for pair in (verdict.threads, verdict.files))
        print(
            f"{rank:>4}{verdict.growth_mib:>+12.2f} MiB{threads:>12}{files:>14}{verdict.dropped:>10}"
            f"{verdict.drift:>11.3f}×  {'; '.join(verdict.problems) or 'steady'}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), float(sys.argv[2]))
    else:
        sys.exit(main())
