from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from commtrace.cli.commands import view
from commtrace.cli.main import app
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run

runner = CliRunner()


@pytest.mark.parametrize("several", [False, True])
def test_it_prints_an_address_and_ends_with_an_interrupt(tmp_path: Path, several: bool) -> None:
    run = PipelineJob(stages=2, microbatches=2, steps=4).run()
    for name in ("one", "two") if several else ("one",):
        write_run(tmp_path / name, run)
    command = [sys.executable, "-m", "commtrace", "view", str(tmp_path), "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            address = lines[1].strip()
            with urlopen(address, timeout=60) as answer:
                assert b"<!doctype html>" in answer.read()
            port = re.findall(r":(\d+)/", address)[0]
            assert f"ssh -L {port}:127.0.0.1:{port} " in lines[2]
            if several:
                with urlopen(address.replace("/?", "/data/runs.json?"), timeout=60) as answer:
                    assert {one["directory"] for one in json.load(answer)["runs"]} == {"one", "two"}
            else:
                assert "/run/one/?token=" in address
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()

    assert (process.returncode, errors) == (0, "")


def test_a_directory_without_a_run_is_a_message(tmp_path: Path) -> None:
    result = runner.invoke(app, ["view", str(tmp_path)])

    assert result.exit_code == 2
    assert "holds no recorded run" in result.output or "holds no recorded run" in result.stderr


def test_a_port_that_is_taken_is_a_message(tmp_path: Path) -> None:
    write_run(tmp_path / "one", PipelineJob(stages=2, microbatches=2, steps=4).run())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = runner.invoke(app, ["view", str(tmp_path), "--port", str(taken.getsockname()[1])])

    assert result.exit_code == 2
    assert "take another --port" in " ".join(result.stderr.split())


def test_one_of_several_runs_is_to_be_named_for_a_comparison(tmp_path: Path) -> None:
    run = PipelineJob(stages=2, microbatches=2, steps=4).run()
    for name in ("one", "two"):
        write_run(tmp_path / name, run)

    result = runner.invoke(app, ["view", str(tmp_path), "--against", str(tmp_path / "one")])

    assert result.exit_code == 2
    assert "name the one to compare with" in " ".join(result.stderr.split())


def test_a_run_to_compare_with_has_to_exist(tmp_path: Path) -> None:
    write_run(tmp_path / "one", PipelineJob(stages=2, microbatches=2, steps=4).run())

    result = runner.invoke(app, ["view", str(tmp_path / "one"), "--against", str(tmp_path / "gone")])

    assert result.exit_code == 2
    assert "gone" in result.stderr


def test_the_token_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of a browser's process are there for all users to see."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    view._open_in_browser("http://127.0.0.1:1234/run/one/?token=s3cret")

    (address,) = opened
    page = Path(address.removeprefix("file://"))
    assert "s3cret" not in address
    assert 'url=http://127.0.0.1:1234/run/one/?token=s3cret"' in page.read_text()
    assert page.parent.stat().st_mode & 0o077 == 0
