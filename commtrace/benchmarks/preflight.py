"""Check a cluster before a job: every rank, every pair of ranks, every pair of nodes; nothing waits without an end.

Ranks meet in the store of the job and say what they are. Rank 0 waits for them a bounded time, so a rank that never
comes costs its own verdict only. Each asks each other for an answer over TCP. Those that answer form a process group,
in which bandwidth and devices are measured. A thread ends the process at a last deadline, whatever it waits for.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from commtrace.analysis.communication.baseline import Measurement, NetworkBaseline
from commtrace.analysis.communication.links import find_slow_links
from commtrace.benchmarks.collectives import Results, Settings, measure_collectives
from commtrace.benchmarks.device import describe_device, device_name, own_device
from commtrace.benchmarks.facts import RankFacts, collect_facts
from commtrace.benchmarks.groups import choose_groups
from commtrace.benchmarks.job import BenchmarkError, BenchmarkJob, first_line
from commtrace.benchmarks.judgement import (
    LaunchedJob,
    PreflightFinding,
    PreflightVerdict,
    judge_absent,
    judge_affinity,
    judge_devices,
    judge_interfaces,
    judge_links,
    judge_reached,
    judge_settings,
    judge_silent,
    judge_within_nodes,
)
from commtrace.benchmarks.matmul import Shape, measure_matmul
from commtrace.benchmarks.signals import acting_on_signals
from commtrace.config import Config
from commtrace.errors import ConfigurationError
from commtrace.recording import launchers
from commtrace.trace.inputs import decode_json

_ANSWER: Final = struct.Struct("!i")
_ANSWER_SECONDS: Final = 3.0
_THREADS: Final = 32
_POLL_SECONDS: Final = 0.05
_PAYLOAD: Final = {"nccl": 256 << 20, "gloo": 4 << 20}
_MEASURE_SECONDS: Final = 15.0
_MOST_SECONDS_TO_STAY: Final = 20.0
_CHECKS: Final = (
    "started", "settings", "interfaces", "affinity", "reachability", "device speed", "bandwidth within nodes",
    "bandwidth between nodes",
)  # fmt: skip
_SHAPES: Final = {"cuda": Shape(8192, 8192, 8192), "cpu": Shape(256, 256, 256)}


@dataclass(frozen=True, slots=True)
class PreflightLimits:
    """Seconds: until all ranks have come, and until a measurement of the network must have ended."""

    start: float
    network: float

    @property
    def total(self) -> float:
        """Return the seconds after which the process ends, whatever it waits for."""
        return 2 * self.start + 2 * self.network + 30


@dataclass(slots=True)
class _PreflightProgress:
    """What this rank knows so far; only rank 0 has findings."""

    nodes: list[str] = field(default_factory=list)
    findings: list[PreflightFinding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    ranks: int = 0
    present: Mapping[int, RankFacts] = field(default_factory=dict)  # the ranks that have come, once that is decided
    stopping: threading.Event = field(default_factory=threading.Event)
    met: threading.Event = field(default_factory=threading.Event)
    last_words: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that says the verdict

    def add(self, check: str, findings: Iterable[PreflightFinding]) -> None:
        self.checked.append(check)
        self.findings += findings


def preflight(backend: str, limits: PreflightLimits, report: Callable[[PreflightVerdict], None]) -> bool:
    """Check the cluster; rank 0 reports the verdict, and all ranks return whether it is good.

    Raises:
        ConfigurationError: no launcher started this process.
        BenchmarkError: this rank did not reach rank 0.
    """
    position = launchers.position(os.environ)
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if position is None or not master or not port.isdecimal():
        raise ConfigurationError(
            "preflight needs the processes of a job: torchrun --nproc-per-node 8 -m commtrace preflight; under another "
            "launcher MASTER_ADDR and MASTER_PORT must be set"
        )
    # Else torch's watchdog of NCCL ends the process at a timeout, before it can say what it knows.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    began = time.monotonic()
    progress = _PreflightProgress(ranks=position.world_size)

    def verdict() -> PreflightVerdict:
        named = [node for finding in progress.findings for node in finding.nodes]
        nodes = tuple(dict.fromkeys([*progress.nodes, *named]))
        return PreflightVerdict(
            nodes, tuple(progress.findings), progress.ranks, tuple(progress.checked), round(time.monotonic() - began, 1)
        )

    def give_up() -> None:
        if not progress.last_words.acquire(timeout=_ANSWER_SECONDS):
            os._exit(1)  # the verdict was said, and who reads it does not take it
        if position.rank == 0:
            progress.findings.append(PreflightFinding("time", (), f"the checks did not end within {limits.total:g} s"))
            report(verdict())
        else:
            sys.stderr.write(f"commtrace: rank {position.rank}: rank 0 gave no verdict within {limits.total:g} s\n")
        sys.stdout.flush()
        os._exit(1)

    def end(number: signal.Signals) -> None:
        if position.rank == 0:
            _report_what_is_known(progress, number, began, lambda: report(verdict()))
        else:
            _answer_until_rank_0_ends(progress)
        sys.stdout.flush()
        os._exit(128 + number)

    watchdog = threading.Timer(limits.total, give_up)
    watchdog.daemon = True
    watchdog.start()
    with _answering(position.rank) as own_port, acting_on_signals(end):
        store = _store(master, int(port), position, limits.start)
        good = _Checks(
            position.rank, position.world_size, position.local_rank or 0, store, backend, limits, progress
        ).run(master, own_port, lambda: report(verdict()))
    watchdog.cancel()
    return good


def _report_what_is_known(
    progress: _PreflightProgress, number: signal.Signals, began: float, report: Callable[[], None]
) -> None:
    """Report the verdict of rank 0 as far as it is known.

    Launchers end all ranks with SIGTERM when one has died, so it looks once more who answers.
    """
    progress.stopping.set()
    progress.met.wait(_ANSWER_SECONDS)  # it notes who has come until now
    if not progress.last_words.acquire(timeout=_ANSWER_SECONDS):
        return  # the verdict is being said
    elsewhere = [rank_facts for rank, rank_facts in progress.present.items() if rank != 0]
    said = set(progress.findings)
    progress.findings += (
        finding for finding in judge_silent(progress.present, unanswered(elsewhere)) if finding not in said
    )
    left = [check for check in _CHECKS if check not in progress.checked]
    text = f"{number.name} ended the checks after {time.monotonic() - began:.0f} s; not checked: {', '.join(left)}"
    progress.findings.append(PreflightFinding("time", (), text))
    report()


def _answer_until_rank_0_ends(progress: _PreflightProgress) -> None:
    """Stay a moment: rank 0 asks who is still there, and one that has gone would seem to have died."""
    deadline = time.monotonic() + (_MOST_SECONDS_TO_STAY if progress.met.is_set() else _ANSWER_SECONDS)
    while time.monotonic() < deadline:
        if progress.met.is_set() and not answers(progress.present[0]):
            return
        time.sleep(_POLL_SECONDS)


def _store(master: str, port: int, position: launchers.Position, seconds: float) -> Store:
    is_master = position.rank == 0 and launchers.agent_store(os.environ) is None
    try:
        store = TCPStore(master, port, is_master=is_master, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise BenchmarkError(
            f"rank {position.rank} does not reach rank 0 at {master}:{port} within {seconds:g} s: did rank 0 start, is "
            f"the address one of its network, is the port open? ({first_line(error)})"
        ) from error
    return PrefixStore(f"commtrace-preflight-{launchers.worker_restarts(os.environ)}", store)


@contextmanager
def _answering(rank: int) -> Iterator[int]:
    """Answer every connection with this rank's number, on the port that is yielded."""
    with socket.create_server(("", 0), backlog=1024) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return  # it was closed: the checks are over
                with connection:
                    connection.settimeout(_ANSWER_SECONDS)
                    try:
                        connection.sendall(_ANSWER.pack(rank))
                    except OSError:
                        continue  # who asked has gone

        threading.Thread(target=answer, name="commtrace-answer", daemon=True).start()
        yield listening.getsockname()[1]


