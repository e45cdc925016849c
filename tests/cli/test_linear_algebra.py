"""The library of linear algebra is kept to one thread where a run is analysed, and only there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commtrace.cli.linear_algebra import use_one_thread

_VARIABLE = "OPENBLAS_NUM_THREADS"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VARIABLE, "7")
    use_one_thread()

    assert os.environ[_VARIABLE] == "7"


def test_a_command_that_starts_programs_of_the_user_leaves_their_environment_alone() -> None:
    script = f"import os; print(os.environ.get({_VARIABLE!r}))"
    environment = {name: value for name, value in os.environ.items() if name != _VARIABLE}
    command = [sys.executable, "-m", "commtrace", "run", "--", sys.executable, "-c", script]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)

    assert told.stdout.split() == ["None"]
