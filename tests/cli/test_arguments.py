"""``--workers`` and ``--cluster`` change nothing that a command says."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import chosen_workers
from commtrace.cli.commands import bandwidth, compare
from commtrace.cli.main import app
from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.synth import Fault, Job, random_clocks, synthesize, write


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    clocks = random_clocks(2, wall_error_ns=2_000_000, drift_ppm=5)
    job = Job(pp=2, dp=2, microbatches=4, steps=6, gpus_per_host=2, clocks=clocks)
    slower = Job(pp=2, dp=2, microbatches=4, steps=6, gpus_per_host=2, faults=(Fault.parse("slow-rank=1:1.5"),))
    for name, one in (("a", job), ("b", slower)):
        write(synthesize(one), folder / name)
    return [folder / "a", folder / "b"]


def answer_of(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


@pytest.fixture
def in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a window of its own, however short the run."""
    monkeypatch.setattr(bandwidth, "open_run", partial(open_run, most_bytes=0, most_rows=1))
    monkeypatch.setattr(compare, "open_run", partial(open_run, most_bytes=0, most_rows=1))


WHOLE: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def of_whole_runs(runs: list[Path]) -> None:
    """What the commands say of runs that fit into one window."""
    WHOLE.update(
        operation=answer_of("bandwidth", runs[0]),
        size=answer_of("bandwidth", runs[0], "--by", "size"),
        group=answer_of("bandwidth", runs[0], "--by", "group"),
        compare=answer_of("compare", *runs),
    )


@pytest.mark.usefixtures("in_windows")
def test_windows_in_this_process_find_the_same(runs: list[Path]) -> None:
    for by in ("operation", "size", "group"):
        assert answer_of("bandwidth", runs[0], "--by", by, "--workers", 1) == WHOLE[by]
    assert answer_of("compare", *runs, "--workers", 1) == WHOLE["compare"]


@pytest.mark.usefixtures("in_windows")
def test_windows_in_processes_find_the_same(runs: list[Path]) -> None:
    assert answer_of("bandwidth", runs[0], "--workers", 2) == WHOLE["operation"]


@pytest.mark.filterwarnings("default")  # Dask warns where a machine is busy
@pytest.mark.usefixtures("in_windows")
def test_windows_on_a_cluster_find_the_same(runs: list[Path]) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address.removeprefix("tcp://")
        assert answer_of("bandwidth", runs[0], "--cluster", address) == WHOLE["operation"]
        assert answer_of("compare", *runs, "--cluster", address) == WHOLE["compare"]


def test_workers_and_a_cluster_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"), chosen_workers(2, "localhost:8786"):
        pass


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)

    with pytest.raises(MissingExtraError, match=r"commtrace\[cluster\]"), chosen_workers(None, "localhost:8786"):
        pass
