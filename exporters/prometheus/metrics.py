"""Totals of a rank over its steps, and the samples made of them: names, units and labels.

Labels are ``operation``, ``role`` and closed lists, never a step, layer or size: a rank has at most 400 series.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from commtrace.exporters.prometheus.step_histogram import StepHistogram
from commtrace.findings.finding import LOST, SLOW, Finding
from commtrace.live.monitoring.waits import Split
from commtrace.live.rank import LiveRank
from commtrace.live.summary import DeviceMemory, MessageSummary, OperationSummary, StepSummary, trace_id
from commtrace.trace import schema

MOST_OPERATIONS: Final = 27
"""Pairs of operation and role with series of their own; later ones are added up as ``other``."""

MOST_MESSAGES: Final = 24
"""Triples of operation, nodes and size with series of their own; later ones are added up as ``other``."""

OTHER: Final = "other"
COUNTS: Final = ("tokens", "samples", "model_flops")


@dataclass(slots=True)
class OperationTotals:
    """One operation for one role. Times are ns."""

    count: int = 0
    num_bytes: int = 0
    duration_ns: int = 0
    exposed_ns: int = 0
    overlap_ratio: float | None = None
    busbw: float | None = None
    baseline_ratio: float | None = None

    def add(self, one: OperationSummary) -> None:
        self.count += one.count
        self.num_bytes += one.num_bytes
        self.duration_ns += one.duration_ns
        self.exposed_ns += one.exposed_ns
        self.overlap_ratio = one.overlap_ratio if one.overlap_ratio is not None else self.overlap_ratio
        self.busbw = one.busbw_bytes_per_second or self.busbw
        self.baseline_ratio = one.baseline_ratio or self.baseline_ratio


@dataclass(slots=True)
class MessageTotals:
    """Messages of one size, within or between nodes."""

    count: int = 0
    duration_ns: int = 0
    bus_bytes: float = 0.0

    def add(self, one: MessageSummary) -> None:
        self.count += one.count
        self.duration_ns += one.duration_ns
        self.bus_bytes += one.bus_bytes


@dataclass(slots=True)
class StepCounters:
    """Sums over all steps. The harvester adds and a scrape reads under ``lock``; training never takes it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    histogram: StepHistogram = field(default_factory=StepHistogram)
    duration_ns: int = 0
    compute_ns: dict[str, int] = field(default_factory=dict)
    bubble_ns: int = 0
    data_ns: int = 0
    checkpoint_ns: int = 0
    gc_ns: int = 0
    between_ns: int = 0
    other_ns: int = 0
    work_ns: int = 0
    launch_bound_ns: dict[str, int] = field(default_factory=dict)  # empty while it is not known
    operations: dict[tuple[str, str], OperationTotals] = field(default_factory=dict)
    messages: dict[tuple[str, str, str], MessageTotals] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    last: StepSummary | None = None
    mfu: float | None = None  # of the latest step with one
    device: DeviceMemory | None = None  # as of the last step; None without an accelerator

    def add(self, summary: StepSummary) -> None:
        with self.lock:
            self.histogram.add(summary)
            self.duration_ns += summary.duration_ns
            for phase, time in summary.compute_ns.items():
                self.compute_ns[phase] = self.compute_ns.get(phase, 0) + time
            self.bubble_ns += summary.bubble_ns
            self.data_ns += summary.data_ns
            self.checkpoint_ns += summary.checkpoint_ns
            self.gc_ns += summary.gc_ns
            self.between_ns += summary.between_ns
            self.other_ns += summary.other_ns
            self.work_ns += summary.work_ns
            for phase, time in (summary.launch_bound_ns or {}).items():
                self.launch_bound_ns[phase] = self.launch_bound_ns.get(phase, 0) + time
            self._add_operations(summary.operations)
            self._add_messages(summary.messages)
            for name, number in summary.counts.items():
                self.counts[name] = self.counts.get(name, 0.0) + number
            self.last = summary
            self.mfu = summary.mfu if summary.mfu is not None else self.mfu
            if summary.device is not None:
                self.device = summary.device

    def _add_operations(self, operations: Iterable[OperationSummary]) -> None:
        for one in operations:
            key = (one.operation, one.role)
            if key not in self.operations and len(self.operations) >= MOST_OPERATIONS:
                key = (OTHER, OTHER)
            self.operations.setdefault(key, OperationTotals()).add(one)

    def _add_messages(self, messages: Iterable[MessageSummary]) -> None:
        for one in messages:
            key = (one.operation, one.nodes, one.up_to)
            if key not in self.messages and len(self.messages) >= MOST_MESSAGES:
                key = (OTHER, OTHER, OTHER)
            self.messages.setdefault(key, MessageTotals()).add(one)