def answers(target: RankFacts) -> bool:
    """Return whether a rank answers with its number within a short time."""
    try:
        with socket.create_connection((target.address, target.port), _ANSWER_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            received = connection.recv(_ANSWER.size, socket.MSG_WAITALL)
    except OSError:
        return False
    return received == _ANSWER.pack(target.rank)


def unanswered(targets: Iterable[RankFacts]) -> list[int]:
    """Return the ranks that do not answer, all of them asked at once."""
    asked = list(targets)
    with ThreadPoolExecutor(_THREADS) as threads:
        heard = list(threads.map(answers, asked))
    return [target.rank for target, is_heard in zip(asked, heard, strict=True) if not is_heard]


@dataclass(frozen=True, slots=True)
class _Checks:
    rank: int
    world_size: int
    local_rank: int
    store: Store
    backend: str
    limits: PreflightLimits
    progress: _PreflightProgress

    def run(self, master: str, port: int, report: Callable[[], None]) -> bool:
        backend = self.backend or ("nccl" if torch.cuda.is_available() else "gloo")
        device = own_device(self.local_rank) if backend == "nccl" else torch.device("cpu")
        name = Config.from_env().node_id or socket.gethostname()
        facts = collect_facts(self.rank, name, master, port, describe_device(device))
        self.store.set(f"facts-{self.rank}", json.dumps(asdict(facts)))
        present = self._meet()
        missed = unanswered(rank_facts for rank, rank_facts in present.items() if rank != self.rank)
        self.store.set(f"reached-{self.rank}", json.dumps(missed))
        healthy = self._agree(present)
        if self.rank in healthy and len(healthy) > 1:
            self._measure(healthy, present, backend, device)
        return self._conclude(report)

    def _meet(self) -> dict[int, RankFacts]:
        """Return the ranks that have come in time; rank 0 decides when that is over."""
        if self.rank == 0:
            began = time.monotonic()
            come = self._await([f"facts-{rank}" for rank in range(self.world_size)], self.limits.start)
            waited = time.monotonic() - began if self.progress.stopping.is_set() else self.limits.start
            present = [rank for rank, is_there in enumerate(come) if is_there]
            self.store.set("present", json.dumps(present))
        ranks: list[int] = decode_json(self._get("present", 2 * self.limits.start), list[int])
        facts: dict[int, RankFacts] = {rank: decode_json(self.store.get(f"facts-{rank}"), RankFacts) for rank in ranks}
        if self.rank == 0:
            self.progress.nodes += dict.fromkeys(rank_facts.node for rank_facts in facts.values())
            expected = LaunchedJob(
                self.world_size, launchers.ranks_per_node(os.environ), tuple(launchers.listed_nodes(os.environ))
            )
            self.progress.add("started", judge_absent(facts, expected, waited))
            self.progress.add("settings", judge_settings(facts))
            self.progress.add("interfaces", judge_interfaces(facts))
            self.progress.add("affinity", judge_affinity(facts))
        self.progress.present = facts
        self.progress.met.set()
        self._stay_if_stopping()
        return facts

    def _agree(self, present: Mapping[int, RankFacts]) -> list[int]:
        """Return the ranks that answer, and that nobody misses."""
        if self.rank == 0:
            seconds = 2 * _ANSWER_SECONDS * (1 + len(present) // _THREADS)
            said = self._await([f"reached-{rank}" for rank in present], seconds)
            self._stay_if_stopping()
            unreached = {
                rank: decode_json(self.store.get(f"reached-{rank}"), list[int]) if has_said else None
                for rank, has_said in zip(present, said, strict=True)
            }
            self.progress.add("reachability", judge_reached(present, unreached))
            silent = {rank for rank, missed in unreached.items() if missed is None}
            healthy = _all_connected({rank: missed or [] for rank, missed in unreached.items() if rank not in silent})
            self.store.set("healthy", json.dumps(healthy))
        return decode_json(self._get("healthy", self.limits.total), list[int])

    def _measure(
        self, healthy: Sequence[int], present: Mapping[int, RankFacts], backend: str, device: torch.device
    ) -> None:
        """Measure bandwidth and devices among the ranks that answer."""
        try:
            job = self._join(healthy, present, backend, device)
            rates = self._rate_devices(job)
            within, between = self._measure_network(job)
        except (RuntimeError, ValueError, BenchmarkError) as error:
            self._note_failure(healthy, present, error)
            return
        if self.rank == 0:
            by_rank = dict(zip(healthy, rates, strict=True))
            self.progress.add("device speed", judge_devices(present, by_rank, device.type))
            if within:
                self.progress.add("bandwidth within nodes", judge_within_nodes(within))
            if between:
                links = NetworkBaseline({}, tuple(between)).links()
                self.progress.add("bandwidth between nodes", judge_links(find_slow_links(links)))

    def _join(
        self, healthy: Sequence[int], present: Mapping[int, RankFacts], backend: str, device: torch.device
    ) -> BenchmarkJob:
        limit = timedelta(seconds=self.limits.network)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self.store),
            rank=list(healthy).index(self.rank),
            world_size=len(healthy),
            timeout=limit,
        )
        control = dist.new_group(backend="gloo", timeout=limit)
        nodes = tuple(present[rank].node for rank in healthy)
        return BenchmarkJob(dist.get_rank(), nodes, backend, device, device_name(device), control)

    def _rate_devices(self, job: BenchmarkJob) -> list[float]:
        dtype = "bfloat16" if job.device.type == "cuda" else "float32"
        (rate,) = measure_matmul([_SHAPES[job.device.type]], job.device, dtype, 5, 20)
        return job.gather(rate.median)

    def _measure_network(self, job: BenchmarkJob) -> tuple[list[Measurement], list[Measurement]]:
        """Return measurements within nodes, and of pairs of nodes."""
        measured = []
        counts = [job.nodes.count(node) for node in job.nodes]
        for word, is_there in (("node", max(counts) > 1), ("pairs", len(set(job.nodes)) > 1)):
            results = Results({})
            if is_there:
                rounds = choose_groups(word, job.nodes)
                each = min(_MEASURE_SECONDS, self.limits.network) / len(rounds)
                settings = Settings(("all_reduce",), (_PAYLOAD[job.backend],), 2, 10, seconds=each)
                measure_collectives(job, rounds, settings, results)
            measured.append(results.measurements)
        return measured[0], measured[1]

    def _note_failure(self, healthy: Sequence[int], present: Mapping[int, RankFacts], error: Exception) -> None:
        """Name the ranks that no longer answer; without any, what the network said."""
        if self.rank != 0:
            return
        gone = unanswered(present[rank] for rank in healthy if rank != 0)
        for rank in gone:
            text = f"rank {rank} stopped answering while bandwidth was measured"
            self.progress.findings.append(PreflightFinding("bandwidth", (present[rank].node,), text))
        if not gone:
            text = f"bandwidth could not be measured: {first_line(error)}"
            self.progress.findings.append(PreflightFinding("bandwidth", (), text))

    def _conclude(self, report: Callable[[], None]) -> bool:
        """Return whether the verdict of rank 0 is good."""
        if self.rank == 0:
            self.progress.last_words.acquire()  # never released: a verdict is said once
            report()
            good = not self.progress.findings
            self.store.set("good", str(int(good)))
            keys = [f"done-{rank}" for rank in range(1, self.world_size)]
            self._await(keys, _ANSWER_SECONDS)  # the store may end with this process
            return good
        good = self._get("good", self.limits.total) == b"1"
        self.store.set(f"done-{self.rank}", "")
        return good

    def _stay_if_stopping(self) -> None:
        """Never return once a signal has come: its thread ends this process, and ranks may yet have answered."""
        if self.progress.stopping.is_set():
            threading.Event().wait()

    def _get(self, key: str, seconds: float) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise BenchmarkError(f"rank {self.rank}: rank 0 no longer answers; it said nothing of {key!r}") from error
        return bytes(self.store.get(key))

    def _await(self, keys: Sequence[str], seconds: float) -> list[bool]:
        """Wait until all keys are set, the time is over, or a signal comes; return which of them are set."""
        deadline = time.monotonic() + seconds
        while not self.progress.stopping.is_set() and not self.store.check(list(keys)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return [self.store.check([key]) for key in keys]


def _all_connected(unreached: Mapping[int, Sequence[int]]) -> list[int]:
    """Return ranks of which each reaches each other: those that miss most, or are missed most, are left out first."""
    left = set(unreached)
    while True:
        missing = dict.fromkeys(left, 0)
        for rank in left:
            for target in left.intersection(unreached[rank]):
                missing[rank] += 1
                missing[target] += 1
        worst = max(missing, key=lambda rank: (missing[rank], rank), default=None)
        if worst is None or not missing[worst]:
            return sorted(left)
        left.remove(worst)
