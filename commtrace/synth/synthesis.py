"""Turn a simulated job into a recording, and into the truth about it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import structs

from commtrace.errors import ConfigurationError
from commtrace.synth.faults import (
    CAUSES,
    LONG_MICROBATCH,
    OF_HOSTS,
    PLACES,
    SEQUENCE_IMBALANCE,
    SLOW_LINK,
    SLOW_SEND,
    UNEVEN_STAGE,
    Fault,
)
from commtrace.synth.job import FREE, PERFECT, Job, SimulatedClock, SimulatedLayout
from commtrace.synth.rows import NAMES, NO_LEAD, ROLES, StageColumns
from commtrace.synth.simulation import SimulatedSteps, simulate
from commtrace.trace import schema
from commtrace.trace.files.rank_files import RANK_DIRECTORY_PATTERN
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.metadata import ClockAnchor, RankMetadata
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schedule import idle_ns
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN, Bool, Int64, Spans
from commtrace.trace.topology import Topology, without_place

_LATE_NS: Final = 5_000_000.0
"""Mean lateness of an outlier."""

_RECORD_NS: Final = 6_000.0
_RECORD_SCATTER_NS: Final = 2_000.0
"""How long a device that has nothing queued takes to pass an event, at least, and the scatter of that."""

_AS_IS: Final = (
    "kind", "name", "lane", "step", "microbatch", "chunk", "stage", "seq", "dtype", "is_async", "id", "stalled_on",
    "timing", "start_exact", "end_exact",
)  # fmt: skip
TRUTH_FILE: Final = "truth.json"

_THREADS: Final = 2
"""Compression releases the GIL; more threads would not help."""


@dataclass(frozen=True)
class Synthetic:
    """The recording of a simulated job, and the truth about it."""

    job: Job
    _layout: SimulatedLayout
    _steps: SimulatedSteps
    _stages: tuple[StageColumns, ...]
    _group_ids: Int64
    _launch_bound_ns: Mapping[str, Int64]

    @cached_property
    def truth(self) -> dict[str, Any]:
        """Return the truth (docs/synthetic-runs.md): the job is simulated anew without each of its faults."""
        truth = _truth(self.job, self._layout, self._steps, self.step_without_faults_ns)
        return {**truth, "launch_bound": _launch_bound(self._launch_bound_ns)}

    @property
    def mean_step_ns(self) -> int:
        return self._steps.mean_ns

    @cached_property
    def step_without_faults_ns(self) -> int:
        """Return the mean length of a step of the same job without its faults, ns."""
        return _mean_step_ns(replace(self.job, faults=())) if self.job.faults else self.mean_step_ns

    @property
    def names(self) -> list[str]:
        """Return the names by their codes, equal for all ranks."""
        return list(NAMES)

    @property
    def run(self) -> Run:
        """Return the recording of all ranks."""
        ranks = {rank: self.rank_trace(rank) for rank in range(self.job.world_size)}
        return Run(path=Path("synthetic-run"), ranks=ranks, names=self.names)

    def rank_trace(self, rank: int) -> RankTrace:
        """Return the recording of one rank as the reader would return it."""
        metadata = self.metadata(rank)
        spans, dropped = self._recorded(rank)
        return RankTrace(
            metadata=metadata,
            spans=spans.take(np.lexsort((-spans.end, spans.start))),
            groups=self._layout.groups_of(rank),
            coordinates=self._layout.coordinates(rank),
            parallel=self._layout.parallel(),
            topology=without_place(self.topology(rank)),
            dropped=dropped,
            anchors=self._anchors(rank),
        )

    def topology(self, rank: int) -> Topology:
        """Return the topology that the integration of Megatron would record."""
        return {
            "coordinates": self._layout.coordinates(rank),
            "parallel": self._layout.parallel(),
            "framework": {"name": "megatron-core", "version": "synthetic"},
            "schedule": self.job.order,
            "stages": self.job.pp,
            "chunks": self.job.chunks,
            "microbatches": self.job.microbatches,
            "ranks_per_node": self.job.gpus_per_host,
        }

    def metadata(self, rank: int) -> RankMetadata:
        node = _node(self._layout.host(rank))
        return RankMetadata(
            run_id="synthetic",
            attempt=0,
            session=1,
            rank=rank,
            local_rank=rank % self.job.gpus_per_host,
            world_size=self.job.world_size,
            host=node,
            node=node,
            boot_id=f"boot-of-{node}",
            pid=1000 + rank,
            backend="nccl",
            device="simulated device",
            device_uuid=f"simulated-{rank}",
            versions={"commtrace": "synthetic"},
            anchor=self._anchors(rank)[0],
        )

    def _clock(self, rank: int) -> SimulatedClock:
        return self.job.clocks.get(self._layout.host(rank), PERFECT)

    def _anchors(self, rank: int) -> tuple[ClockAnchor, ...]:
        last_ns = int(self._steps.end[-1].max())
        return self._clock(rank).anchors(self.job.start_ns, max(last_ns, self.job.start_ns))

    def _recorded(self, rank: int) -> tuple[Spans, dict[str, int]]:
        """Return a rank's rows in program order, on its host's clock, and the number of missing communications."""
        stage, position = divmod(rank, self._layout.ranks_per_stage)
        columns = self._stages[stage]
        random = np.random.default_rng([self.job.seed, 3, rank])
        kept, dropped = self._kept(columns, columns.recorded(position), random)
        clock = self._clock(rank)
        common = {name: values[kept] for name, values in columns.common.items()}
        end = self._late(common, columns.end[position][kept], random)
        role = common["role"]
        leads = np.random.default_rng([self.job.seed, 4, rank])
        peer = np.where(common["peer"] >= 0, common["peer"] * self._layout.ranks_per_stage + position, -1)
        wanted = {
            **{name: common[name] for name in _AS_IS},
            "start": clock.read(columns.start[position][kept]),
            "end": clock.read(end),
            "group": np.where(role > 0, self._group_ids[role, rank], -1),
            "bytes": common["num_bytes"],
            "peer": peer,
            "op_in_seq": np.zeros(len(role), np.int32),
            "self_bytes": np.full(len(role), -1, np.int64),
            "start_lead_us": self._recorded_leads(columns.start_lead[position][kept], leads),
            "end_lead_us": self._recorded_leads(columns.end_lead[position][kept], leads),
        }
        return Spans(**{name: wanted[name].astype(dtype) for name, dtype in DTYPE_OF_COLUMN.items()}), dropped

    def _recorded_leads(self, lead_ns: Int64, random: np.random.Generator) -> Int64:
        """Return leads as they are recorded, µs: with the time that an event takes, and the error of an anchor."""
        taken = _RECORD_NS + np.abs(random.normal(0.0, _RECORD_SCATTER_NS, len(lead_ns)))
        lead_us = np.clip((lead_ns + taken) / 1e3, schema.LEAST_LEAD_US, schema.MOST_LEAD_US).astype(np.int64)
        return np.where(lead_ns == NO_LEAD, schema.UNKNOWN_LEAD, lead_us)

    def _kept(self, columns: StageColumns, recorded: Bool, random: np.random.Generator) -> tuple[Bool, dict[str, int]]:
        if not self.job.missing:
            return recorded, {}
        kind = columns.common["kind"]
        lost = recorded & np.isin(kind, (schema.COLLECTIVE, schema.P2P)) & (random.random(len(kind)) < self.job.missing)
        counts = {"collective": (lost & (kind == schema.COLLECTIVE)).sum(), "p2p": (lost & (kind == schema.P2P)).sum()}
        return recorded & ~lost, {name: int(count) for name, count in counts.items() if count}

    def _late(self, common: dict[str, Int64], end: Int64, random: np.random.Generator) -> Int64:
        if not self.job.outliers:
            return end
        late = (common["kind"] == schema.COLLECTIVE) & (random.random(len(end)) < self.job.outliers)
        by = np.rint(random.exponential(_LATE_NS, len(end))).astype(np.int64)
        return np.asarray(np.where(late, end + by, end))


def synthesize(job: Job) -> Synthetic:
    """Simulate a job."""
    simulated = simulate(job)
    layout = SimulatedLayout.of(job)
    ids = np.full((len(ROLES), job.world_size), -1, np.int64)
    for role in layout.members:
        ids[ROLES.index(role)] = layout.group_ids(role)
    stages = tuple(rows.finished() for rows in simulated.stages)
    return Synthetic(job, layout, simulated.steps, stages, ids, simulated.launch_bound_ns)


def _truth(job: Job, layout: SimulatedLayout, steps: SimulatedSteps, mean_without: int) -> dict[str, Any]:
    start, end, mean = steps.start.min(axis=1), steps.end.max(axis=1), steps.mean_ns
    numbers = range(len(job.faults))
    means_without_one = (
        [mean_without] if len(numbers) == 1 else [_mean_step_ns(_without(job, number)) for number in numbers]
    )
    return {
        "job": job.to_json(),
        "world_size": job.world_size,
        "hosts": [_host(job, host) for host in range(job.hosts)],
        "steps": [
            {"step": step, "start_ns": int(begin), "end_ns": int(last), "duration_ns": int(last - begin)}
            for step, (begin, last) in enumerate(zip(start, end, strict=True))
        ],
        "ideal": {
            "pipeline_ns": _ideal_pipeline_ns(job),
            "step_without_faults_ns": mean_without,
            "step_without_faults_and_jitter_ns": _mean_step_ns(_exact(job)),
            "step_without_communication_ns": _mean_step_ns(replace(_exact(job), network=FREE)),
        },
        "mean_step_ns": mean,
        "faults": [
            {
                **fault.to_json(),
                "ranks": _guilty(job, layout, fault),
                "place": _place(fault),
                "cause": CAUSES[fault.kind],
                "cost_ns_per_step": mean - without,
            }
            for fault, without in zip(job.faults, means_without_one, strict=True)
        ],
    }


def _ideal_pipeline_ns(job: Job) -> int | None:
    """Return the forwards and backwards of a step and the bubble by formula; None where no formula holds."""
    idle = idle_ns(job.order, job.pp, job.forward_ns, job.backward_ns, job.weight_ns)
    return None if idle is None else job.chunks * job.microbatches * (job.forward_ns + job.backward_ns) + idle


def _place(fault: Fault) -> str:
    if fault.kind in (SLOW_LINK, SLOW_SEND) and len(fault.where) == 1:
        return "ranks"  # all links of a rank
    return PLACES.get(fault.kind, "ranks")


def _guilty(job: Job, layout: SimulatedLayout, fault: Fault) -> list[int]:
    """Return the ranks of a fault: both ends of a link, all of a host, stage or replica; none if it moves."""
    if fault.kind in (SEQUENCE_IMBALANCE, LONG_MICROBATCH) and len(fault.where) < 2:
        return []
    if fault.kind == LONG_MICROBATCH:
        return [rank for rank in range(job.world_size) if layout.coordinates(rank)["dp"] == fault.where[1]]
    if fault.kind == UNEVEN_STAGE:
        return [rank for rank in range(job.world_size) if rank // layout.ranks_per_stage in fault.where]
    if fault.kind in OF_HOSTS:
        return [rank for rank in range(job.world_size) if layout.host(rank) in fault.where]
    return sorted(fault.where)


def _launch_bound(ns: Mapping[str, Int64]) -> list[dict[str, object]]:
    """Return, of each rank whose device waited for its host, ns by phase and step."""
    waited = np.stack([*ns.values()]).sum(axis=(0, 1))
    return [
        {"rank": rank, **{f"{phase}_ns": ns_of_step[:, rank].tolist() for phase, ns_of_step in ns.items()}}
        for rank in np.flatnonzero(waited).tolist()
    ]


def _host(job: Job, host: int) -> dict[str, object]:
    clock = job.clocks.get(host, PERFECT)
    first = host * job.gpus_per_host
    return {
        "node": _node(host),
        "ranks": list(range(first, min(first + job.gpus_per_host, job.world_size))),
        "clock": {name: getattr(clock, name) for name in SimulatedClock.__slots__},
    }


def _node(host: int) -> str:
    return f"node{host}"


def _without(job: Job, number: int) -> Job:
    return replace(job, faults=tuple(fault for index, fault in enumerate(job.faults) if index != number))


def _exact(job: Job) -> Job:
    # Two steps: all ranks enter the first one at the same time.
    return replace(job, faults=(), jitter=0.0, wander=0.0, end_scatter_ns=0, steps=2)


def _mean_step_ns(job: Job) -> int:
    return simulate(job).steps.mean_ns


def write(
    synthetic: Synthetic,
    directory: Path,
    ranks: Iterable[int] | None = None,
    progress: Callable[[int], object] = lambda num_spans: None,
) -> int:
    """Write the run and ``truth.json`` into a new directory, and return the number of spans.

    Args:
        ranks: write only these, as if the files of the others were lost.
        progress: called after each rank with its number of spans.

    Raises:
        ConfigurationError: a run is there already.
    """
    if directory.is_dir() and any(RANK_DIRECTORY_PATTERN.match(child.name) for child in directory.iterdir()):
        raise ConfigurationError(f"{directory} holds a run already. Give another directory, or delete that one.")
    directory.mkdir(parents=True, exist_ok=True)
    session, run_id = time.time_ns(), directory.resolve().name
    (directory / TRUTH_FILE).write_text(json.dumps(synthetic.truth, indent=1, allow_nan=False) + "\n")
    wanted = range(synthetic.job.world_size) if ranks is None else sorted(ranks)
    with ThreadPoolExecutor(_THREADS) as pool:
        total = 0
        for num_spans in pool.map(lambda rank: _write_rank(synthetic, directory, rank, session, run_id), wanted):
            total += num_spans
            progress(num_spans)
    return total


def _write_rank(synthetic: Synthetic, directory: Path, rank: int, session: int, run_id: str) -> int:
    trace = synthetic.rank_trace(rank)
    writer = SegmentWriter(directory, replace(trace.metadata, session=session, run_id=run_id))
    writer.write(_marks(synthetic, trace))
    writer.write_spans(trace.spans.take(np.argsort(trace.spans.step, kind="stable")), synthetic.names)
    writer.write([_mark("end", {})])
    writer.close()
    return len(trace.spans)


def _marks(synthetic: Synthetic, trace: RankTrace) -> list[Row]:
    dropped = [_mark("dropped", dict(trace.dropped))] if trace.dropped else []
    return [
        *(_mark("process_group", group.to_json()) for group in trace.groups.values()),
        _mark("topology", synthetic.topology(trace.rank)),
        *(_mark("clock_anchor", structs.asdict(anchor)) for anchor in trace.anchors[1:]),
        *dropped,
    ]


def _mark(name: str, detail: object) -> Row:
    return Row(schema.MARK, name, schema.HOST, 0, 0, detail=json.dumps(detail))
