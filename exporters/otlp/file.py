"""OTLP-JSON lines: one request per line, as the OpenTelemetry collector's ``otlpjsonfile`` receiver reads them.

>>> sink = FileSpans(Path("lines"), "r1", rank=0)               # doctest: +SKIP
>>> sink.export(spans)                                          # doctest: +SKIP
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan

_logger = logging.getLogger("commtrace")

BYTES_PER_FILE: Final = 64 * 2**20
FILES_KEPT: Final = 8
"""Of each rank, for traces and for metrics: the newest. Older ones are deleted."""

_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})


class LineFile:
    """Files that are appended to line by line, each up to a size, the newest few kept.

    Args:
        directory: is made if need be.
        stem: what the names of the files begin with.
        most_bytes, kept: bounds.
    """

    def __init__(self, directory: Path, stem: str, *, most_bytes: int = BYTES_PER_FILE, kept: int = FILES_KEPT) -> None:
        self._directory = directory
        self._stem = re.sub(r"[^\w.-]", "_", stem)
        self._most_bytes = most_bytes
        self._kept = kept
        self._path: Path | None = None
        self._failed = False

    def append(self, line: str) -> bool:
        """Whether the line is in the file."""
        try:
            path = self._current()
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                _logger.warning("commtrace: cannot write OTLP lines to %s: %s", self._directory, error)
            return False
        self._failed = False
        return True

    def _current(self) -> Path:
        """The file to append to; a new one, and the oldest deleted, when it has become too large."""
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
        return sorted(self._directory.glob(f"{self._stem}-[0-9][0-9][0-9][0-9].jsonl"))

    def _numbered(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:04d}.jsonl"


class FileSpans:
    """Spans of a rank as lines."""

    def __init__(self, directory: Path, run_id: str, rank: int) -> None:
        self._lines = LineFile(directory, f"{run_id}-rank-{rank:05d}-traces")

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        return self._lines.append(to_line(encode_spans(spans)))

    def shutdown(self) -> None:
        """Every line is in its file already."""


class FileMetrics:
    """Metrics of a rank as lines."""

    def __init__(self, directory: Path, run_id: str, rank: int) -> None:
        self._lines = LineFile(directory, f"{run_id}-rank-{rank:05d}-metrics")

    def export(self, metrics: MetricsData) -> bool:
        return self._lines.append(to_line(encode_metrics(metrics)))

    def shutdown(self) -> None:
        """Every line is in its file already."""


def to_line(request: Message) -> str:
    """A request in OTLP's JSON encoding: protobuf's, but ids in hexadecimal digits and enums as numbers.

    Source: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
    """
    return json.dumps(_with_hex_ids(MessageToDict(request, use_integers_for_enums=True)), separators=(",", ":"))


def _with_hex_ids(told: Any) -> Any:
    if isinstance(told, list):
        return [_with_hex_ids(one) for one in told]
    if not isinstance(told, dict):
        return told
    return {
        name: base64.b64decode(value).hex() if name in _IDS else _with_hex_ids(value) for name, value in told.items()
    }
