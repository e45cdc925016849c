"""What must be true of decoded OTLP spans beyond being decodable: one tree per trace, and links that lead somewhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any


def violations(spans: Iterable[Any]) -> list[str]:
    """What is wrong with the spans of a whole job, protobuf messages of all ranks; empty if nothing is."""
    spans = list(spans)
    found = [f"{span.name}: {problem}" for span in spans for problem in _of_one(span)]
    ids = Counter((span.trace_id, span.span_id) for span in spans)
    found += [f"span id {span_id.hex()} is not unique in its trace" for (_, span_id), count in ids.items() if count > 1]
    traces: defaultdict[bytes, dict[bytes, Any]] = defaultdict(dict)
    for span in spans:
        traces[span.trace_id][span.span_id] = span
    for trace, members in traces.items():
        roots = [span.name for span in members.values() if not span.parent_span_id]
        if len(roots) != 1:
            found.append(f"trace {trace.hex()} has the roots {roots}")
        for span in members.values():
            if span.parent_span_id and span.parent_span_id not in members:
                found.append(f"{span.name}: its parent is not in its trace")
            found += [
                f"{span.name}: a link leads to no span"
                for link in span.links
                if link.span_id not in traces.get(link.trace_id, {})
            ]
    return found


def _of_one(span: Any) -> Iterable[str]:
    if len(span.trace_id) != 16 or not any(span.trace_id):
        yield "no trace id of 16 bytes"
    if len(span.span_id) != 8 or not any(span.span_id):
        yield "no span id of 8 bytes"
    if span.parent_span_id and len(span.parent_span_id) != 8:
        yield "no parent id of 8 bytes"
    if span.parent_span_id == span.span_id:
        yield "its own parent"
    if not span.name:
        yield "no name"
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano:
        yield f"from {span.start_time_unix_nano} to {span.end_time_unix_nano}"
    if not span.kind:
        yield "kind unspecified"
    keys = Counter(attribute.key for attribute in span.attributes)
    yield from (f"attribute {key} {count} times" for key, count in keys.items() if count > 1)
    yield from (f"attribute {one.key} has no value" for one in span.attributes if one.value.WhichOneof("value") is None)
    if any(link.span_id == span.span_id for link in span.links):
        yield "a link to itself"
