"""The series of a simulated job, made by the exporter's own code and stored in a real Prometheus.

Steps of :mod:`commtrace.synth`, with a rank that becomes slow, are summed up as in a training process. An hour of them
is written as Prometheus would have scraped it (``promtool tsdb create-blocks-from``), and the recording rules are
evaluated over it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from unittest import mock

import numpy as np
from prometheus_client.samples import Sample

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.analysis.path_totals import PathTotals
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.exporters.prometheus import metrics
from commtrace.exporters.prometheus.critical_path import PathCollector
from commtrace.exporters.prometheus.metrics import RankCollector, StepCounters
from commtrace.findings.causes import JOB, PART_OF_LOSS
from commtrace.findings.finding import LOST, Finding, finding_id
from commtrace.live.collector import owners
from commtrace.live.gil import GilYield
from commtrace.live.monitoring.waits import Split
from commtrace.live.rank import LiveRank
from commtrace.live.summarise import StepExtras, SummaryInput, summarise
from commtrace.live.summary import DeviceMemory, StepSummary
from commtrace.synth import Fault, Job, Synthetic, synthesize
from commtrace.trace import schema
from commtrace.trace.metadata import ClockAnchor, RankMetadata
from commtrace.trace.schema import Row
from commtrace.trace.selection import StepRange
from tests.e2e.prometheus import PROGRAM, PROMTOOL, Prometheus
from tests.free_ports import free_port
from tests.live.findings import slow_finding
from tools.prometheus_rules import RecordingRule, Timing, recording_rules

SECOND = 1_000_000_000
SCRAPE_SECONDS = 15
RUN_ID = "simulated"
_PIECE_SCRAPES = 100
_DEVICE = DeviceMemory("NVIDIA H100 80GB HBM3", 60 * 2**30, 40 * 2**30, 62 * 2**30, 64 * 2**30)


BASELINE = NetworkBaseline(
    {"backend": "nccl"},
    tuple(
        Measurement(operation, tuple(range(size)), nodes, num_bytes, "bfloat16", 20, MeasuredSpread(*[time_ns] * 3))
        for operation in ("all_gather", "all_reduce", "reduce_scatter", "send")
        for size in (2, 4, 8, 32)
        for nodes in (("a",), ("a", "b"))
        for num_bytes, time_ns in ((1, 1e4), (2**40, 1e12))
    ),
)
"""Of every size that the job sends."""


@dataclass(frozen=True)
class Simulation:
    """A job that trains for so long, in which one rank becomes slower."""

    tp: int
    pp: int
    dp: int
    slow_rank: int
    factor: float = 1.5
    gpus_per_host: int = 8
    minutes: int = 75
    slow_minutes: int = 20  # at the end
    scrape_seconds: int = SCRAPE_SECONDS
    processes: int = 1  # that make the series
    rule_seconds: int = 5

    @property
    def job(self) -> Job:
        # Two steps as usual, and two with the slow rank.
        fault = Fault("slow-rank", (self.slow_rank,), self.factor, StepRange.parse("2:4"))
        return Job(
            tp=self.tp, pp=self.pp, dp=self.dp, microbatches=4, layers=self.pp, steps=4, forward_ns=800_000_000,
            backward_ns=1_600_000_000, optimizer_ns=300_000_000, data_ns=50_000_000, overlap_grad_reduce=True,
            faults=(fault,), gpus_per_host=self.gpus_per_host,
        )  # fmt: skip


@dataclass
class SimulatedRank:
    """A rank whose steps repeat those of the simulation."""

    live: LiveRank
    usual: Sequence[StepSummary]
    slow: Sequence[StepSummary]
    totals: StepCounters = field(default_factory=StepCounters)
    splits: dict[tuple[str, str], Split] = field(default_factory=dict)
    at_ns: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.live.split = self.splits

    def train_until(self, end_ns: int, slow_from_ns: int) -> None:
        """Complete the steps up to a time since the start."""
        while True:
            kinds = self.slow if self.at_ns >= slow_from_ns else self.usual
            one = kinds[self.step % len(kinds)]
            if self.at_ns + one.duration_ns > end_ns:
                return
            done = replace(one, step=self.step, start_ns=self.at_ns)
            self.totals.add(done)
            self.live.spans += one.spans
            self.live.overhead_ns += one.overhead_ns
            self.live.budget.add([Row(schema.STEP, "step", schema.COMPUTE, self.at_ns, done.end_ns)], {})
            for operation in one.operations:
                # The monitor that compares ranks is not simulated.
                split = self.splits.setdefault((operation.operation, operation.role), Split())
                split.wait_ns += operation.exposed_ns // 2
                split.transfer_ns += operation.exposed_ns // 4
            self.at_ns = done.end_ns
            self.step += 1


LOST_TIME: Final = tuple(
    Finding(id=finding_id(LOST, JOB, cause), kind=LOST, place=JOB, cause=cause, cost_ns=SECOND / 9)
    for cause in PART_OF_LOSS
)
"""What the monitor would say of the steps that it replays."""


def ranks_of(simulation: Simulation, start_seconds: float) -> Iterator[SimulatedRank]:
    """Yield every rank; its monotonic clock begins with the job."""
    synthetic = synthesize(simulation.job)
    for number in range(simulation.job.world_size):
        live = _live_rank(synthetic, number, start_seconds)
        if number == 0:
            live.joins = True
            live.findings = (slow_finding(simulation.slow_rank), *LOST_TIME)
        summaries = _summaries(synthetic, number, live)
        live.learn(Row(schema.MARK, "topology", schema.HOST, 0, 0, detail='{"process_start_ns": -120000000000}'))
        yield SimulatedRank(live, summaries[:2], summaries[2:])


def _live_rank(synthetic: Synthetic, number: int, start_seconds: float) -> LiveRank:
    anchor = ClockAnchor(0, round(start_seconds * SECOND), 200)
    live = LiveRank(replace(synthetic.metadata(number), run_id=RUN_ID, anchor=anchor), Path("/runs/simulated"))
    live.marks.topology = synthetic.topology(number)
    live.marks.groups = dict(synthetic.rank_trace(number).groups)
    live.split = {}
    live.baseline = BASELINE
    return live


def _summaries(synthetic: Synthetic, number: int, live: LiveRank) -> list[StepSummary]:
    spans = synthetic.rank_trace(number).spans
    steps = np.flatnonzero(spans.kind == schema.STEP)
    steps = steps[np.argsort(spans.end[steps])]
    window = SummaryInput(synthetic.names, spans, steps, owners(spans, steps), {})
    extras = StepExtras(100, 2_000_000, {}, {"tokens": 4096.0, "samples": 1.0, "model_flops": 4e15}, _DEVICE)
    told = summarise(window, live, [extras] * len(steps), GilYield())
    # No device was watched.
    return [replace(one, launch_bound_ns={phase: ns // 9 for phase, ns in one.compute_ns.items()}) for one in told]


class PathOfRun:
    """What ``commtrace metrics`` exports: another process, which reads files."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._totals = PathTotals(".")
        self._totals.run_id = RUN_ID
        self.collector = PathCollector(self._totals)

    def train_until(self, seconds: int) -> None:
        ranks = range(0, min(self._simulation.job.world_size, 128), 2)
        ns = SECOND * seconds // 128
        shares = (Share(rank, kind, "", ns, 0) for rank in ranks for kind in ("forward", "backward"))
        self._totals.path = CriticalPath(seconds // 10, tuple(shares))
        self._totals.last_step = seconds // 10
        part = SECOND * seconds // 8
        self._totals.lost = LostTime(seconds // 10, None, 7 * part, *[part] * 7)


def backfill(simulation: Simulation, directory: Path, end_seconds: int) -> None:
    """Store the samples of all scrapes up to ``end_seconds``, epoch, below ``directory / "data"``."""
    start = end_seconds - simulation.minutes * 60
    ranks = list(ranks_of(simulation, start))
    if simulation.processes == 1:
        _store(simulation, ranks, PathOfRun(simulation), directory / "scrapes.txt", start)
        return
    context = multiprocessing.get_context("fork")
    processes = []
    for number in range(simulation.processes):
        path = PathOfRun(simulation) if number == 0 else None
        text = directory / f"scrapes-{number}.txt"
        some = ranks[number :: simulation.processes]
        processes.append(context.Process(target=_store, args=(simulation, some, path, text, start)))
        processes[-1].start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _store(
    simulation: Simulation, ranks: Sequence[SimulatedRank], path: PathOfRun | None, text: Path, start: int
) -> None:
    collectors = [RankCollector(rank.live, rank.totals, identity=True) for rank in ranks]
    slow_from_ns = (simulation.minutes - simulation.slow_minutes) * 60 * SECOND
    prefixes: dict[tuple[str, ...], str] = {}
    times = range(simulation.scrape_seconds, simulation.minutes * 60 + 1, simulation.scrape_seconds)
    for first in range(0, len(times), _PIECE_SCRAPES):
        with text.open("w") as file:
            for seconds in times[first : first + _PIECE_SCRAPES]:
                now = SimpleNamespace(time=lambda at=start + seconds: at, monotonic_ns=lambda at=seconds: at * SECOND)
                with mock.patch.object(metrics, "time", now):
                    for rank, collector in zip(ranks, collectors, strict=True):
                        rank.train_until(seconds * SECOND, slow_from_ns)
                        samples = [one for family in collector.collect() for one in family.samples]
                        # Prometheus notices a rank with its target file, which comes with its first step.
                        if rank.step:
                            place = f"{rank.live.metadata.node}:{9400 + rank.live.metadata.local_rank}"
                            samples.append(Sample("up", rank.live.identity(), 1.0))
                            samples += dcgm_samples(rank.live.metadata)
                            file.writelines(_lines(samples, place, start + seconds, prefixes))
                if path is not None:
                    path.train_until(seconds)
                    found = [one for family in path.collector.collect() for one in family.samples]
                    file.writelines(_lines(found, "reader:9500", start + seconds, prefixes))
            file.write("# EOF\n")
        _promtool("tsdb", "create-blocks-from", "openmetrics", text, text.parent / "data")
        text.unlink()


def dcgm_samples(rank: RankMetadata) -> list[Sample]:
    """Return what dcgm-exporter on the rank's node says of its GPU, and of another one that the job does not use."""
    values = {
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.25 + rank.local_rank / 16,
        "DCGM_FI_PROF_SM_OCCUPANCY": 0.5,
        "DCGM_FI_DEV_GPU_UTIL": 100.0,
    }
    gpu = {"gpu": str(rank.local_rank), "UUID": f"GPU-{rank.rank}", "Hostname": rank.node}
    other = {**gpu, "Hostname": f"another-{rank.node}"}
    return [Sample(name, labels, value) for name, value in values.items() for labels in (gpu, other)]


def _lines(samples: Sequence[Sample], instance: str, now: int, prefixes: dict[tuple[str, ...], str]) -> Iterator[str]:
    for sample in samples:
        key = (sample.name, instance, *sample.labels.values())
        prefix = prefixes.get(key)
        if prefix is None:
            labels = {**sample.labels, "instance": instance, "job": "commtrace"}
            text = ",".join(f'{name}="{value}"' for name, value in labels.items())
            prefix = prefixes[key] = f"{sample.name}{{{text}}} "
        yield f"{prefix}{float(sample.value)!r} {now}\n"


def levels(rules: Sequence[RecordingRule]) -> list[list[RecordingRule]]:
    """Return the rules in groups, each of which uses only records of earlier ones."""
    depth: dict[str, int] = {}
    for rule in rules:
        depth[rule.record] = max((1 + depth[name] for name in depth if name in rule.expr), default=0)
    key = sorted(rules, key=lambda rule: depth[rule.record])
    return [list(group) for _, group in itertools.groupby(key, key=lambda rule: depth[rule.record])]


def record(simulation: Simulation, directory: Path, server: Prometheus, end_seconds: int) -> None:
    """Evaluate the recording rules over the time of the job, as Prometheus would have every few seconds."""
    start = end_seconds - simulation.minutes * 60
    for number, rules in enumerate(levels(recording_rules(Timing()))):
        path = directory / f"level-{number}.yml"
        path.write_text(_group_of(rules))
        _promtool(
            "tsdb", "create-blocks-from", "rules", f"--start={start}", f"--end={end_seconds}",
            f"--eval-interval={simulation.rule_seconds}s", f"--url={server.url}",
            f"--output-dir={directory / 'data'}", path,
        )  # fmt: skip
        server.stop()
        server.start()


def _group_of(rules: Sequence[RecordingRule]) -> str:
    lines = ["groups:", "  - name: recorded", "    rules:"]
    for rule in rules:
        lines += [f"      - record: {rule.record}", "        expr: |-"]
        lines += [f"          {line}" for line in rule.expr.splitlines()]
        if rule.labels:
            lines += ["        labels:", *(f"          {name}: {value}" for name, value in rule.labels.items())]
    return "\n".join(lines) + "\n"


def _promtool(*arguments: str | Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def stored(simulation: Simulation, directory: Path, end_seconds: int) -> Iterator[Prometheus]:
    """Run a Prometheus that has the series of the job, up to ``end_seconds``, and what the rules record of them."""
    assert PROGRAM is not None
    assert shutil.disk_usage(directory).free > 10 * 2**30 or simulation.job.world_size < 256
    backfill(simulation, directory, end_seconds)
    (directory / "prometheus.yml").write_text("global: {}\n")
    server = Prometheus(directory, free_port(), ["--query.max-samples=200000000", "--storage.tsdb.retention.time=10y"])
    server.start()
    try:
        record(simulation, directory, server, end_seconds)
        yield server
    finally:
        server.stop()
