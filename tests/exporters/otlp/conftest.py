"""What all tests of the exporter need: no variables of OpenTelemetry, and exporters that are closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commtrace.config import Config, OtlpConfig
from commtrace.exporters.otlp.exporter import OtlpExporter
from tests.exporters.otlp.made import live_rank


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def opened() -> Iterator[Callable[..., OtlpExporter]]:
    """Opens exporters, and closes those that a test left open."""
    exporters = []

    def opener(rank: int = 0, config: Config | None = None, **how: Any) -> OtlpExporter:
        exporters.append(OtlpExporter(config or Config(otlp=OtlpConfig(level="modules")), live_rank(rank), **how))
        return exporters[-1]

    yield opener
    for one in exporters:
        if one._thread.is_alive():
            one.close()
