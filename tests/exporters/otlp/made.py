"""A job of made ranks: what each of them hands to the exporter in a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from commtrace.exporters.otlp.exporter import OtlpExporter
from commtrace.exporters.otlp.queue import ExportedStep, SpanFilter
from commtrace.exporters.otlp.spans import SpanMaker
from commtrace.live.monitoring.job_steps import JobStep
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.trace import schema
from commtrace.trace.metadata import ClockAnchor, Group
from commtrace.trace.schema import Row
from tests.factory import group
from tests.trace.rows import mark, metadata, row

RUN, WORLD_SIZE = "r1", 4
EPOCH_NS = 1_700_000_000_000_000_000
STEP_NS = 1_000
SECONDS = 60.0

PIPELINES = (group("pp", 0, 2), group("pp", 1, 3))
REPLICAS = (group("dp", 0, 1), group("dp", 2, 3))
WORLD = group("world", *range(WORLD_SIZE))
RESOURCE = Resource({"service.name": "test"})


def live_rank(number: int, directory: Path = Path("run"), groups: Sequence[Group] = ()) -> LiveRank:
    """Two stages of two replicas, monotonic 0 is the epoch of the test."""
    described = metadata(rank=number, world_size=WORLD_SIZE, anchor=ClockAnchor(0, EPOCH_NS, 40), run_id=RUN)
    live = LiveRank(described, directory)
    for one in (*PIPELINES, *REPLICAS, WORLD, *groups):
        if number in one.ranks:
            live.learn(mark("process_group", one.to_json()))
    stage, replica = divmod(number, 2)
    parallel = {"tp": 1, "pp": 2, "dp": 2}
    live.learn(mark("topology", {"coordinates": {"tp": 0, "pp": stage, "dp": replica}, "parallel": parallel}))
    return live


def summary(rank: int, step: int, **changes: Any) -> StepSummary:
    parts: dict[str, Any] = {
        "compute_ns": {"forward": 300, "backward": 400},
        "exposed_ns": {"dp": 200},
        "other_ns": 100,
    }
    return StepSummary(RUN, rank, step, STEP_NS * step, STEP_NS, **{**parts, **changes})


def step_rows(rank: int, step: int) -> list[Row]:
    """A step: forward, a message over the pipeline, backward with a module in it, the gradients of the replicas."""
    base, number = STEP_NS * step, step * 10
    pipeline = next(one for one in PIPELINES if rank in one.ranks)
    replicas = next(one for one in REPLICAS if rank in one.ranks)
    sends = rank < 2
    where = {"step": step, "microbatch": 0, "chunk": 0, "stage": int(not sends)}
    on_wire = {"lane": schema.COMMUNICATION, "bytes": 4_096, "dtype": "float32", "op_in_seq": 0, **where}
    gradients = {"name": "all_reduce", "group": replicas.id, "seq": step, "op_in_seq": 0}
    return [
        row(kind=schema.STEP, name="step", step=step, start=base, end=base + STEP_NS),
        row(kind=schema.FORWARD, name="forward", start=base, end=base + 300, **where),
        row(
            kind=schema.P2P, name="send" if sends else "recv", group=pipeline.id, seq=step, peer=(rank + 2) % 4,
            start=base + 300, end=base + 320, id=number, **on_wire,
        ),
        row(kind=schema.BACKWARD, name="backward", start=base + 320, end=base + 720, **where),
        row(kind=schema.MODULE, name="layers.3.mlp backward", start=base + 330, end=base + 400, **where),
        row(
            kind=schema.COLLECTIVE, start=base + 720, end=base + 920, id=number + 1, is_async=True,
            **{**on_wire, **gradients},
        ),
        row(kind=schema.STALL, start=base + 720, end=base + 920, stalled_on=number + 1, **gradients, **where),
        row(kind=schema.DATA, name="next batch", lane=schema.HOST, start=base + 930, end=base + 990, step=step),
    ]  # fmt: skip


def own_job_step(one: Row) -> JobStep:
    """A step of the job as the rank knows it that sends its span, without a monitor."""
    return JobStep(one.step, 0, EPOCH_NS + one.start, EPOCH_NS + one.end, 1)


def spans_of(
    live: LiveRank, rows: Sequence[Row], step: int = 0, span_filter: SpanFilter | None = None, **changes: Any
) -> list[ReadableSpan]:
    """The spans that a rank makes of these rows."""
    chosen = span_filter or SpanFilter("modules", world_size=WORLD_SIZE)
    exported = ExportedStep(
        summary=summary(live.rank, step),
        rows=chosen.rows(rows, step),
        job_steps=[own_job_step(one) for one in rows if one.kind == schema.STEP and live.rank == chosen.first_rank],
        findings=(),
        epoch_offset_ns=EPOCH_NS,
        clock_error_ns=20,
        dropped=0,
    )
    return list(SpanMaker(live, chosen, lambda: RESOURCE).spans(exported._replace(**changes)))


def job_spans(step: int = 0, span_filter: SpanFilter | None = None) -> dict[int, list[ReadableSpan]]:
    """By rank: the spans of one step of the whole job, every rank by itself."""
    ranks = (
        range(WORLD_SIZE)
        if span_filter is None
        else [rank for rank in range(WORLD_SIZE) if span_filter.takes_rank(rank)]
    )
    return {rank: spans_of(live_rank(rank), step_rows(rank, step), step, span_filter) for rank in ranks}


def run_steps(exporter: OtlpExporter, first: int, count: int) -> None:
    """Hand so many steps to an exporter."""
    rank = exporter._rank.rank
    for step in range(first, first + count):
        exporter.step(summary(rank, step), step_rows(rank, step))


def is_settled(exporter: OtlpExporter) -> bool:
    """Whether it is known what became of every span."""
    return exporter.account.waiting == 0
