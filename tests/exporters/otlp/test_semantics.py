"""The spans of a whole job, encoded, decoded by the protocol's own messages, and put together like a backend does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from commtrace.config import Config, OtlpConfig
from commtrace.exporters.otlp.queue import SpanFilter
from tests.exporters.otlp.made import WORLD_SIZE, job_spans
from tests.exporters.otlp.semantics import violations


def decoded(span_filter: SpanFilter | None = None, steps: int = 3) -> dict[int, list[Any]]:
    """By rank: what a receiver gets of some steps."""
    got: dict[int, list[Any]] = {}
    for step in range(steps):
        for rank, spans in job_spans(step, span_filter).items():
            request = ExportTraceServiceRequest.FromString(encode_spans(spans).SerializeToString())
            scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
            got.setdefault(rank, []).extend(span for scope in scopes for span in scope.spans)
    return got


@pytest.mark.parametrize("level", ["steps", "phases", "communication", "modules"])
@pytest.mark.parametrize(("ranks", "chosen"), [("", [0, 1, 2, 3]), ("0,2", [0, 2]), ("1:4", [1, 2, 3])])
def test_every_trace_is_one_tree_and_every_link_leads_somewhere(level: str, ranks: str, chosen: list[int]) -> None:
    span_filter = SpanFilter.from_config(Config(otlp=OtlpConfig(level=level, ranks=ranks)), WORLD_SIZE)
    of_rank = decoded(span_filter)
    assert sorted(of_rank) == chosen
    assert violations(span for spans in of_rank.values() for span in spans) == []


def test_ranks_that_never_spoke_to_each_other_agree_on_ids() -> None:
    alone, again = decoded(), decoded()
    for rank, spans in alone.items():
        assert [(span.trace_id, span.span_id) for span in spans] == [
            (span.trace_id, span.span_id) for span in again[rank]
        ]
    for rank, spans in alone.items():
        others = {span.span_id for other, theirs in alone.items() if other != rank for span in theirs}
        across = [link.span_id for span in spans for link in span.links if link.attributes]
        assert across
        assert set(across) <= others, "what links name on other ranks is what those ranks have sent"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spans: spans.pop(0), "roots"),
        (lambda spans: spans.append(spans[-1]), "not unique"),
        (lambda spans: setattr(spans[3], "parent_span_id", b"nobody??"), "its parent is not in its trace"),
        (lambda spans: setattr(spans[2].links[0], "span_id", b"nobody??"), "a link leads to no span"),
        (lambda spans: setattr(spans[2], "end_time_unix_nano", 1), "from "),
    ],
)
def test_what_is_wrong_is_found(change: Callable[[list[Any]], object], message: str) -> None:
    spans = [span for own in decoded(steps=1).values() for span in own]
    first_with_links = next(number for number, span in enumerate(spans) if span.links and span.parent_span_id)
    spans[2], spans[first_with_links] = spans[first_with_links], spans[2]
    change(spans)
    assert any(message in problem for problem in violations(spans))
