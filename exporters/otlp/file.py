"""OTLP-JSON lines: one request per line, as the OpenTelemetry collector's ``otlpjsonfile`` receiver reads them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext

from commtrace.live.gil import yield_gil
from commtrace.trace.json_values import JsonObject

SPANS_PER_LINE: Final = 64
"""Limit, as ``json.dumps`` holds the GIL until it is done."""

_logger = logging.getLogger("commtrace")

BYTES_PER_FILE: Final = 64 * 2**20
FILES_KEPT: Final = 8
"""Limit per rank and signal; older files are deleted."""


class LineFile:
    """Files of lines, each complete at ``most_bytes``; the newest ``kept`` stay. Their directory is created."""

    def __init__(self, directory: Path, stem: str, *, most_bytes: int = BYTES_PER_FILE, kept: int = FILES_KEPT) -> None:
        self._directory = directory
        self._stem = re.sub(r"[^\w.-]", "_", stem)
        self._numbered_name = re.compile(re.escape(self._stem) + r"-(\d{4,})\.jsonl")
        self._most_bytes = most_bytes
        self._kept = kept
        self._path: Path | None = None
        self._failed = False

    def append(self, lines: str) -> bool:
        """Append lines, without a newline after the last; return False, with one warning, if that fails."""
        try:
            path = self._current()
            with path.open("a", encoding="utf-8") as file:
                file.write(lines + "\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                _logger.warning("commtrace: cannot write OTLP lines to %s: %s", self._directory, error)
            return False
        self._failed = False
        return True

    def _current(self) -> Path:
        """Return the file to append to; if it has become too large, begin a new one and delete the oldest."""
        if self._path is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            known = self._files()
            self._path = known[-1] if known else self._numbered(0)
        if self._path.exists() and self._path.stat().st_size >= self._most_bytes:
            self._path = self._numbered(int(self._path.stem.rpartition("-")[2]) + 1)
            for old in self._files()[: -self._kept + 1 or None]:
                old.unlink(missing_ok=True)
        return self._path

    def _files(self) -> list[Path]:
        """Return the files of this stem, the oldest first."""
        numbers = {
            int(match[1]): path
            for path in self._directory.iterdir()
            if (match := self._numbered_name.fullmatch(path.name)) is not None
        }
        return [numbers[number] for number in sorted(numbers)]

    def _numbered(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:04d}.jsonl"


class FileSpans:
    def __init__(self, directory: Path, run_id: str, rank: int) -> None:
        self._lines = LineFile(directory, f"{run_id}-rank-{rank:05d}-traces")

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        return self._lines.append("\n".join(self._requests(spans)))

    @staticmethod
    def _requests(spans: Sequence[ReadableSpan]) -> Iterator[str]:
        for first in range(0, len(spans), SPANS_PER_LINE):
            yield_gil()
            yield json.dumps(spans_request(spans[first : first + SPANS_PER_LINE]), separators=(",", ":"))

    def shutdown(self) -> None:
        """Do nothing: every line is in its file."""


class FileMetrics:
    def __init__(self, directory: Path, run_id: str, rank: int) -> None:
        self._lines = LineFile(directory, f"{run_id}-rank-{rank:05d}-metrics")

    def export(self, metrics: MetricsData) -> bool:
        request = MessageToDict(encode_metrics(metrics), use_integers_for_enums=True)
        return self._lines.append(json.dumps(request, separators=(",", ":")))

    def shutdown(self) -> None:
        """Do nothing: every line is in its file."""


def spans_request(spans: Sequence[ReadableSpan]) -> JsonObject:
    """Return an ExportTraceServiceRequest with at least one span, all of one resource and scope, in OTLP's JSON.

    That is protobuf's JSON with hexadecimal ids and enums as numbers. Source:
    https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
    """
    first = spans[0]
    # Not from the protobuf message: ``json_format`` takes about four times as long.
    scope = first.instrumentation_scope
    named = {"name": scope.name, "version": scope.version} if scope is not None else {}
    encoded: JsonObject = {
        "scope": {key: word for key, word in named.items() if word},
        "spans": [_span(span) for span in spans],
    }
    resource = {"attributes": _attributes(first.resource.attributes)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [encoded]}]}


def _span(span: ReadableSpan) -> JsonObject:
    context = span.get_span_context()
    assert context is not None, "every span here has a context"
    encoded: JsonObject = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP's numbers begin with "unspecified"
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "status": {},
        "flags": _flags(span.parent),
    }
    if span.parent is not None:
        encoded["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.links:
        encoded["links"] = [_link(link) for link in span.links]
    return encoded


def _link(link: Link) -> JsonObject:
    encoded: JsonObject = {
        "traceId": f"{link.context.trace_id:032x}",
        "spanId": f"{link.context.span_id:016x}",
        "flags": _flags(link.context),
    }
    return {**encoded, "attributes": _attributes(link.attributes)} if link.attributes else encoded


def _flags(other: SpanContext | None) -> int:
    # Bit 8: it is known whether the other span is remote; bit 9: it is.
    return 0x300 if other is not None and other.is_remote else 0x100


def _attributes(named: Mapping[str, object]) -> list[JsonObject]:
    return [{"key": key, "value": _value(value)} for key, value in named.items()]


def _value(value: object) -> JsonObject:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    assert isinstance(value, Sequence), "OpenTelemetry has no other attributes"
    return {"arrayValue": {"values": [_value(one) for one in value]}}
