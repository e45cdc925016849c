"""``commtrace list`` and ``commtrace hosts``: over what other commands and the monitor found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.history.store import FILE_NAME
from tests.history.factory import live, write_monitor, write_run
from tests.json_schemas import errors


def invoke(*words: str | Path, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == exit_code, result.output
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a healthy run, one with a slow rank, and an empty folder."""
    folder = tmp_path_factory.mktemp("runs")
    job = ["--dp", "4", "--num-steps", "24"]
    invoke("synth", "-o", folder / "healthy", *job)
    invoke("synth", "-o", folder / "slow", *job, "--gpus-per-host", "2", "--fault", "slow-rank=1:1.5")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def runs(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "runs"))


def listed(runs: Path) -> dict[str, Any]:
    printed = json.loads(invoke("list", runs, "--json").stdout)
    assert list(errors("list", printed)) == []
    return {run["directory"]: run for run in printed["runs"]}


def hosts(runs: Path) -> dict[str, Any]:
    printed = json.loads(invoke("hosts", runs, "--json").stdout)
    assert list(errors("hosts", printed)) == []
    return {host["host"]: host for host in printed["hosts"]}


@pytest.mark.parametrize("command", ["summary", "straggler", "report"])
def test_a_command_that_is_asked_to_keeps_its_verdict(command: str, runs: Path, tmp_path: Path) -> None:
    output: list[str | Path] = ["-o", tmp_path / "report.html"] if command == "report" else []

    result = invoke(command, runs / "slow", "--keep", *output)

    assert result.stderr.startswith("Writing") or result.stderr == ""
    verdict = listed(runs)["slow"]["verdict"]
    assert (verdict["by"], verdict["source"], verdict["last_step"]) == (command, "analysis", 23)
    (named,) = verdict["named"]
    assert (named["who"], named["cause"], named["hosts"]) == ("rank 1 on node0", "compute", ["node0"])
    assert hosts(runs)["node0"]["named"] == 1


@pytest.mark.parametrize(
    "words", [["summary", "slow", "--steps", "4:8"], ["straggler", "slow", "--baseline", "healthy"]]
)
def test_no_verdict_is_kept_on_a_part_of_a_run_or_against_another_reference(words: list[str], runs: Path) -> None:
    result = invoke(*(runs / word if (runs / word).is_dir() else word for word in words), "--keep", exit_code=2)

    assert "--keep keeps the verdict on one whole run" in " ".join(result.stderr.split())
    assert not (runs / FILE_NAME).exists()