def _resident_bytes() -> int | None:
    """Return the resident memory of this process; None without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError, IndexError):
        return None  # not Linux


_NEVER_DROPPED: Final = frozenset({schema.KERNEL, schema.MEMORY})
_OPERATION: Final = ("operation", "role")
_MESSAGE: Final = ("operation", "nodes", "up_to")
_MOST_SLOW: Final = 3
_PAUSES: Final = ("checkpoint", "evaluation")


class RankCollector(Collector):
    """Collects the totals of a rank on the calling thread; with ``identity``, samples carry the labels of the rank."""

    def __init__(self, rank: LiveRank, totals: StepCounters, *, identity: bool = False) -> None:
        self._rank = rank
        self._totals = totals
        self._identity = identity

    def collect(self) -> Iterable[Metric]:
        """Return the present samples."""
        with self._totals.lock:
            families = [
                *self._of_steps(),
                *self._of_operations(),
                *self._of_messages(),
                *self._of_commtrace(),
                *self._of_monitor(),
            ]
        return [_labelled(family, self._rank.identity()) for family in families] if self._identity else families

    def describe(self) -> Iterable[Metric]:
        """Return nothing, as the samples depend on the run."""
        return ()

    def _of_steps(self) -> Iterator[Metric]:
        totals = self._totals
        yield self._step_duration()
        compute = CounterMetricFamily(
            "commtrace_compute_seconds", "Time in which the rank computed, by phase.", labels=["phase"]
        )
        for phase, spent in totals.compute_ns.items():
            compute.add_metric([phase], spent / 1e9)
        yield compute
        for name, spent, description in (
            ("bubble", totals.bubble_ns, "Stalls on pipeline neighbours, the transfers themselves included."),
            ("data", totals.data_ns, "Waiting for input."),
            ("checkpoint", totals.checkpoint_ns, "Saving checkpoints."),
            ("gc", totals.gc_ns, "Garbage collections of Python."),
            ("between", totals.between_ns, "Time between steps, beside input, checkpoints and evaluation."),
            ("other", totals.other_ns, "Time of steps that no span explains."),
            ("work", totals.work_ns, "Steps without waiting for others and without checkpoints: the rank's own time."),
        ):
            yield CounterMetricFamily(f"commtrace_{name}_seconds", description, spent / 1e9)
        if totals.launch_bound_ns:
            waited = CounterMetricFamily(
                "commtrace_launch_bound_seconds",
                "Time in which the device waited for its host to launch, by phase; an upper bound.",
                labels=["phase"],
            )
            for phase, spent in totals.launch_bound_ns.items():
                waited.add_metric([phase], spent / 1e9)
            yield waited
        yield from self._of_run()
        in_quiet_steps = dict(self._rank.own_cost.counts)
        for name in COUNTS:
            if name in totals.counts:
                counted = totals.counts[name] + in_quiet_steps.get(name, 0)
                yield CounterMetricFamily(f"commtrace_{name}", f"What the script counted: {name}.", counted)
        if totals.mfu is not None:
            yield GaugeMetricFamily("commtrace_mfu_ratio", "Model FLOPs utilisation of the last step.", totals.mfu)
        yield from self._of_memory()
        if totals.last is not None:
            yield GaugeMetricFamily("commtrace_last_step", "Number of the last complete step.", totals.last.step)
            yield GaugeMetricFamily(
                "commtrace_last_step_timestamp_seconds",
                "When the last complete step ended, epoch seconds.",
                self._rank.epoch_ns(totals.last.end_ns) / 1e9,
            )

    def _of_memory(self) -> Iterator[Metric]:
        if (device := self._totals.device) is not None:
            for name, description, held in (
                ("peak", "Most that torch's allocator has held for tensors.", device.peak_memory_bytes),
                ("allocated", "What torch's allocator holds for tensors.", device.memory_bytes),
                ("reserved", "What torch's allocator holds, with what is free in it.", device.reserved_bytes),
                (
                    "reserved_peak",
                    "Most that torch's allocator held, free or not.",
                    device.peak_reserved_bytes,
                ),
            ):
                yield GaugeMetricFamily(f"commtrace_device_memory_{name}_bytes", description, held)
        if (resident := _resident_bytes()) is not None:
            yield GaugeMetricFamily("commtrace_host_memory_bytes", "Resident memory of the process.", resident)

    def _of_run(self) -> Iterator[Metric]:
        goodput = self._rank.budget.goodput(time.monotonic_ns())
        if goodput is None:
            return
        run = CounterMetricFamily(
            "commtrace_run_seconds",
            "Wall time of the process until the end of its last step, by what it went to.",
            labels=["part"],
        )
        for part, seconds in self._rank.budget.seconds().items():
            run.add_metric([part], seconds)
        yield run
        yield GaugeMetricFamily(
            "commtrace_goodput_ratio", "Share of the process's wall time so far in training steps.", goodput
        )

    def _step_duration(self) -> HistogramMetricFamily:
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for bound, count, example in self._totals.histogram.buckets():
            name = str(bound) if bound < math.inf else "+Inf"
            if example is None:
                buckets.append((name, count))
                continue
            trace = f"{trace_id(example.run_id, example.step):032x}"
            ended = self._rank.epoch_ns(example.end_ns) / 1e9
            buckets.append((name, count, Exemplar({"trace_id": trace}, example.duration_ns / 1e9, ended)))
        return HistogramMetricFamily(
            "commtrace_step_duration_seconds", "Duration of steps.", buckets, self._totals.duration_ns / 1e9
        )

    def _of_operations(self) -> Iterator[Metric]:
        totals = self._totals.operations
        calls = CounterMetricFamily("commtrace_communication_operations", "Communications.", labels=_OPERATION)
        seconds = CounterMetricFamily(
            "commtrace_communication_seconds", "Time in flight, summed over calls; waiting included.", labels=_OPERATION
        )
        num_bytes = CounterMetricFamily(
            "commtrace_communication_bytes", "Bytes of the full tensors of all calls.", labels=_OPERATION
        )
        exposed = CounterMetricFamily(
            "commtrace_exposed_seconds",
            "Stalls of the rank for it; pipeline transfers are in commtrace_bubble_seconds.",
            labels=_OPERATION,
        )
        split = CounterMetricFamily(
            "commtrace_exposed_split_seconds",
            "Of the calls that the monitor compared between ranks: exposed waiting for the last one, and transfer.",
            labels=[*_OPERATION, "part"],
        )
        overlap = GaugeMetricFamily(
            "commtrace_communication_overlap_ratio",
            "Share of the time in flight that was hidden, of the last step that had any.",
            labels=_OPERATION,
        )
        busbw = GaugeMetricFamily(
            "commtrace_communication_busbw_bytes_per_second",
            "Effective bus bandwidth of the last step that had any; waiting lowers it.",
            labels=_OPERATION,
        )
        baseline = GaugeMetricFamily(
            "commtrace_communication_baseline_ratio",
            "Time at the baseline over time in flight, of the last step with calls that it has; waiting lowers it.",
            labels=_OPERATION,
        )
        for (operation, role), one in totals.items():
            _add(calls, (operation, role), one.count)
            _add(seconds, (operation, role), one.duration_ns / 1e9)
            _add(num_bytes, (operation, role), one.num_bytes)
            _add(exposed, (operation, role), one.exposed_ns / 1e9)
            _add(overlap, (operation, role), one.overlap_ratio)
            _add(busbw, (operation, role), one.busbw)
            _add(baseline, (operation, role), one.baseline_ratio)
        for labels, known in self._split().items():
            split.add_metric([*labels, "wait"], known.wait_ns / 1e9)
            split.add_metric([*labels, "transfer"], known.transfer_ns / 1e9)
        yield from (calls, seconds, num_bytes, exposed, split, overlap, busbw, baseline)

    def _of_messages(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(
            "commtrace_message_operations",
            "Communications by size (up to so many bytes), and by whether all ranks are on one node.",
            labels=_MESSAGE,
        )
        seconds = CounterMetricFamily(
            "commtrace_message_seconds", "Time in flight of these calls; waiting included.", labels=_MESSAGE
        )
        bus_bytes = CounterMetricFamily(
            "commtrace_message_bus_bytes", "Their bytes times the bus factor of nccl-tests.", labels=_MESSAGE
        )
        for labels, one in self._totals.messages.items():
            calls.add_metric(labels, one.count)
            seconds.add_metric(labels, one.duration_ns / 1e9)
            bus_bytes.add_metric(labels, one.bus_bytes)
        yield from (calls, seconds, bus_bytes)

    def _split(self) -> Mapping[tuple[str, str], Split]:
        """Return wait and transfer by operation and role; pairs without a series of their own are added up."""
        found: dict[tuple[str, str], Split] = {}
        for key, known in self._rank.split.items():
            sums = found.setdefault(key if key in self._totals.operations else (OTHER, OTHER), Split())
            sums.wait_ns += known.wait_ns
            sums.transfer_ns += known.transfer_ns
        return found

    def _of_commtrace(self) -> Iterator[Metric]:
        rank = self._rank
        yield GaugeMetricFamily(
            "commtrace_exported_timestamp_seconds",
            "When these samples were made, epoch seconds: a file for node-exporter may outlive its rank.",
            time.time(),
        )
        yield CounterMetricFamily("commtrace_spans", "Spans recorded.", rank.spans)
        dropped = CounterMetricFamily("commtrace_spans_dropped", "Spans that had to be dropped.", labels=["kind"])
        # From the start and for every kind: a counter that appears with its first drop has not increased.
        for code, kind in enumerate(schema.KINDS):
            if code not in _NEVER_DROPPED:
                dropped.add_metric([kind], rank.dropped.get(kind, 0))
        yield dropped
        yield CounterMetricFamily(
            "commtrace_overhead_seconds", "CPU time of commtrace's own thread.", rank.overhead_ns / 1e9
        )
        if (cost := rank.own_cost.cost) is not None:
            yield GaugeMetricFamily(
                "commtrace_recording_cost_ratio",
                "What recording costs, as a share of a step, from steps that were not recorded.",
                cost.share,
            )
            yield GaugeMetricFamily(
                "commtrace_recording_cost_error_ratio",
                "Half of the 95 % interval of commtrace_recording_cost_ratio.",
                cost.error_share,
            )
        yield GaugeMetricFamily(
            "commtrace_communications_in_flight",
            "Communications under way since before the last look at them.",
            len(rank.marks.in_flight),
        )
        offset_ns, residual_ns = rank.clock()
        yield GaugeMetricFamily(
            "commtrace_clock_offset_seconds",
            "By how much the wall clock has been moved against the monotonic clock since the recording began.",
            offset_ns / 1e9,
        )
        yield GaugeMetricFamily(
            "commtrace_clock_residual_seconds",
            "How well the monotonic clock is tied to the wall clock: half the bracket of the newest reading.",
            residual_ns / 1e9,
        )

    def _of_monitor(self) -> Iterator[Metric]:
        """Yield the run, hangs and pauses of this process and, where the monitor joins the ranks, its findings."""
        metadata = self._rank.metadata
        about_run = {
            "directory": str(self._rank.directory.absolute()),
            "attempt": str(metadata.attempt),
            "version": metadata.versions.get("commtrace", ""),
        }
        info = GaugeMetricFamily("commtrace_run_info", "1; where the files of the run are.", labels=list(about_run))
        info.add_metric(list(about_run.values()), 1)
        yield info
        yield GaugeMetricFamily("commtrace_world_size", "Ranks of the job.", metadata.world_size)
        yield GaugeMetricFamily("commtrace_attempt", "Launches of the job before this one.", metadata.attempt)
        phase = self._rank.phase()
        pauses = GaugeMetricFamily(
            "commtrace_open_phase", "1 while the rank is in it: no step ends meanwhile.", labels=["phase"]
        )
        for known in _PAUSES:
            pauses.add_metric([known], phase == known)
        yield pauses
        yield GaugeMetricFamily(
            "commtrace_hung", "1 while this process has made no progress for too long.", self._rank.hang() is not None
        )
        if self._rank.is_in_unknown_stage:
            yield GaugeMetricFamily(
                "commtrace_unknown_stage",
                "1 in a pipeline while it is not known which ranks do the same work; absent elsewhere.",
                1,
            )
        if self._rank.score is not None:
            yield GaugeMetricFamily(
                "commtrace_straggler_score_ratio",
                "Own work per step by what is typical of the ranks of its stage, as the monitor compared them.",
                self._rank.score,
            )
        if not self._rank.joins:
            return
        findings = self._rank.findings
        slow = [finding for finding in findings if finding.kind == SLOW][:_MOST_SLOW]
        yield from _findings([*slow, *(finding for finding in findings if finding.kind == LOST)])


def _findings(findings: Iterable[Finding]) -> Iterator[Metric]:
    """Yield the cost and the begin of each, as the monitor found it; of alike labels, the costliest."""
    names = ["kind", "place", "cause", "finding_rank"]
    cost = GaugeMetricFamily(
        "commtrace_finding_cost_seconds",
        "What a finding costs in every step: of kind slow the costliest few, of kind lost each cause.",
        labels=names,
    )
    step = GaugeMetricFamily("commtrace_finding_since_step", "The first step in which it was slow.", labels=names)
    since = GaugeMetricFamily(
        "commtrace_finding_since_timestamp_seconds", "When that step began, epoch seconds.", labels=names
    )
    costliest: dict[tuple[str, str, str, str], Finding] = {}
    for finding in findings:
        # Two links of a rank have the same ones.
        rank = str(finding.rank) if finding.ranks else ""
        costliest.setdefault((finding.kind, finding.place, finding.cause, rank), finding)
    for labels, finding in costliest.items():
        cost.add_metric(list(labels), (finding.cost_ns or 0.0) / 1e9)
        if finding.since_ns is not None:
            since.add_metric(list(labels), finding.since_ns / 1e9)
        if finding.since_step >= 0:
            step.add_metric(list(labels), finding.since_step)
    yield from (cost, step, since)


def _add(family: CounterMetricFamily | GaugeMetricFamily, labels: tuple[str, str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)


def _labelled(family: Metric, identity: Mapping[str, str]) -> Metric:
    family.samples = [
        Sample(one.name, {**identity, **one.labels}, one.value, one.timestamp, one.exemplar) for one in family.samples
    ]
    return family
