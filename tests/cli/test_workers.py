from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.cli.workers import step_workers
from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.synth import Job, synthesize, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "made"
    write(synthesize(Job(pp=2, dp=2, microbatches=4, steps=6)), path)
    return path


def _told(command: str, run: Path, *options: str) -> dict[str, object]:
    result = CliRunner().invoke(app, [command, str(run), "--json", *options])
    assert result.exit_code == 0, result.output
    told: dict[str, object] = json.loads(result.output)
    return told


@pytest.mark.parametrize("command", ["summary", "straggler", "pipeline"])
def test_threads_find_the_same(command: str, run: Path) -> None:
    assert _told(command, run, "--executor", "threads:3") == _told(command, run)


def test_processes_find_the_same(run: Path) -> None:
    assert _told("summary", run, "--executor", "processes:2") == _told("summary", run)


@pytest.mark.filterwarnings("default")
def test_a_dask_cluster_finds_the_same(run: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=3, processes=False, protocol="tcp://", dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        for command in ("summary", "pipeline"):
            assert _told(command, run, "--executor", address) == _told(command, run)


@pytest.mark.parametrize("text", ["fibres", "threads:0", "processes:-1", "dask:/nowhere"])
def test_unknown_executors_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write threads"), step_workers(text):
        pass


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)

    with pytest.raises(MissingExtraError, match=r"commtrace\[dask\]"), step_workers("dask://localhost:1"):
        pass
