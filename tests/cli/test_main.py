from __future__ import annotations

import errno
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace import __version__
from commtrace.cli.examples import EXAMPLES
from commtrace.cli.main import COMMANDS, GROUPS, PURPOSES, app, command_function, load_command
from commtrace.errors import RunNotFoundError
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run

runner = CliRunner()


def _commtrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "commtrace", *arguments], capture_output=True, text=True, timeout=60)


def test_version() -> None:
    result = runner.invoke(app, ["--version"])

    assert (result.exit_code, result.output) == (0, f"commtrace {__version__}\n")


def test_without_arguments_it_says_what_it_can_do() -> None:
    result = runner.invoke(app, [], prog_name="commtrace")

    assert "Usage: commtrace" in result.output
    assert all(command.partition(" ")[0] in result.output for command in COMMANDS)


def test_the_list_of_commands_fits_a_terminal() -> None:
    result = runner.invoke(app, ["--help"], terminal_width=80)
    of_groups = {name: runner.invoke(app, [name, "--help"], terminal_width=80).output for name in GROUPS}

    for name, command in COMMANDS.items():
        group, _, own = name.rpartition(" ")
        output = of_groups[group] if group else result.output
        assert re.search(rf"^  {own} +{re.escape(command.summary)}$", output, re.MULTILINE)
    for name, summary in GROUPS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", result.output, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = runner.invoke(app, [*name.split(), "--help"], prog_name="commtrace")

    assert result.exit_code == 0
    assert f"Usage: commtrace {name}" in result.output
    undocumented = [parameter.name for parameter in load_command(name).params if not getattr(parameter, "help", None)]
    assert undocumented == []
    assert inspect.getdoc(command_function(name))


def test_the_help_lists_every_command_once_by_what_it_is_for() -> None:
    listed = [name for names in PURPOSES.values() for name in names]

    assert sorted(listed) == sorted({name.partition(" ")[0] for name in COMMANDS})
    output = runner.invoke(app, ["--help"], terminal_width=80).output
    assert [line.strip(":") for line in output.splitlines() if line.strip(":") in PURPOSES] == list(PURPOSES)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_two_examples_that_can_be_given_and_no_type_of_python(name: str) -> None:
    output = runner.invoke(app, [*name.split(), "--help"], prog_name="commtrace").output

    assert len(set(EXAMPLES[name])) == 2
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in output
        words = shlex.split(example.partition("commtrace ")[2])
        assert words[: len(name.split())] == name.split()
        command = load_command(name)
        command.make_context(name, words[len(name.split()) :], resilient_parsing=False)
    assert not re.search(r"<(str|int|float|path|list|bool)\b", output)
    assert "{" not in output.splitlines()[0]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_ends_a_command_quietly_and_not_with_1(tmp_path: Path, options: list[str]) -> None:
    assert runner.invoke(app, ["synth", "-o", str(tmp_path / "run"), "--dp", "4", "--num-steps", "4"]).exit_code == 0
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "commtrace", "summary", str(tmp_path / "run"), *options]
    completed = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)

    assert (completed.returncode, completed.stderr) == (128 + signal.SIGPIPE, "")


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    result = runner.invoke(app, ["rnu"])

    assert result.exit_code == 2
    assert "Did you mean 'run'?" in result.output


