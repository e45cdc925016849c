from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.commands.doctor import HEALTHY
from commtrace.cli.main import app
from commtrace.trace import schema
from commtrace.trace.files.rank_files import write_exit
from commtrace.trace.files.writer import SegmentWriter
from tests.findings.reading import said
from tests.interchange.dumps.flight_recorder_files import entry, write_dump
from tests.json_schemas import errors
from tests.trace.rows import mark, metadata, row, steps, write_rank

runner = CliRunner()


def healthy(directory: Path) -> Path:
    write_rank(directory, [*steps(0, 3), mark("end", {})])
    return directory


def test_a_healthy_run_is_exit_0_and_said_so(tmp_path: Path) -> None:
    result = runner.invoke(app, ["doctor", str(healthy(tmp_path / "run"))])
    assert result.exit_code == 0, result.output
    assert HEALTHY in result.output
    assert "Ranks: ended cleanly: 0" in result.output


def test_findings_are_exit_1(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", steps(0, 3), world_size=2)
    result = runner.invoke(app, ["doctor", str(tmp_path / "run"), "--json"])
    answer = json.loads(result.output)

    assert result.exit_code == 1
    assert answer["run"]["missing_ranks"] == [1]
    assert any("1 of 2 ranks have no readable files" in finding for finding in said(answer["findings"]))


def test_an_unreadable_run_is_exit_2(tmp_path: Path) -> None:
    result = runner.invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 2


def test_a_torn_file_is_read_up_to_its_last_batch(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "run", metadata())  # never closed, as of a rank that was killed
    for step in steps(0, 30):
        writer.write([step])
    (segment,) = writer.directory.iterdir()
    os.truncate(segment, segment.stat().st_size - 700)
    result = runner.invoke(app, ["doctor", str(tmp_path / "run")])

    assert result.exit_code == 1
    assert "torn after" in result.output


def test_the_engine_that_recorded_is_told_and_what_python_costs_on_a_gpu(tmp_path: Path) -> None:
    engines = [{"name": "native", "reason": ""}, {"name": "python", "reason": "it was not built: install [a] wheel"}]
    for rank, engine in enumerate(engines):
        rows = [mark("topology", {"engine": engine}), *steps(0, 3), mark("end", {})]
        write_rank(tmp_path / "run", rows, rank=rank, world_size=2, device="NVIDIA H100 80GB HBM3")

    printed = runner.invoke(app, ["doctor", str(tmp_path / "run")])
    answer = json.loads(runner.invoke(app, ["doctor", str(tmp_path / "run"), "--json"]).output)

    assert printed.exit_code == 0, printed.output
    assert "Engine: native on rank 0, Python on rank 1 (it was not built: install [a] wheel)\n" in printed.output
    assert "note: The Python engine recorded rank 1: on an H100 it added 55 µs" in printed.output
    assert list(errors("doctor", answer)) == []
    assert answer["engines"] == [{**engine, "ranks": [rank]} for rank, engine in enumerate(engines)]


def test_versions_that_differ_between_ranks_are_reported(tmp_path: Path) -> None:
    for rank, version in enumerate(("2.13.0", "2.12.1")):
        write_rank(tmp_path / "run", [mark("end", {})], rank=rank, world_size=2, versions={"torch": version})
    result = runner.invoke(app, ["doctor", str(tmp_path / "run")])
    assert "Ranks run different versions of torch: 2.13.0 on rank 0; 2.12.1 on rank 1." in result.output


def test_drops_are_reported_with_their_time(tmp_path: Path) -> None:
    dropped = row(kind=schema.MARK, name="dropped", start=10**9, end=10**9, detail='{"collective": 7}')
    write_rank(tmp_path / "run", [*steps(0, 2), dropped, mark("end", {})])
    result = runner.invoke(app, ["doctor", str(tmp_path / "run")])

    assert result.exit_code == 1
    assert "Dropped on rank 0: 7 collective, between " in result.output


def test_paths_that_are_not_visible_are_named_and_never_zero(tmp_path: Path) -> None:
    paths = {"DeepEP": "active", "NVSHMEM": "loaded"}
    write_rank(tmp_path / "run", [*steps(0, 2), mark("topology", {"invisible_paths": paths}), mark("end", {})])
    output = " ".join(runner.invoke(app, ["doctor", str(tmp_path / "run")]).output.split())

    assert "Not visible: DeepEP: in use on every rank. Its communication was not seen: unknown, not zero." in output
    assert "Not visible: NVSHMEM: loaded on every rank; whether it is used is unknown." in output


def test_dumps_are_found_by_their_directory_or_by_how_their_names_begin(tmp_path: Path) -> None:
    run = healthy(tmp_path / "run")
    (tmp_path / "dumps").mkdir()
    write_dump(tmp_path / "dumps" / "nccl_trace_rank_1", entry(1, 10))
    for given in ("dumps", "dumps/nccl_trace", "dumps/nccl_trace_rank_1"):
        result = runner.invoke(app, ["doctor", str(run), "--flight-recorder", str(tmp_path / given), "--json"])
        assert json.loads(result.output)["flight_recorder"]["ranks"] == [1]

    result = runner.invoke(app, ["doctor", str(run), "--flight-recorder", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no dumps of the flight recorder" in result.output


def test_a_dump_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    evil = tmp_path / "nccl_trace_rank_0"
    evil.write_bytes(pickle.dumps({"entries": [os.system]}))
    result = runner.invoke(app, ["doctor", str(healthy(tmp_path / "run")), "--flight-recorder", str(evil)])
    assert result.exit_code == 2
    assert "only plain values" in result.output


def of_actors(
    directory: Path, *, launcher: str = "ray", in_flight: int = -1, exit_code: int = -1, exits: int = -1
) -> Any:
    """Two ranks whose files have no end. Rank ``in_flight`` was in a communication, ``exits`` called os._exit."""
    for rank in range(2):
        rows = [mark("topology", {"launcher": launcher} if launcher else {}), *steps(0, 3)]
        if rank == in_flight:
            rows.append(
                mark("in_flight", [{"operation": "all_reduce", "group": 5, "seq": 0, "peer": -1, "start": 250}])
            )
        if rank == exits:
            rows.append(mark("exit", {"status": 1}))
        folder = write_rank(directory, rows, rank=rank, world_size=2, session=1_000 + rank)
        if exit_code >= 0:
            write_exit(folder, 1_000 + rank, exit_code)
    result = runner.invoke(app, ["doctor", str(directory), "--json"])
    return result.exit_code, json.loads(result.output)


def test_actors_that_ray_has_killed_together_have_not_crashed(tmp_path: Path) -> None:
    code, answer = of_actors(tmp_path / "run")

    assert (code, answer["findings"]) == (0, [])
    assert [(rank["state"], rank["launcher"]) for rank in answer["ranks"]] == [("ended", "ray")] * 2
    assert "The files of ranks 0–1 have no end: Ray kills its actors when it is done with them." in answer["notes"][0]


@pytest.mark.parametrize("changes", [{}, {"launcher": "", "exit_code": 0}])
def test_a_rank_that_called_os_exit_did_not_end_well_whatever_its_launcher_did(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    code, answer = of_actors(tmp_path / "run", exits=1, **changes)

    assert code == 1
    assert "ank 1" in answer["findings"][0]["evidence"]
    assert "called os._exit(1)" in answer["findings"][0]["evidence"]
    assert answer["ranks"][1]["exit"] == {"status": 1, "signal": None, "exception": None, "at": None}


@pytest.mark.parametrize("changes", [{"in_flight": 1}, {"launcher": ""}, {"exit_code": 1}])
def test_actors_that_were_not_done_have_broken_off(changes: dict[str, Any], tmp_path: Path) -> None:
    code, answer = of_actors(tmp_path / "run", **changes)

    assert code == 1
    assert any("break off" in finding for finding in said(answer["findings"]))
    assert [rank["launcher"] for rank in answer["ranks"]] == [None, None]
