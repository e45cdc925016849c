"""OTLP-JSON lines: what the collector's file receiver reads."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from commtrace.exporters.otlp.file import FileSpans, LineFile, spans_request
from tests.exporters.otlp.made import job_spans


def with_hex_ids(message: Any) -> Any:
    """The one difference between protobuf's JSON and OTLP's, besides numbers for enums."""
    if isinstance(message, list):
        return [with_hex_ids(one) for one in message]
    if not isinstance(message, dict):
        return message
    return {
        name: base64.b64decode(value).hex() if name in ("traceId", "spanId", "parentSpanId") else with_hex_ids(value)
        for name, value in message.items()
    }


def test_a_request_is_what_the_sdk_sends() -> None:
    for spans in job_spans(step=3).values():
        sent = with_hex_ids(MessageToDict(encode_spans(spans), use_integers_for_enums=True))
        assert json.loads(json.dumps(spans_request(spans))) == sent


def test_a_request_is_a_line(tmp_path: Path) -> None:
    spans = job_spans()[0]
    sink = FileSpans(tmp_path / "lines", "run/1", rank=0)
    assert sink.export(spans[:3])
    assert sink.export(spans[3:])

    (path,) = (tmp_path / "lines").iterdir()
    assert path.name == "run_1-rank-00000-traces-0000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["resourceSpans"][0]["scopeSpans"][0]["spans"]) for line in lines] == [3, len(spans) - 3]


def test_files_are_bounded_and_a_restart_goes_on_where_they_end(tmp_path: Path) -> None:
    for first in (0, 10):
        lines = LineFile(tmp_path, "r1", most_bytes=20, kept=3)
        for number in range(first, first + 10):
            assert lines.append(f"line {number:04d}")

    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"r1-{number:04d}.jsonl" for number in (7, 8, 9)]
    assert sum(len(path.read_text().splitlines()) for path in tmp_path.iterdir()) == 6
    assert (tmp_path / "r1-0009.jsonl").read_text() == "line 0018\nline 0019\n"


def test_the_files_after_9999_are_found_and_bounded_too(tmp_path: Path) -> None:
    for number in (9_998, 9_999, 10_000):
        (tmp_path / f"r1-{number}.jsonl").write_text("long enough\n")

    lines = LineFile(tmp_path, "r1", most_bytes=10, kept=2)
    assert lines.append("line a")

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "r1-10000.jsonl": "long enough\n",
        "r1-10001.jsonl": "line a\n",
    }


def test_a_directory_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file")
    lines = LineFile(tmp_path / "taken", "r1")

    assert [lines.append("x") for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1
    assert "cannot write OTLP lines to" in caplog.text
