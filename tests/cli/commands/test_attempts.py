"""``--attempt``: the attempts of a job that was started again, by every command that reads a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.findings.reading import said
from tests.json_schemas import errors
from tests.trace.rows import mark, steps, write_rank


def invoke(*words: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == exit_code, result.output
    return result.output


def answer(*words: object, exit_code: int = 0) -> Any:
    printed = json.loads(invoke(*words, "--json", exit_code=exit_code))
    assert list(errors(str(words[0]), printed)) == []
    return printed


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    """Three ranks, of which rank 1 fails after step 6; then two new processes, from step 5 on, that end well."""
    run = tmp_path / "runs" / "gpt"
    failed = {"exception": "ValueError", "frames": ["train.py:7 main"]}
    for rank in range(3):
        about: dict[str, Any] = {"rank": rank, "world_size": 3, "session": 1_000 + rank}
        write_rank(run, [*steps(0, 7), mark("end", failed if rank == 1 else {})], **about)
    for rank in range(2):
        about = {"rank": rank, "world_size": 2, "attempt": 1, "session": 2_000 + rank, "pid": 50 + rank}
        write_rank(run, [*steps(5, 17), mark("end", {})], **about)
    return run


FAILED = {
    "attempt": 0,
    "world_size": 3,
    "first_step": 0,
    "last_step": 6,
    "state": "failed",
    "ending": "ValueError on rank 1",
    "went_on": [],
}
LINE = "Attempt 1 (--attempt 0): 3 ranks, steps 0–6, failed: ValueError on rank 1."


def test_a_job_that_ended_well_after_a_restart_has_no_finding_and_its_attempts_are_reported(restarted: Path) -> None:
    assert answer("doctor", restarted)["run"]["earlier_attempts"] == [FAILED]
    assert answer("doctor", restarted)["findings"] == []
    assert LINE in invoke("doctor", restarted)
    assert answer("summary", restarted)["run"]["earlier_attempts"] == [FAILED]
    assert LINE in invoke("summary", restarted)


def test_the_failure_of_the_first_attempt_can_be_read(restarted: Path) -> None:
    first = answer("doctor", restarted, "--attempt", 0, exit_code=1)

    assert (first["run"]["attempt"], first["run"]["world_size"], first["run"]["earlier_attempts"]) == (0, 3, [])
    assert any("Rank 1 ended with an uncaught ValueError at train.py:7 main" in one for one in said(first["findings"]))
    assert [rank["exception"] for rank in first["ranks"]] == [None, "ValueError", None]


def test_summaries_of_both_attempts_have_their_own_ranks_and_steps(restarted: Path) -> None:
    first, same = (answer("summary", restarted, "--attempt", number) for number in (0, 1))
    newest = answer("summary", restarted)

    assert [(one["run"]["world_size"], one["run"]["steps"]["last"]) for one in (first, newest)] == [(3, 6), (2, 16)]
    assert (first["run_budget"]["attempts"], newest["run_budget"]["attempts"]) == (1, 2)
    for one in (newest, same):
        del one["run"]["path"]
    assert newest == same


@pytest.mark.parametrize("command", ["straggler", "pipeline", "bandwidth", "metrics"])
def test_other_commands_read_it_too(command: str, restarted: Path) -> None:
    result = CliRunner().invoke(app, [command, str(restarted), "--attempt", "0"])

    assert result.exit_code in (0, 2), result.output  # 2: there is no pipeline, and no communication
    assert "(recorded: 0, 1)" not in result.output
    assert "(recorded: 0, 1)" in invoke(command, restarted, "--attempt", 2, exit_code=2)


def test_doctor_counts_the_ranks_of_the_attempt(restarted: Path) -> None:
    assert " · 3 ranks on " in invoke("doctor", restarted, "--attempt", 0, exit_code=1)


def test_the_attempt_that_is_shown_stands_behind_the_name_of_the_run(restarted: Path) -> None:
    assert "Run r1, attempt 2 · ended · " in invoke("straggler", restarted)
    assert "Run r1 · failed: ValueError on rank 1 · " in invoke("straggler", restarted, "--attempt", 0)


def test_a_report_and_an_export_are_of_the_attempt(restarted: Path, tmp_path: Path) -> None:
    invoke("report", restarted, "--attempt", 0, "-o", tmp_path / "report.html")
    invoke("export", restarted, "--attempt", 0, "--format", "chrome", "-o", tmp_path / "trace.json")

    assert "gpt-attempt-0" in (tmp_path / "report.html").read_text()
    assert max(event["pid"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 3


def test_an_attempt_that_was_not_recorded_is_an_error(restarted: Path) -> None:
    assert "(recorded: 0, 1)" in invoke("summary", restarted, "--attempt", 2, exit_code=2)


def test_the_verdict_on_one_attempt_is_not_kept(restarted: Path) -> None:
    told = invoke("summary", restarted, "--attempt", 0, "--keep", exit_code=2)

    assert "leave out --steps, --baseline, --attempt" in told


def test_an_attempt_needs_a_run(tmp_path: Path) -> None:
    assert "--attempt and --all-ranks are about a run" in invoke("doctor", "--attempt", 0, exit_code=2)


def test_a_list_names_the_attempts_and_how_each_ended(restarted: Path) -> None:
    (run,) = answer("list", restarted.parent)["runs"]

    assert run["facts"]["earlier_attempts"] == [FAILED]
    assert run["state"] == "ended"
    assert f"gpt: {LINE}\n" in invoke("list", restarted.parent)


def test_the_last_of_many_attempts_are_shown(tmp_path: Path) -> None:
    for attempt in range(7):
        rows = [*steps(attempt, attempt + 3), mark("end", {})]
        write_rank(tmp_path / "runs" / "r", rows, attempt=attempt, session=1_000 * attempt, pid=attempt)

    for told in (invoke("doctor", tmp_path / "runs" / "r"), invoke("list", tmp_path / "runs")):
        assert "2 more attempts before these: --json" in told
        assert ["(--attempt 1)" in told, "(--attempt 2)" in told, "(--attempt 5)" in told] == [False, True, True]