def test_help_imports_no_command_and_nothing_slow() -> None:
    script = (
        "import sys; from commtrace.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "slow = {'torch', 'numpy', 'pyarrow', 'commtrace.cli.commands.run'} & set(sys.modules)\n"
        "print('slow:', sorted(slow))"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert completed.stdout.endswith("slow: []\n"), completed.stdout + completed.stderr


def test_an_error_of_the_user_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    completed = _commtrace("run", "--steps", "9:3", "--", "true")

    assert completed.returncode == 2
    assert completed.stdout == ""
    assert completed.stderr == "commtrace: steps '9:3' holds no step: A must be below B, and k at least 1\n"


def test_traceback_shows_where_an_error_came_from() -> None:
    completed = _commtrace("--traceback", "run", "--steps", "9:3", "--", "true")

    assert completed.returncode == 1
    assert "Traceback (most recent call last)" in completed.stderr
    assert "selection.py" in completed.stderr


def test_a_fault_of_commtrace_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("commtrace.cli.commands.run.injected_environment", broken)

    assert isinstance(runner.invoke(app, ["run", "--", "true"]).exception, ZeroDivisionError)


def test_errors_of_any_command_are_reported_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_run(*_: object) -> None:
        raise RunNotFoundError("nowhere: no such directory")

    monkeypatch.setattr("commtrace.cli.commands.run.injected_environment", no_run)
    result = runner.invoke(app, ["run", "--", "true"])

    assert (result.exit_code, result.stderr) == (2, "commtrace: nowhere: no such directory\n")


@pytest.mark.parametrize("command", ["summary", "report", "export", "straggler", "pipeline"])
def test_steps_that_were_not_recorded_are_an_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=3).run())

    result = runner.invoke(app, [command, str(recorded), "--steps", "90:95"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("commtrace: no step in 90:95; recorded are 0–2\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("command", ["report", "export"])
def test_a_file_that_cannot_be_written_is_one_line(command: str, tmp_path: Path) -> None:
    recorded = write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=3).run())
    target = tmp_path / "missing" / "page"

    result = runner.invoke(app, [command, str(recorded), "-o", str(target)])

    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith(
        f"commtrace: {target}: there is no directory {target.parent}; make it, or write elsewhere"
    )


def test_a_broken_pipe_is_left_to_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("commtrace.cli.commands.run.injected_environment", closed)
    result = runner.invoke(app, ["run", "--", "true"])

    assert (result.exit_code, result.stderr) == (1, "")


@pytest.mark.parametrize(("before", "during"), [(None, "1"), ("7", "7")])
def test_linear_algebra_keeps_to_one_thread_unless_the_user_says_otherwise(
    before: str | None, during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", before or "")
    if before is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    recorded = write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=3).run())

    runner.invoke(app, ["summary", str(recorded)], catch_exceptions=False)

    assert os.environ["OPENBLAS_NUM_THREADS"] == during


def test_a_command_that_starts_programs_of_the_user_leaves_their_environment_alone() -> None:
    script = "import os; print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-m", "commtrace", "run", "--", sys.executable, "-c", script]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)

    assert finished.stdout.split() == ["None"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["rank-0.json.gz", "rank-1.json.gz"], "import kineto {folder}/*.json.gz -o {output}"),
        (["notes.txt"], "it holds no *.json.gz or *.json."),
    ],
)
def test_a_directory_of_traces_is_answered_with_the_command_that_takes_them(
    names: list[str], said: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).touch()
    output = tmp_path / "run"

    result = runner.invoke(app, ["import", "kineto", str(tmp_path), "-o", str(output)])

    assert result.exit_code == 2
    assert result.stderr.startswith(f"commtrace: {tmp_path} is a directory. Give the traces that torch.profiler wrote")
    assert result.stderr.rstrip().endswith(said.format(folder=tmp_path, output=output))


def test_a_misspelt_run_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt-7b", PipelineJob(stages=2, microbatches=2, steps=3).run())

    result = runner.invoke(app, ["summary", str(tmp_path / "gtp-7b")])

    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith(f"Did you mean {tmp_path / 'gpt-7b'}?")


@pytest.mark.parametrize("command", ["report", "export", "plot timeline"])
def test_a_directory_is_no_file_to_write(command: str, tmp_path: Path) -> None:
    recorded = write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=3).run())

    result = runner.invoke(app, [*command.split(), str(recorded), "-o", str(tmp_path)])

    assert result.exit_code == 2
    assert f"commtrace: {tmp_path}" in result.stderr
