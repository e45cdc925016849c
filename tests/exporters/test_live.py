"""An exporter that cannot be opened costs its metrics, never the training or the trace."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from commtrace.config import Config
from commtrace.exporters import live
from commtrace.live.rank import LiveRank
from tests.factory import metadata


@pytest.mark.parametrize(
    ("error", "said", "has_traceback"),
    [
        (RuntimeError("can't create new thread at interpreter shutdown"), "the job ended before it had begun", False),
        (RuntimeError("broken"), "training and the trace go on", True),
        (KeyError("broken"), "training and the trace go on", True),
    ],
    ids=["the job is over", "an error of threads", "any other"],
)
def test_an_exporter_that_fails_to_open_is_left_out(
    error: Exception,
    said: str,
    has_traceback: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def open_it(*_: object) -> None:
        raise error

    module = ModuleType("failing_exporter")
    module.open_it = open_it  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(live.LISTENERS, "prometheus", "failing_exporter:open_it")

    assert live._opened("prometheus", Config(), LiveRank(metadata(0), tmp_path)) is None
    (record,) = caplog.records
    assert (said in record.message, record.exc_info is not None) == (True, has_traceback)
