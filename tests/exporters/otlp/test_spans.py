"""Rows as spans: times, names, ids, parents, links. Every rank makes its own, and they fit together."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind

from commtrace.exporters.otlp.queue import ExportedStep, SpanFilter
from commtrace.exporters.otlp.spans import MOST_LINKS, SpanMaker, resource_of
from commtrace.findings.finding import Finding
from commtrace.findings.status import FOUND, LiveEvent
from commtrace.live.monitoring.job_steps import JobStep
from commtrace.live.summary import trace_id
from commtrace.trace import schema
from commtrace.trace.selection import StepRange
from tests.exporters.otlp.made import EPOCH_NS, RESOURCE, RUN, job_spans, live_rank, spans_of, step_rows, summary
from tests.factory import group
from tests.live.findings import slow_finding
from tests.trace.rows import row


def context(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def span_id(span: ReadableSpan) -> int:
    return context(span).span_id


def named(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def since_epoch(time_ns: int | None) -> int:
    assert time_ns is not None
    return time_ns - EPOCH_NS


def labels_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_all_spans_of_a_step_are_in_one_trace_with_times_in_epoch_ns() -> None:
    of_rank = job_spans(step=7)

    assert {context(span).trace_id for spans in of_rank.values() for span in spans} == {trace_id(RUN, 7)}
    assert [(span.name, since_epoch(span.start_time), since_epoch(span.end_time)) for span in of_rank[0]] == [
        ("job step", 7_000, 8_000),
        ("step", 7_000, 8_000),
        ("forward", 7_000, 7_300),
        ("send pp", 7_300, 7_320),
        ("backward", 7_320, 7_720),
        ("module layers.*.mlp backward", 7_330, 7_400),
        ("all_reduce dp", 7_720, 7_920),
        ("stall all_reduce dp", 7_720, 7_920),
        ("data", 7_930, 7_990),
    ]


def test_the_job_step_has_the_times_of_as_many_ranks_as_it_says() -> None:
    rows = [one for one in step_rows(0, 7) if one.kind == schema.STEP]
    of_all = JobStep(6, 0, EPOCH_NS + 5_900, EPOCH_NS + 7_100, 4)
    job_step, step = spans_of(live_rank(0), rows, step=7, job_steps=(of_all,))

    assert (job_step.name, job_step.start_time, job_step.end_time) == ("job step", EPOCH_NS + 5_900, EPOCH_NS + 7_100)
    assert labels_of(job_step) == {
        "commtrace.step": 6,
        "dl.iteration": 6,
        "commtrace.run.id": RUN,
        "commtrace.world_size": 4,
        "commtrace.step.ranks_seen": 4,
    }
    assert (context(job_step).trace_id, context(step).trace_id) == (trace_id(RUN, 6), trace_id(RUN, 7))
    assert span_id(job_step) == span_id(named(job_spans(step=6)[0], "job step")), "whenever it is sent"


def test_every_step_is_a_child_of_the_job_step_and_the_parent_of_the_rest() -> None:
    of_rank = job_spans()
    root = span_id(named(of_rank[0], "job step"))

    assert named(of_rank[0], "job step").parent is None
    for rank, spans in of_rank.items():
        step = named(spans, "step")
        assert step.parent is not None
        assert (step.parent.span_id, step.parent.is_remote) == (root, rank != 0)
        rest = [span.parent.span_id for span in spans if span.name not in ("job step", "step") and span.parent]
        assert rest == [span_id(step)] * 7


def test_ids_are_unique_and_every_link_leads_to_the_same_communication_on_another_rank() -> None:
    of_rank = job_spans(step=2)
    by_id = {span_id(span): (rank, span) for rank, spans in of_rank.items() for span in spans}
    assert len(by_id) == sum(map(len, of_rank.values()))

    linked = {}
    for rank, spans in of_rank.items():
        for span in spans:
            for link in span.links:
                other_rank, other = by_id[link.context.span_id]
                linked[rank, span.name] = (other_rank, other.name)
                assert link.context.trace_id == context(other).trace_id
                assert span.name.startswith("stall") or dict(link.attributes or {}) == {
                    "commtrace.peer.rank": other_rank
                }
    assert linked == {
        (0, "send pp"): (2, "recv pp"),
        (1, "send pp"): (3, "recv pp"),
        (2, "recv pp"): (0, "send pp"),
        (3, "recv pp"): (1, "send pp"),
        (0, "all_reduce dp"): (1, "all_reduce dp"),
        (1, "all_reduce dp"): (0, "all_reduce dp"),
        (2, "all_reduce dp"): (3, "all_reduce dp"),
        (3, "all_reduce dp"): (2, "all_reduce dp"),
        **{(rank, "stall all_reduce dp"): (rank, "all_reduce dp") for rank in range(4)},
    }


def test_attributes_of_a_communication() -> None:
    spans = job_spans()[2]

    assert labels_of(named(spans, "recv pp")) == {
        "commtrace.stream": "communication",
        "commtrace.timing.source": "host",
        "commtrace.step": 0,
        "commtrace.microbatch": 0,
        "dl.microbatch_id": 0,
        "commtrace.pipeline.stage": 1,
        "commtrace.pipeline.chunk": 0,
        "commtrace.collective.operation": "recv",
        "commtrace.collective.is_async": False,
        "commtrace.collective.size": 4_096,
        "commtrace.collective.dtype": "float32",
        "commtrace.collective.sequence": 0,
        "commtrace.process_group.role": "pp",
        "commtrace.process_group.name": "",
        "commtrace.process_group.size": 2,
        "commtrace.peer.rank": 0,
    }
    assert named(spans, "recv pp").kind is SpanKind.CONSUMER
    assert labels_of(named(spans, "module layers.*.mlp backward"))["commtrace.module.name"] == "layers.3.mlp backward"
    assert labels_of(named(spans, "data"))["commtrace.name"] == "next batch"


def test_a_communication_says_which_of_its_times_are_bounds() -> None:
    rows = [
        one._replace(start_exact=False, end_exact=False) if one.kind == schema.P2P else one for one in step_rows(2, 0)
    ]
    labels = labels_of(named(spans_of(live_rank(2), rows), "recv pp"))

    assert (labels["commtrace.timing.start_exact"], labels["commtrace.timing.end_exact"]) == (False, False)


def test_attributes_of_a_step_add_up() -> None:
    attributes = labels_of(named(job_spans(step=3)[1], "step"))

    assert attributes["dl.iteration"] == attributes["commtrace.step"] == 3
    assert attributes["commtrace.run.id"] == RUN
    assert attributes["commtrace.clock.error_ns"] == 20
    parts = [value for name, value in attributes.items() if "compute_ns" in name or "exposed_ns" in name]
    assert sum(parts) + attributes["commtrace.other_ns"] == 1_000


def test_an_unfinished_communication_says_so() -> None:
    rows = [row(kind=schema.COLLECTIVE, name="barrier", step=0, detail='{"unfinished":true}')]
    (span,) = spans_of(live_rank(1), rows)

    assert labels_of(span)["commtrace.collective.unfinished"] is True
    assert span.name == "barrier unknown"
    assert span.links == ()


def test_late_rows_go_to_the_trace_of_their_own_step_and_those_of_no_step_to_the_one_that_closed() -> None:
    rows = [row(step=4, start=4_990), row(step=-1, start=10)]
    spans = spans_of(live_rank(1), rows, step=5)

    assert [context(span).trace_id for span in spans] == [trace_id(RUN, 4), trace_id(RUN, 5)]


def test_a_step_that_is_repeated_is_another_span() -> None:
    maker = SpanMaker(live_rank(0), SpanFilter("steps", world_size=4), lambda: RESOURCE)
    exported = ExportedStep(summary(0, 1), step_rows(0, 1)[:1], (), (), 0, 0, 0)
    first, second = [
        list(maker.spans(exported._replace(job_steps=(JobStep(1, repetition, 1_000, 2_000, 1),))))
        for repetition in range(2)
    ]

    assert len({span_id(span) for span in (*first, *second)}) == 4
    assert [span.parent and span.parent.span_id for span in second] == [None, span_id(second[0])]


def test_ranks_that_do_not_export_are_not_linked_and_the_lowest_that_does_sends_the_job_step() -> None:
    span_filter = SpanFilter("communication", ranges=(StepRange.parse("1"), StepRange.parse("3")), world_size=4)
    of_rank = job_spans(span_filter=span_filter)

    assert [span.name for span in of_rank[1]][:2] == ["job step", "step"]
    assert of_rank[3][0].name == "step"
    assert len(named(of_rank[1], "send pp").links) == 1
    assert named(of_rank[1], "all_reduce dp").links == ()


@pytest.mark.parametrize("size", [2, 9, 100])
def test_members_of_a_large_group_link_to_the_lowest_and_this_one_to_some(size: int) -> None:
    world = group("dp", *range(size), ordinal=1)
    span_filter = SpanFilter("communication", world_size=size)
    one = row(kind=schema.COLLECTIVE, name="all_gather", step=0, group=world.id, seq=5, op_in_seq=0)
    spans = {
        rank: spans_of(live_rank(rank, groups=[world]), [one], span_filter=span_filter)[-1] for rank in (0, 1, size - 1)
    }

    assert [link.context.span_id for link in spans[0].links][:1] == [span_id(spans[1])]
    assert len(spans[0].links) == min(size - 1, MOST_LINKS)
    for rank in (1, size - 1):
        assert [link.context.span_id for link in spans[rank].links] == [span_id(spans[0])]


def test_a_finding_of_the_monitor_is_a_span_from_since_when_it_is() -> None:
    slow = slow_finding(3, cause="data", since_ns=EPOCH_NS + 10_500_000_000, cost_ns=3.5e6)
    event = LiveEvent(FOUND, EPOCH_NS + 20_000_000_000, slow, "Rank 3 …")
    *_, span = spans_of(live_rank(0), step_rows(0, 0), findings=(event,))

    assert (span.name, span.start_time, span.end_time) == (
        "slow found",
        EPOCH_NS + 10_500_000_000,
        EPOCH_NS + 20_000_000_000,
    )
    assert labels_of(span) == {
        "commtrace.finding": "found",
        "commtrace.finding.id": "slow/ranks/data/3",
        "commtrace.finding.kind": "slow",
        "commtrace.finding.rank": 3,
        "commtrace.finding.node": "node0",
        "commtrace.finding.place": "ranks",
        "commtrace.finding.sentence": "Rank 3 …",
        "commtrace.finding.cause": "data",
        "commtrace.finding.cost_ns": 3.5e6,
        "commtrace.finding.share": 0.12,
        "commtrace.finding.gpu_hours_per_day": 1.0,
        "commtrace.finding.since_step": 30,
    }


def test_what_is_not_known_of_a_finding_is_no_attribute() -> None:
    """Of the whole job, and since an unknown step; rank 0 and step 0 are known."""
    of_the_job = Finding(id="slow/job/transfer", kind="slow", place="job", cause="transfer")
    of_rank_0 = slow_finding(0, since_step=0)
    events = [LiveEvent(FOUND, EPOCH_NS, finding, "…") for finding in (of_the_job, of_rank_0)]
    *_, span, other = spans_of(live_rank(0), step_rows(0, 0), findings=tuple(events))

    assert labels_of(span) == {
        "commtrace.finding": "found",
        "commtrace.finding.id": "slow/job/transfer",
        "commtrace.finding.kind": "slow",
        "commtrace.finding.place": "job",
        "commtrace.finding.cause": "transfer",
        "commtrace.finding.sentence": "…",
    }
    assert [labels_of(other)[f"commtrace.finding.{name}"] for name in ("rank", "since_step")] == [0, 0]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def test_rank_and_topology_under_our_names_and_megatrons() -> None:
    attributes = resource_of(live_rank(3)).attributes

    expected = {
        "service.name": "commtrace",
        "service.instance.id": "r1-rank3",
        "commtrace.run.id": RUN,
        "nemo.run.id": RUN,
        "dl.rank": 3,
        "nv.dl.rank": 3,
        "dl.world_size": 4,
        "dl.local_rank": 3,
        "dl.pipeline_parallel.rank": 1,
        "dl.pipeline_parallel.size": 2,
        "dl.data_parallel.rank": 1,
        "dl.tensor_parallel.size": 1,
        "commtrace.parallel.pp.rank": 1,
        "commtrace.attempt": 0,
        "host.name": "alpha",
    }
    assert {name: attributes.get(name) for name in expected} == expected


def test_variables_win_over_defaults_but_not_over_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a,dl.rank=77,nemo.run.id=launcher")
    attributes = resource_of(live_rank(3)).attributes

    assert (attributes["service.name"], attributes["team"]) == ("mine", "a")
    assert attributes["dl.rank"] == 3
    assert attributes["nemo.run.id"] == "launcher"


def test_the_resource_of_a_provider_is_taken_over() -> None:
    theirs = Resource({"service.name": "megatron-lm", "nemo.run.id": "llama", "nv.dl.run.uuid": "u", "dl.rank": 3})
    attributes = resource_of(live_rank(3), theirs.attributes).attributes

    assert attributes["service.name"] == "megatron-lm"
    assert attributes["nemo.run.id"] == "llama"
    assert attributes["nv.dl.run.uuid"] == "u"
    assert attributes["commtrace.run.id"] == RUN


def test_a_resource_is_hashed_as_any_other_but_once() -> None:
    ours, again = resource_of(live_rank(1)), resource_of(live_rank(1))

    assert ours == again
    assert hash(ours) == hash(again) == hash(Resource(ours.attributes))


def test_while_python_ends_the_variables_are_read_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=red")

    def no_more_threads(*_: object) -> Resource:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(Resource, "create", no_more_threads)

    attributes = resource_of(live_rank(3)).attributes

    assert (attributes["team"], attributes["service.name"], attributes["dl.rank"]) == ("red", "commtrace", 3)
