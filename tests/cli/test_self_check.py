"""``commtrace doctor`` without a run: would a job that is started here be recorded?"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commtrace
from commtrace import _native
from commtrace.cli import self_check
from commtrace.cli.main import app
from commtrace.cli.self_check import Check, check_installation, try_recording
from commtrace.config import Config
from tests.json_schemas import errors
from tests.trace.rows import steps, write_rank

ENGINE = "Python" if _native.load()[0] is None else "native"


def checks(environment: dict[str, str]) -> dict[str, Check]:
    return {check.subject: check for check in check_installation(environment, record=False)}


def test_an_installation_that_records_says_so() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    printed = json.loads(result.output)
    found = {check["subject"]: check for check in printed["checks"]}

    assert list(errors("self-check", printed)) == []

    assert result.exit_code == 0, result.output
    assert found["recording"] == {
        "subject": "recording",
        "state": "ok",
        "text": f"4 of 4 calls and 2 of 2 steps of a process group were recorded and read; engine: {ENGINE}",
        "advice": "",
    }
    assert found["torch"]["state"] == found["commtrace"]["state"] == "ok"


def test_whether_the_native_part_is_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "load", lambda: (None, "it was not built"))
    assert checks({})["native part"] == Check("native part", "note", "it was not built")
    monkeypatch.setattr(_native, "load", lambda: (_native, ""))
    assert checks({})["native part"] == Check("native part", "ok", "is built, and loads")


def test_the_cost_of_the_python_engine_is_shown_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = "torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 1\n"
    named = "torch.cuda.get_device_name = lambda number: 'H100'\nprint(json.dumps"
    program = self_check._PROGRAM.replace("devices = ", f"{on_gpu}devices = ").replace("print(json.dumps", named)
    monkeypatch.setattr(self_check, "_PROGRAM", program)

    found = {check.subject: check for check in try_recording({}, config=Config(engine="python"))}

    assert found["devices"].text.startswith("1 × H100; ")
    assert found["engine"].state == "note"
    assert found["engine"].text.startswith("Python: on an H100 it added 55 µs")
    assert found["engine"].advice == "Why not the native one: switched off by COMMTRACE_ENGINE=python"
    assert found["recording"].text.endswith("; engine: Python")


def test_a_recording_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_PROGRAM", "raise OSError('no such hook')")
    (found,) = try_recording({})
    assert found == Check("recording", "problem", "a recording of four calls failed: OSError: no such hook")


def test_calls_that_are_missing_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    program = self_check._PROGRAM.replace("range(2)", "range(1)")
    monkeypatch.setattr(self_check, "_PROGRAM", program)
    (found,) = try_recording({})
    assert (found.state, found.text) == (
        "problem",
        'recorded {"step": 1, "collective": 2} of {"step": 2, "collective": 4}',
    )


def test_a_recording_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_PROGRAM", "import time; time.sleep(60)")
    (found,) = try_recording({}, seconds=0.5)
    assert found.text == "a recording of four calls did not end within 0.5 s"


def test_a_wrong_variable_is_a_problem_and_an_unknown_one_a_note(tmp_path: Path) -> None:
    assert checks({"COMMTRACE_STEPS": "9:3"})["variables"].state == "problem"
    found = [
        check
        for check in check_installation({"COMMTRACE_STEP": "1", "COMMTRACE_DIR": str(tmp_path)}, record=False)
        if check.subject == "variables"
    ]
    assert [check.state for check in found] == ["note", "ok"]
    assert found[0].text == "not known, ignored: COMMTRACE_STEP"


def test_a_job_that_is_switched_off_is_not_recorded() -> None:
    assert checks({"COMMTRACE_ENABLED": "0"})["variables"].state == "problem"


def test_the_self_check_says_what_will_be_recorded() -> None:
    environment = {"COMMTRACE_STEPS": "10:20", "COMMTRACE_SAMPLE": "5", "COMMTRACE_SKIP_ROLES": "tp"}
    text = checks(environment)["variables"].text
    assert text == "steps 10:20 only; one step in 5 in detail; no modules; not timed: tp"


def test_a_directory_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = checks({"COMMTRACE_DIR": str(tmp_path / "file" / "runs")})["directory"]
    assert found.state == "problem"
    assert "cannot be written" in found.text


def test_a_port_in_use_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = checks({"COMMTRACE_EXPORT": "prometheus", "COMMTRACE_PROMETHEUS_PORT": port})["prometheus"]
    assert found == Check(
        "prometheus", "problem", f"127.0.0.1:{port}: Address already in use",
        "Set COMMTRACE_PROMETHEUS_PORT to another port, or to 0 for a free one.",
    )  # fmt: skip


def test_a_monitor_is_asked_whether_it_listens() -> None:
    environment = {"COMMTRACE_EXPORT": "monitor", "COMMTRACE_MONITOR_TOKEN": "t" * 32}
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = f"127.0.0.1:{server.getsockname()[1]}"
        assert checks({**environment, "COMMTRACE_MONITOR_STORE": store})["monitor"].text == f"{store} answers"
    assert checks({**environment, "COMMTRACE_MONITOR_STORE": store})["monitor"].state == "note"


def test_a_checkout_without_its_links_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commtrace, "__file__", str(tmp_path / "__init__.py"))
    found = checks({})["commtrace"]
    assert found.state == "problem"
    assert "exporters, integrations, viewer missing" in found.text


def test_options_about_a_run_want_one() -> None:
    result = CliRunner().invoke(app, ["doctor", "--all-ranks"])
    assert result.exit_code == 2
    assert "name it" in result.output


def test_a_newest_run_that_is_not_well_is_told_before_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "newest run" not in CliRunner().invoke(app, ["doctor"]).output
    write_rank(tmp_path / "commtrace-runs" / "gpt", steps(0, 4))  # its files break off

    lines = CliRunner().invoke(app, ["doctor"]).output.splitlines()

    assert lines[0] == "The newest run, gpt: cut off: rank 0"
    assert "  commtrace doctor commtrace-runs/latest" in lines[:4]
