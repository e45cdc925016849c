"""A plain summary is begun before typer is imported, and says the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commtrace.cli import main, start
from commtrace.synth import Job, synthesize
from tests.cli.recorded import record


def _called(module: str, *words: str) -> tuple[int, str, str]:
    """Exit status and output; where typer was imported for the answer, the last word of the output says so."""
    source = f"import sys; from {module} import main\ntry: main()\nfinally: print('typer' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", source, *words], capture_output=True, text=True, timeout=60)
    return told.returncode, told.stdout, told.stderr


@pytest.mark.parametrize("flags", [(), ("--json",), ("--all-ranks",)])
def test_a_plain_summary_says_the_same_without_typer(tmp_path: Path, flags: tuple[str, ...]) -> None:
    run = record(synthesize(Job(pp=2, steps=3)).run, tmp_path / "run")

    status, output, errors = _called("commtrace.cli.start", "summary", str(run), *flags)
    full = _called("commtrace.cli.main", "summary", str(run), *flags)

    assert (status, output.removesuffix("False\n"), errors) == (0, full[1].removesuffix("True\n"), full[2])
    assert output.endswith("False\n")


def test_an_error_of_a_plain_summary_reads_as_any_other(tmp_path: Path) -> None:
    status, output, errors = _called("commtrace.cli.start", "summary", str(tmp_path / "none"))
    full = _called("commtrace.cli.main", "summary", str(tmp_path / "none"))

    assert (status, output, errors) == (2, "False\n", full[2])
    assert full[0] == 2


@pytest.mark.parametrize(
    "words",
    [
        ("summary", "--help"),
        ("summary", "a", "b"),
        ("summary", "a", "--steps", "1:2"),
        ("summary", "--", "a"),
        ("summary", ""),
        ("--traceback", "summary"),
        ("straggler", "a"),
        (),
    ],
)
def test_whatever_else_is_said_is_left_to_typer(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["commtrace", *words])
    monkeypatch.setattr(main, "main", lambda: asked.append(sys.argv[1:]))

    start.main()

    assert asked == [[*words]]
