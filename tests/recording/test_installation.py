"""What commtrace says of an installation that does not fit, and that pip resolves one that does."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commtrace.recording import installation
from commtrace.recording.installation import PAGE, TRIED, own_command, warn_if_untried

ROOT = Path(__file__).resolve().parents[2]
NUMPY_1_WITH_A_NEW_PYARROW = "raise ImportError('pyarrow requires NumPy 2.0 or newer, found 1.26.4')"
WHAT_TO_DO = (
    "pyarrow cannot be imported (pyarrow requires NumPy 2.0 or newer, found 1.26.4). Install one that works with "
    "numpy 1 and with numpy 2: pip install 'pyarrow>=15,<26'"
)


def run_without_pyarrow(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "pyarrow.py").write_text(NUMPY_1_WITH_A_NEW_PYARROW)
    search_path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": search_path, "COMMTRACE_ENABLED": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_script_trains_on_where_pyarrow_cannot_be_imported_and_is_told_what_to_install(tmp_path: Path) -> None:
    completed = run_without_pyarrow(tmp_path, "-c", "import commtrace.auto; print('trained')")

    assert completed.stdout == "trained\n"
    assert completed.stderr == f"commtrace is off in this process: {WHAT_TO_DO}\n"
    assert completed.returncode == 0


@pytest.mark.parametrize("command", [["summary"], ["doctor", "run"], ["report", "run"]])
def test_a_command_says_what_to_install_where_pyarrow_cannot_be_imported(tmp_path: Path, command: list[str]) -> None:
    completed = run_without_pyarrow(tmp_path, "-m", "commtrace", *command)

    assert completed.stderr == f"commtrace: {WHAT_TO_DO}\n"
    assert completed.returncode == 2


@pytest.fixture
def _nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_warned", set())


@pytest.mark.usefixtures("_nobody_was_warned")
@pytest.mark.parametrize("version", ["2.4.0", "2.4.1+cu121", "2.13.0a0+git1234567", "2.15.0", "unknown"])
def test_a_version_that_was_tried_is_not_spoken_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_untried("torch", version)

    assert caplog.records == []


@pytest.mark.usefixtures("_nobody_was_warned")
def test_another_version_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("2.16.0", "2.16.0", "3.0"):
        warn_if_untried("torch", version)
    warn_if_untried("megatron-core", "0.11.0")

    assert [(record.levelno, record.getMessage().split(": see")[0]) for record in caplog.records] == [
        (logging.WARNING, "commtrace was tested with torch 2.4 to 2.15; 2.16.0 is recorded as far as possible"),
        (
            logging.WARNING,
            "commtrace was tested with megatron-core 0.12 to 0.19; 0.11.0 is recorded as far as possible",
        ),
    ]
    assert all(PAGE in record.getMessage() for record in caplog.records)


def test_the_page_has_the_versions_that_are_called_tried() -> None:
    page = (ROOT / PAGE).read_text()
    for package, tried in TRIED.items():
        for number in (tried.oldest, tried.newest):
            assert re.search(rf"\b{package} {number[0]}\.{number[1]}\b", page), (package, number)


def resolved(*requirements: str) -> dict[str, str]:
    """What pip would install, by name; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *requirements]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert completed.returncode == 0, completed.stderr
    packages = [each["metadata"] for each in json.loads(completed.stdout)["install"]]
    return {package["name"].lower(): package["version"] for package in packages}


@pytest.fixture(scope="module")
def requirements() -> list[str]:
    """Of commtrace itself, if a package index can be reached."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "10"]
    probe = subprocess.run([*pip, "index", "versions", "wrapt"], capture_output=True, text=True, timeout=100)
    if probe.returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr.strip()[-100:]}")
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


@pytest.mark.thorough
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="there is no numpy 1 for this Python")
def test_pip_finds_a_pyarrow_for_the_numpy_that_megatron_core_0_13_to_0_15_want(requirements: list[str]) -> None:
    found = resolved(*requirements, "numpy<2")

    assert found["numpy"].startswith("1.26.")
    assert int(found["pyarrow"].split(".")[0]) < 26


@pytest.mark.thorough
def test_pip_finds_numpy_2_where_nobody_wants_an_older_one(requirements: list[str]) -> None:
    assert resolved(*requirements)["numpy"].startswith("2.")


def test_the_command_of_a_hint_is_one_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(folder)
    assert own_command() == f"'{folder}/python' -m commtrace"

    script = folder / "commtrace"
    script.touch(mode=0o755)
    assert own_command() == "./commtrace"
    monkeypatch.chdir(tmp_path)
    assert own_command() == "'my env/bin/commtrace'"
    monkeypatch.chdir(Path(__file__).parent)
    assert own_command() == f"'{script}'"

    monkeypatch.setenv("PATH", str(folder))
    assert own_command() == "commtrace"
