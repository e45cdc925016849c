"""Make ranks of small real jobs (gloo) die or stand still, again and again, and ask commtrace which rank it was.

    python bench/hangs.py                              # every case once
    python bench/hangs.py --times 20 --at-once 2       # the table of RESULTS.md, about half an hour
    python bench/hangs.py --case "killed, DDP" -v      # one of the cases, with the sentences

The victim, and the instant at which it fails, are drawn anew for every job: what was not yet written by then differs.
Ranks are forked, and ended as torchrun ends them: looked at every 0.1 s, and once one has failed the others get
SIGTERM. The doctor looks at the job 5 s after the time after which a hang is one, or once all ranks are gone; what the
monitor said until then is in `monitor.jsonl`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch


HANG_SECONDS: Final = 3.0
SECONDS_TO_TELL: Final = 5.0
FOREVER: Final = 600.0
POLL_SECONDS: Final = 0.1
"""How often torchrun looks at its ranks."""

SECONDS_TO_START: Final = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """Attributes:
    fault: what becomes of one rank.
    job: what all ranks do, see :data:`JOBS`.
    ranks: how many.
    """

    fault: str
    job: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.job}"

    @property
    def hangs(self) -> bool:
        """Whether the others wait for ever; else their connection breaks, and they fail."""
        return self.fault not in ("killed", "exits early")


CASES: Final = (
    Case("killed", "DDP", 2),
    Case("killed", "collectives", 3),
    Case("killed", "pipeline", 4),
    Case("stopped", "DDP", 3),
    Case("stopped", "pipeline", 4),
    Case("holds the GIL", "DDP", 3),
    Case("holds the GIL", "collectives", 3),
    Case("exits early", "DDP", 3),
    Case("exits early", "collectives", 3),
    Case("stuck in data", "DDP", 3),
    Case("stuck in data", "pipeline", 4),
)


# A rank


def fail(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "holds the GIL":
        hold_the_lock()
    elif fault == "exits early":
        sys.exit(0)


def hold_the_lock() -> None:
    """Read what nobody writes; a signal does not end it."""
    read, _write = os.pipe()
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)


Step: TypeAlias = Callable[["torch.Tensor"], None]
"""Trains a step on a batch."""


def load(is_stuck: bool) -> torch.Tensor:
    """The next batch."""
    import torch

    if is_stuck:
        queue.Queue[object]().get()
    return torch.ones(8, 64)


def ddp() -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def collectives() -> Step:
    import torch.distributed as dist

    def step(batch: torch.Tensor) -> None:
        dist.all_reduce(batch)
        dist.barrier()

    return step


def pipeline() -> Step:
    """Activations go up, gradients down."""
    import torch.distributed as dist

    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def step(batch: torch.Tensor) -> None:
        if rank:
            dist.recv(batch, src=rank - 1)
        if rank < last:
            dist.send(batch, dst=rank + 1)
            dist.recv(batch, src=rank + 1)
        if rank:
            dist.send(batch, dst=rank - 1)

    return step


JOBS: Final[Mapping[str, Callable[[], Step]]] = {
    "DDP": ddp, "collectives": collectives, "pipeline": pipeline,
}  # fmt: skip


def train(case: Case, rank: int, victim: int, seconds: float, folder: Path) -> None:
    """One rank; the victim fails once it has trained for so many seconds."""
    import torch
    import torch.distributed as dist

    import commtrace.auto

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step, begin = JOBS[case.job](), time.monotonic()
    while True:
        fails = rank == victim and time.monotonic() - begin > seconds
        if fails:
            (folder / "failed").write_text(str(time.time()))
            fail(case.fault)
        with commtrace.step():
            batch = load(fails and case.fault == "stuck in data")
            time.sleep(0.02)
            step(batch)


# The job


class Outcome(NamedTuple):
    """What was said of one job.

    Attributes:
        doctor, monitor: whether the right rank was named; the monitor where the others hang only.
        place: whether the line at which the victim is was told, where it can be.
        seconds: until the monitor had said so, after the time after which a hang is one.
        sentences: what was said.
    """

    doctor: bool
    monitor: bool | None
    place: bool | None
    seconds: float | None
    sentences: tuple[str, ...]


def run_job(case: Case, victim: int, seconds: float, folder: Path) -> Outcome:
    """Start it, let the victim fail, ask."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = [
        sys.executable, __file__, "--train", case.name, str(victim), str(seconds), str(folder),
    ]  # fmt: skip
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE_")},
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(case.ranks),
        "LOCAL_WORLD_SIZE": str(case.ranks),
        "COMMTRACE_DIR": str(folder / "run"),
        "COMMTRACE_RUN_ID": "hang",
        "COMMTRACE_EXPORT": "monitor",
        "COMMTRACE_MONITOR_SECONDS": "2",
        "COMMTRACE_HANG_SECONDS": str(HANG_SECONDS),
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(own, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            failed_at = _wait_for_failure(launcher, folder)
            if case.hangs:
                time.sleep(max(0.0, failed_at + HANG_SECONDS + SECONDS_TO_TELL - time.time()))
            else:
                launcher.wait(timeout=60)
            return judge(case, victim, failed_at, folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def _wait_for_failure(launcher: subprocess.Popen[bytes], folder: Path) -> float:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return float((folder / "failed").read_text())
        if launcher.poll() is not None:
            break
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the job did not come to its fault:\n{(folder / 'log').read_text()[-3000:]}")


def launch(case: Case, victim: int, seconds: float, folder: Path) -> None:
    """Fork the ranks; end them as torchrun does once one has failed."""
    # Once, and not in every rank.
    import torch.nn.parallel  # noqa: F401

    import commtrace.capture.instrumentation
    import commtrace.exporters.monitor.exporter  # noqa: F401

    ranks = {}
    for rank in range(case.ranks):
        pid = os.fork()
        if not pid:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            train(case, rank, victim, seconds, folder)
        ranks[pid] = rank
    has_failed = False
    while ranks:
        time.sleep(POLL_SECONDS)
        ended = [(pid, status) for pid in list(ranks) for found, status in [os.waitpid(pid, os.WNOHANG)] if found]
        for pid, status in ended:
            print(f"rank {ranks.pop(pid)} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
        if any(status for _, status in ended) and not has_failed:
            has_failed = True
            for pid in ranks:
                os.kill(pid, signal.SIGTERM)


def judge(case: Case, victim: int, failed_at: float, folder: Path) -> Outcome:
    """What the doctor and the monitor say of it."""
    from commtrace.analysis.hangs.examination import examine
    from commtrace.trace.processes import process_state

    diagnosis = examine(folder / "run", now_ns=time.time_ns(), ask=process_state)
    sentences = [f"doctor: {one}" for one in (*(one.evidence for one in diagnosis.findings), *diagnosis.hang.sentences)]
    if not case.hangs:
        first = diagnosis.first_failure
        return Outcome(first is not None and list(first.ranks) == [victim], None, None, None, tuple(sentences))
    is_right = diagnosis.hang.is_hung and [root.rank for root in diagnosis.hang.chains.roots] == [victim]
    activity, rank = diagnosis.hang.last_activities.get(victim), diagnosis.rank(victim)
    at = (rank.stack_at if rank is not None else None) or (activity.at if activity is not None else None) or ""
    expected = {"stuck in data": "load", "holds the GIL": "hold_the_lock"}.get(case.fault)
    place = None if expected is None else f"{__file__}:" in at and at.endswith(f" {expected}")
    path = folder / "run" / "monitor.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    hangs = [event for event in events if event["finding"]["kind"] == "hang" and event["kind"] != "recovered"]
    sentences += [f"monitor, {event['time_ns'] / 1e9 - failed_at:.1f} s: {event['sentence']}" for event in events]
    named = [event["time_ns"] / 1e9 for event in hangs if event["finding"]["ranks"][:1] == [victim]]
    seconds = named[0] - failed_at - HANG_SECONDS if named else None
    # Rank 0 has the monitor: where it is the one that fails, only one outside of the job could speak.
    monitor = None if victim == 0 and case.fault in ("stopped", "holds the GIL") else bool(named)
    return Outcome(is_right, monitor, place, seconds, tuple(sentences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="Default: all.")
    parser.add_argument("--times", type=int, default=1, help="Jobs of each case.")
    parser.add_argument("--at-once", type=int, default=1, help="Jobs at the same time.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="A directory for the runs.")
    parser.add_argument("-v", "--verbose", action="store_true", help="Print what was said of all jobs, not of misses.")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.case or case.name in options.case]
    drawn = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        where = options.keep or Path(scratch)
        print(f"{'case':28s} {'doctor':>9s} {'monitor':>9s} {'place':>9s}  seconds beyond the limit", flush=True)
        for case in cases:
            jobs = [
                (case, drawn.randrange(case.ranks), drawn.uniform(3.0, 5.0), where / case.name / str(number))
                for number in range(options.times)
            ]
            outcomes = list(_run_all(jobs, options.at_once))
            print(_line(case, outcomes), flush=True)
            for (_, victim, _, folder), outcome in zip(jobs, outcomes, strict=True):
                if options.verbose or False in (outcome.doctor, outcome.monitor, outcome.place):
                    print(f"    rank {victim} of {case.ranks} {case.fault}, {folder}")
                    print(*(f"        {sentence}" for sentence in outcome.sentences), sep="\n", flush=True)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def _run_all(jobs: list[tuple[Case, int, float, Path]], at_once: int) -> Iterator[Outcome]:
    from concurrent.futures import ThreadPoolExecutor

    def one(job: tuple[Case, int, float, Path]) -> Outcome:
        job[-1].mkdir(parents=True)
        return run_job(*job)

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(one, jobs)


def _line(case: Case, outcomes: list[Outcome]) -> str:
    def right(answers: list[bool | None]) -> str:
        known = [answer for answer in answers if answer is not None]
        return f"{sum(known)} of {len(known)}" if known else "-"

    seconds = sorted(one.seconds for one in outcomes if one.seconds is not None)
    times = f"{seconds[len(seconds) // 2]:.1f} (at most {seconds[-1]:.1f})" if seconds else "-"
    columns: list[list[bool | None]] = [
        [one.doctor for one in outcomes],
        [one.monitor for one in outcomes],
        [one.place for one in outcomes],
    ]
    return f"{case.name:28s} " + " ".join(f"{right(answers):>9s}" for answers in columns) + f"  {times}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        (_case,) = [case for case in CASES if case.name == sys.argv[2]]
        launch(_case, int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
