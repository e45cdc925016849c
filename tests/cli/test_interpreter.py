from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app


def test_only_while_a_command_analyses_python_runs_in_another_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[bool, float]] = []

    def summarise(*_: object) -> dict[str, object]:
        seen.append((gc.isenabled(), sys.getswitchinterval()))
        return {}

    monkeypatch.setattr("commtrace.cli.summary.summarise", summarise)
    before = (gc.isenabled(), sys.getswitchinterval())

    CliRunner().invoke(app, ["summary", str(tmp_path), "--json"], catch_exceptions=False)

    ((collects, turn_s),) = seen
    assert not collects
    assert turn_s < before[1]
    assert (gc.isenabled(), sys.getswitchinterval()) == before
