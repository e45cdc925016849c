"""An exporter that cannot be opened costs its metrics, never the training or the trace."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commtrace.config import BaselineConfig, Config, OtlpConfig
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

    module: Any = ModuleType("failing_exporter")
    module.open_it = open_it
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(live.LISTENERS, "prometheus", "failing_exporter:open_it")

    assert live._opened("prometheus", Config(), LiveRank(metadata(0), tmp_path)) is None
    (record,) = caplog.records
    assert (said in record.message, record.exc_info is not None) == (True, has_traceback)


@pytest.mark.parametrize(
    ("export", "metrics", "is_read"),
    [
        ("prometheus", False, True),
        ("wandb,prometheus", False, True),
        ("otlp", True, True),
        ("otlp", False, False),
        ("wandb,tensorboard,mlflow,monitor", True, False),
    ],
)
def test_a_baseline_is_read_where_its_metric_is_exported(
    export: str, metrics: bool, is_read: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(
        export=export,
        otlp=OtlpConfig(metrics=metrics),
        baseline=BaselineConfig(file=str(tmp_path / "absent.json")),
    )

    assert live._baseline_or_none(config, 0) is None
    assert bool(caplog.records) == is_read


def test_one_rank_of_a_node_warns_of_a_baseline_for_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(export="prometheus", baseline=BaselineConfig(file=str(tmp_path / "absent.json")))

    assert [live._baseline_or_none(config, local_rank) for local_rank in (0, 1, 7)] == [None] * 3
    assert [record.message for record in caplog.records] == [
        f"commtrace: live metrics have no share of a baseline: {tmp_path / 'absent.json'} cannot be read "
        "(No such file or directory): name a file that every node sees"
    ]