@pytest.mark.parametrize(
    "command",
    [
        "summary",
        "straggler",
        "report -o OUT",
        "doctor",
        "metrics",
        "pipeline",
        "bandwidth",
        "top --once",
        "merge -o OUT",
    ],
)
def test_a_command_that_reads_writes_nothing_where_it_was_not_asked_to(
    command: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    name, *options = command.replace("OUT", str(tmp_path / "out")).split()

    result = CliRunner().invoke(app, [name, str(runs / "slow"), *options])

    assert result.exit_code == 0, result.output
    after = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*")) if "out" not in path.parts}
    assert after == before


def test_the_table_has_a_row_for_every_run_and_a_line_for_every_problem(runs: Path) -> None:
    for run in ("healthy", "slow"):
        invoke("summary", runs / run, "--keep")

    lines = invoke("list", runs).stdout.splitlines()
    text = " ".join(" ".join(lines).split())

    assert text.startswith("2 runs: 1 with stragglers, 1 without, 0 not judged. The newest, slow: ")
    assert "run started (UTC) lasted ranks steps step ended" in text
    healthy, slow = text.index("healthy 2023-11-14 22:13"), text.index("slow 2023-11-14 22:13")
    assert (
        healthy < text.index("exposed communication: ", healthy) < slow < text.index("rank 1 on node0, compute:", slow)
    )
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "! empty: It holds no recorded run (no rank-NNNNN folders)."


def test_runs_that_were_not_judged_are_shown_with_the_command_that_judges_them(runs: Path) -> None:
    invoke("summary", runs / "healthy", "--keep")

    lines = invoke("list", runs).stdout.splitlines()
    assert "Runs without a line below them are not judged yet: commtrace summary RUN --keep" in lines

    invoke("summary", runs / "slow", "--keep")
    assert "not judged yet" not in invoke("list", runs).stdout


def test_hosts_are_counted_with_a_rate(runs: Path) -> None:
    for run in ("healthy", "slow"):
        invoke("summary", runs / run, "--keep")

    verdict, blank, heading, row, *rest = invoke("hosts", runs).stdout.splitlines()

    assert (verdict, blank) == ("node0 was named most often: in 1 of its 2 judged runs.", "")
    columns = "host named judged rate runs cost per step causes (runs) last (UTC)"
    assert heading.split() == columns.split()
    assert row.split()[:5] == ["node0", "1", "2", "50%", "2"]
    assert "compute (1)" in row
    assert "2023-11-14" in row
    assert " ".join(" ".join(rest).split()).endswith(
        "Known: 2 runs, 2 of them judged, 2 hosts. rate: share of the judged runs in which the host was named."
    )
    assert "node1" in invoke("hosts", runs, "--all").stdout


def test_the_monitor_counts_once_with_an_analysis(runs: Path) -> None:
    write_monitor(runs / "slow", findings=[live("node0"), live("node1", "data")])
    invoke("summary", runs / "slow", "--keep")

    found = hosts(runs)

    assert (found["node0"]["named"], found["node0"]["namings"][0]["sources"]) == (1, ["analysis", "monitor"])
    assert (found["node1"]["named"], found["node1"]["namings"][0]["sources"]) == (1, ["monitor"])


def test_a_deleted_run_still_counts_for_its_hosts(runs: Path) -> None:
    invoke("summary", runs / "slow", "--keep")
    shutil.rmtree(runs / "slow")

    assert "slow" not in listed(runs)
    assert hosts(runs)["node0"]["namings"][0]["directory"] == "slow"


def test_without_a_judged_run_no_host_is_named(runs: Path) -> None:
    assert " ".join(invoke("hosts", runs).stdout.split()) == (
        "No run has been judged yet, so no host was named. Known: 2 runs, 0 of them judged, 2 hosts. Judged: commtrace "
        "summary RUN --keep or the monitor named a rank, or could compare all of them."
    )


@pytest.mark.parametrize("command", ["summary", "straggler"])
def test_a_file_that_cannot_be_written_fails_no_command(command: str, runs: Path) -> None:
    (runs / FILE_NAME).write_bytes(b"no database" * 100)

    result = invoke(command, runs / "slow", "--keep", "--json")

    assert json.loads(result.stdout)
    assert result.stderr.startswith("commtrace: the verdict was not kept for `commtrace list`: ")
    for other in ("list", "hosts"):
        printed = " ".join(invoke(other, runs).stdout.split())
        assert "! Verdicts were not kept or not read: " in printed
        assert "If it is damaged, delete it: runs that are still there are read again." in printed


def test_words_of_files_cannot_move_the_cursor(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "run", hosts=("al\x1b[2Jpha",), end={"exception": "E\x1b[2J"})
    write_monitor(run, findings=[live("b\x1b[2J", who="[bold]r\x1b[2J")])

    for command in ("list", "hosts"):
        assert "\x1b" not in invoke(command, tmp_path / "runs").stdout
    assert "[bold]r" in invoke("list", tmp_path / "runs").stdout


@pytest.mark.parametrize("command", ["list", "hosts"])
def test_a_directory_without_runs_is_an_error(command: str, tmp_path: Path) -> None:
    result = invoke(command, tmp_path / "gone", exit_code=2)

    assert "no such directory. Pass the directory that holds the runs." in result.stderr
