"""Turn rows into OpenTelemetry spans: epoch ns, ids that other ranks can compute, links to their spans.

Every rank's ``step`` is a child of one ``job step``, which the lowest exporting rank sends, and the parent of its other
spans. Names are low in cardinality (``forward``, ``all_reduce tp``); numbers are attributes.

The resource of a rank has the names of Megatron-LM's telemetry, so that one query finds both: ``dl.rank``,
``dl.tensor_parallel.rank``, … and, in later versions, ``nv.dl.rank``; the run is ``nemo.run.id``
(``megatron.core.telemetry``, built on nemo-lens; newer than megatron-core 0.16).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.util.types import AttributeValue

from commtrace.analysis.matching.roles import role_of
from commtrace.exporters.otlp.queue import ExportedStep, SpanFilter
from commtrace.findings.status import FOUND, LiveEvent
from commtrace.live.monitoring.job_steps import JobStep, RepetitionCounter
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary, trace_id
from commtrace.trace import schema
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.metadata import Group
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row
from commtrace.trace.spans import Spans

_DIMENSIONS: Final = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel"}
_RUN_ID: Final = "nemo.run.id"

NO_ATTRIBUTES: Final[Mapping[str, AttributeValue]] = {}


class RankResource(Resource):
    """A resource that caches its hash: the encoder needs it for every span, and the SDK computes it from JSON."""

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_known_hash")
        if known is None:
            known = self.__dict__["_known_hash"] = super().__hash__()
        return known


def resource_of(rank: LiveRank, provider_attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES) -> Resource:
    """Return the resource of a rank.

    ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` win over the attributes of the script's TracerProvider, which
    win over defaults. Rank, run and topology are always commtrace's own.
    """
    detected = {
        name: value
        for name, value in _of_environment().attributes.items()
        if name != SERVICE_NAME or not str(value).startswith("unknown_service")
    }
    given = {**provider_attributes, **detected}
    return RankResource({SERVICE_NAME: "commtrace", **given, **_identity(rank, given)})


def _of_environment() -> Resource:
    try:
        return Resource.create()
    except RuntimeError:
        # Python is ending: the SDK cannot start the thread of its detectors any more.
        return OTELResourceDetector().detect()


def _identity(rank: LiveRank, given: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    metadata = rank.metadata
    named: dict[str, AttributeValue] = {
        "service.instance.id": f"{metadata.run_id}-rank{metadata.rank}",
        "host.name": metadata.host,
        "process.pid": metadata.pid,
        "commtrace.run.id": metadata.run_id,
        "commtrace.attempt": metadata.attempt,
        "commtrace.node": metadata.node,
        "commtrace.version": metadata.versions.get("commtrace", ""),
        "commtrace.device.name": metadata.device,
        _RUN_ID: given.get(_RUN_ID) or metadata.run_id,
    }
    for prefix in ("dl", "nv.dl"):
        named[f"{prefix}.rank"] = metadata.rank
        named[f"{prefix}.world_size"] = metadata.world_size
        named[f"{prefix}.local_rank"] = metadata.local_rank
    if metadata.device_uuid:
        named["commtrace.device.uuid"] = metadata.device_uuid
    return {**named, **_topology(rank)}


def _topology(rank: LiveRank) -> dict[str, AttributeValue]:
    named: dict[str, AttributeValue] = {}
    for what, by_dimension in (("rank", rank.marks.coordinates), ("size", rank.marks.parallel)):
        for dimension, number in dict(by_dimension).items():
            named[f"commtrace.parallel.{dimension}.{what}"] = int(number)
            if dimension in _DIMENSIONS:
                named[f"dl.{_DIMENSIONS[dimension]}.{what}"] = int(number)
    return named


class SpanIds:
    """The ids of one attempt of a run, which every rank can compute for every other rank.

    An id is the first 8 bytes of a BLAKE2b digest over the identity of the span. With 10⁵ spans in a trace the chance
    that two have the same id is below 10⁻⁹.
    """

    def __init__(self, run_id: str, attempt: int) -> None:
        self._seed = hashlib.blake2b(f"{run_id}/{attempt}/".encode(), digest_size=8)

    def job_step(self, step: int, repetition: int = 0) -> int:
        """Return the id of the span of a step of all ranks; ``repetition`` counts earlier steps of this number."""
        return self._id(f"job step {step} {repetition}")

    def step(self, rank: int, step: int, repetition: int = 0) -> int:
        return self._id(f"step {rank} {step} {repetition}")

    def collective(self, rank: int, group: int, seq: int, op_in_seq: int) -> int:
        return self._id(f"collective {rank} {group} {seq} {op_in_seq}")

    def message(self, is_send: bool, group: int, sender: int, receiver: int, seq: int) -> int:
        return self._id(f"{'send' if is_send else 'recv'} {group} {sender} {receiver} {seq}")

    def own(self, rank: int, number: int) -> int:
        """Return the id of a span that no other rank links to, so a running number is enough."""
        return self._id(f"own {rank} {number}")

    def _id(self, identity: str) -> int:
        digest = self._seed.copy()
        digest.update(identity.encode())
        return int.from_bytes(digest.digest(), "big") or 1  # 0 is no span id


Attributes = dict[str, AttributeValue]

MOST_LINKS: Final = 8
"""Members of a collective link to the lowest one that exports, and this one to so many of the others."""

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NAMED_BY_KIND: Final = frozenset({schema.DATA, schema.CHECKPOINT, schema.GC, schema.EVALUATION})
_OF_FINDINGS: Final = ("id", "kind", "rank", "place", "cause", "cost_ns", "share", "gpu_hours_per_day", "since_step")
_UNKNOWN: Final = {"rank": -1, "since_step": -1}

_NUMBER: Final = re.compile(r"\d+")


class SpanMaker:
    """Makes the spans of one rank; the filter is equal on all ranks, so it finds the exporting ones."""

    def __init__(self, rank: LiveRank, span_filter: SpanFilter, resource: Callable[[], Resource]) -> None:
        self._rank = rank
        self._filter = span_filter
        self._resource = resource
        self._ids = SpanIds(rank.run_id, rank.metadata.attempt)
        self._scope = InstrumentationScope("commtrace", rank.metadata.versions.get("commtrace", ""))
        self._repetitions = RepetitionCounter()
        self._number = 0

    def spans(self, exported: ExportedStep) -> Iterator[ReadableSpan]:
        yield from _StepSpans(self, exported).make()

    def next_own_id(self) -> int:
        """Return the id of a span that no other rank links to."""
        self._number += 1
        return self._ids.own(self._rank.rank, self._number)


class _StepSpans:
    def __init__(self, maker: SpanMaker, exported: ExportedStep) -> None:
        self._maker = maker
        self._exported = exported
        self._rank = maker._rank
        self._filter = maker._filter
        self._ids = maker._ids
        self._repetitions = maker._repetitions
        self._resource = maker._resource()
        self._scope = maker._scope
        self._groups = dict(self._rank.marks.groups)
        trace = RankTrace(self._rank.metadata, Spans.empty(), self._groups)
        self._run = Run(Path(), {self._rank.rank: trace}, [])
        self._roles: dict[tuple[int, int], str] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._contexts: dict[int, tuple[int, SpanContext]] = {}

    def make(self) -> Iterator[ReadableSpan]:
        for job_step in self._exported.job_steps:
            yield self._job_step(job_step)
        for row in self._exported.rows:
            if row.kind == schema.STEP:
                yield self._step(row)
            elif row.kind in (schema.COLLECTIVE, schema.P2P):
                yield self._communication(row)
            elif row.kind == schema.STALL:
                yield self._stall(row)
            else:
                yield self._phase(row)
        for finding in self._exported.findings:
            yield self._finding(finding)

    def _job_step(self, job_step: JobStep) -> ReadableSpan:
        return ReadableSpan(
            name="job step",
            context=self._job_step_context(*job_step.key),
            resource=self._resource,
            attributes={
                **self._named(job_step.step),
                "commtrace.world_size": self._rank.metadata.world_size,
                "commtrace.step.ranks_seen": job_step.ranks,
            },
            start_time=job_step.begin_ns,
            end_time=job_step.end_ns,
            instrumentation_scope=self._scope,
        )

    def _job_step_context(self, step: int, repetition: int) -> SpanContext:
        is_remote = self._rank.rank != self._filter.first_rank
        return _context(trace_id(self._rank.run_id, step), self._ids.job_step(step, repetition), is_remote=is_remote)

    def _named(self, step: int) -> Attributes:
        return {"commtrace.step": step, "dl.iteration": step, "commtrace.run.id": self._rank.run_id}

    def _step(self, row: Row) -> ReadableSpan:
        step = row.step
        repetition = self._repetitions.begin(step)
        attributes = {**self._named(step), "commtrace.timing.source": schema.TIMINGS[row.timing]}
        if step == self._exported.summary.step:
            attributes.update(_breakdown(self._exported.summary))
            attributes["commtrace.clock.error_ns"] = self._exported.clock_error_ns
            attributes["commtrace.otlp.dropped_spans"] = self._exported.dropped
        own = _context(trace_id(self._rank.run_id, step), self._ids.step(self._rank.rank, step, repetition))
        return self._span("step", own, self._job_step_context(step, repetition), row, attributes)

    def _communication(self, row: Row) -> ReadableSpan:
        name = row.name
        trace, parent = self._place(row)
        attributes = {**self._where(row), **self._what(row)}
        kind = {"send": SpanKind.PRODUCER, "recv": SpanKind.CONSUMER}.get(name, SpanKind.INTERNAL)
        own = _context(trace, self._communication_id(row) or self._maker.next_own_id())
        return self._span(f"{name} {self._role(row)}", own, parent, row, attributes, self._partners(row, trace), kind)

    def _stall(self, row: Row) -> ReadableSpan:
        trace, parent = self._place(row)
        waited_for = self._communication_id(row)
        links = (Link(_context(trace, waited_for)),) if waited_for else ()
        attributes = {**self._where(row), "commtrace.collective.operation": row.name}
        name = f"stall {row.name} {self._role(row)}"
        return self._span(name, _context(trace, self._maker.next_own_id()), parent, row, attributes, links)

    def _phase(self, row: Row) -> ReadableSpan:
        kind, name = row.kind, row.name
        attributes = self._where(row)
        if kind == schema.MODULE:
            attributes["commtrace.module.name"] = name
            name = f"module {_NUMBER.sub('*', name)}"
        elif kind in _NAMED_BY_KIND:
            attributes["commtrace.name"] = name
            name = schema.KINDS[kind]
        trace, parent = self._place(row)
        return self._span(name, _context(trace, self._maker.next_own_id()), parent, row, attributes)

    def _finding(self, event: LiveEvent) -> ReadableSpan:
        # The span of what is found lasts from its begin until then.
        step, finding = self._exported.summary.step, event.finding
        attributes: Attributes = {
            "commtrace.finding": event.kind,
            "commtrace.finding.sentence": event.sentence,
        }
        if finding.host:
            attributes["commtrace.finding.node"] = finding.host
        for name in _OF_FINDINGS:
            value = getattr(finding, name)
            if value is not None and value != _UNKNOWN.get(name, ""):
                attributes[f"commtrace.finding.{name}"] = value
        begins = finding.since_ns if event.kind == FOUND and finding.since_ns is not None else event.time_ns
        trace = trace_id(self._rank.run_id, step)
        return ReadableSpan(
            name=f"{finding.kind} {event.kind}",
            context=_context(trace, self._maker.next_own_id()),
            parent=self._step_context(step)[1] if self._filter.takes_step(step) else None,
            resource=self._resource,
            attributes=attributes,
            start_time=min(begins, event.time_ns),
            end_time=event.time_ns,
            instrumentation_scope=self._scope,
        )

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        row: Row,
        attributes: Attributes,
        links: tuple[Link, ...] = (),
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        offset = self._exported.epoch_offset_ns
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            links=links,
            kind=kind,
            start_time=row.start + offset,
            end_time=row.end + offset,
            instrumentation_scope=self._scope,
        )

    def _place(self, row: Row) -> tuple[int, SpanContext]:
        # Those of the row's own step, not always the one that closed.
        return self._step_context(row.step if row.step >= 0 else self._exported.summary.step)

    def _step_context(self, step: int) -> tuple[int, SpanContext]:
        known = self._contexts.get(step)
        if known is None:
            trace = trace_id(self._rank.run_id, step)
            own = _context(trace, self._ids.step(self._rank.rank, step, self._repetitions.of(step)))
            known = self._contexts[step] = (trace, own)
        return known

    def _where(self, row: Row) -> Attributes:
        named: Attributes = {
            "commtrace.stream": schema.LANES[row.lane],
            "commtrace.timing.source": schema.TIMINGS[row.timing],
        }
        if not row.start_exact:
            named["commtrace.timing.start_exact"] = False
        if not row.end_exact:
            named["commtrace.timing.end_exact"] = False
        if row.step >= 0:
            named["commtrace.step"] = row.step
        if row.microbatch >= 0:
            named["commtrace.microbatch"] = named["dl.microbatch_id"] = row.microbatch
        if row.stage >= 0:
            named["commtrace.pipeline.stage"] = row.stage
        if row.chunk >= 0:
            named["commtrace.pipeline.chunk"] = row.chunk
        return named

    def _what(self, row: Row) -> Attributes:
        group = self._groups.get(row.group)
        named: Attributes = {
            "commtrace.collective.operation": row.name,
            "commtrace.collective.is_async": row.is_async,
            "commtrace.process_group.role": self._role(row),
        }
        if row.bytes >= 0:
            named["commtrace.collective.size"] = row.bytes
        if row.dtype:
            named["commtrace.collective.dtype"] = row.dtype
        if row.seq >= 0:
            named["commtrace.collective.sequence"] = row.seq
        if 0 <= row.peer < OUTSIDE:
            named["commtrace.peer.rank"] = row.peer
        if group is not None:
            named["commtrace.process_group.name"] = group.description or group.name
            named["commtrace.process_group.size"] = group.size
        if row.detail and json.loads(row.detail).get("unfinished"):
            named["commtrace.collective.unfinished"] = True
        return named

    def _role(self, row: Row) -> str:
        key = (row.group, row.peer if row.name in ("send", "recv") else schema.NOT_APPLICABLE)
        known = self._roles.get(key)
        if known is None:
            known = self._roles[key] = role_of(self._run, self._run.ranks[self._rank.rank], *key)
        return known

    def _communication_id(self, row: Row) -> int:
        """Return the id of a row's communication; 0 if other ranks cannot know it."""
        if row.group < 0 or row.seq < 0:
            return 0
        if row.name in ("send", "recv"):
            return self._message_id(row, row.name == "send")
        return self._ids.collective(self._rank.rank, row.group, row.seq, row.op_in_seq)

    def _message_id(self, row: Row, is_send: bool) -> int:
        own, peer = self._rank.rank, row.peer
        if not 0 <= peer < OUTSIDE:
            return 0
        sender, receiver = (own, peer) if row.name == "send" else (peer, own)
        return self._ids.message(is_send, row.group, sender, receiver, row.seq)

    def _partners(self, row: Row, trace: int) -> tuple[Link, ...]:
        if row.group < 0 or row.seq < 0:
            return ()
        if row.kind == schema.P2P:
            peer = row.peer
            other = self._message_id(row, row.name != "send")
            return (_link(trace, other, peer),) if other and self._filter.takes_rank(peer) else ()
        group = self._groups.get(row.group)
        members = self._exporting(group) if group else ()
        chosen = members[1 : MOST_LINKS + 1] if members[:1] == (self._rank.rank,) else members[:1]
        return tuple(
            _link(trace, self._ids.collective(rank, row.group, row.seq, row.op_in_seq), rank) for rank in chosen
        )

    def _exporting(self, group: Group) -> tuple[int, ...]:
        """Return the first members of a group that send spans, ascending."""
        known = self._members.get(group.id)
        if known is None:
            exporting = (rank for rank in group.ranks if self._filter.takes_rank(rank))
            known = self._members[group.id] = tuple(islice(exporting, MOST_LINKS + 1))
        return known


def _context(trace: int, span: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace, span, is_remote=is_remote, trace_flags=_SAMPLED)


def _link(trace: int, span: int, rank: int) -> Link:
    return Link(_context(trace, span, is_remote=True), {"commtrace.peer.rank": rank})


def _breakdown(summary: StepSummary) -> Attributes:
    # Parts in ns, which add up to the duration.
    named: Attributes = {f"commtrace.compute_ns.{phase}": time for phase, time in summary.compute_ns.items()}
    named.update({f"commtrace.exposed_ns.{role}": time for role, time in summary.exposed_ns.items()})
    for part in ("bubble_ns", "data_ns", "checkpoint_ns", "gc_ns", "between_ns", "other_ns", "work_ns"):
        named[f"commtrace.{part}"] = getattr(summary, part)
    for phase, time in (summary.launch_bound_ns or {}).items():
        named[f"commtrace.launch_bound_ns.{phase}"] = time
    named.update({f"commtrace.count.{name}": number for name, number in summary.counts.items()})
    if summary.mfu is not None:
        named["commtrace.mfu"] = summary.mfu
    if summary.dropped:
        named["commtrace.recorder.dropped_spans"] = sum(summary.dropped.values())
    return named
