from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.two_ranks import write_two_ranks

runner = CliRunner()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_two_ranks(tmp_path / "run")


def test_without_matplotlib_it_says_what_to_install(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)

    result = runner.invoke(app, ["plot", "timeline", str(recorded)])

    assert result.exit_code == 2
    assert "commtrace: figures need matplotlib: pip install 'commtrace[plot]'" in result.output


@pytest.mark.parametrize("figure", ["timeline", "breakdown", "heat-map"])
def test_every_figure_can_be_written(figure: str, recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "figure.svg"
    # two ranks without stages: there is no typical work to be slower than
    options = ["--value", "compute"] if figure == "heat-map" else []

    result = runner.invoke(app, ["plot", figure, str(recorded), "-o", str(output), *options])

    assert result.exit_code == 0, result.output
    assert result.stdout == f"{output}\n"
    assert "</svg>" in output.read_text("utf-8")


def test_the_warm_up_can_be_drawn_and_ranks_be_chosen(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "step.svg"

    result = runner.invoke(app, ["plot", "timeline", str(recorded), "-o", str(output), "--step", "0", "--ranks", "1:9"])

    assert result.exit_code == 0, result.output
    svg = output.read_text("utf-8")
    assert "step 0" in svg
    assert "rank 1 " in svg
    assert "rank 0 " not in svg


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "9"], "no step in 9; recorded are 0–2"),
        (["--ranks", "x"], "--ranks x: write A:B (B exclusive) and numbers, such as 0:4,8"),
        (["--ranks", "7"], "--ranks 7: none of these ranks was recorded"),
        (["-o", "step.gif"], "step.gif: name a file that ends in .svg, .png, .pdf"),
    ],
)
def test_wrong_options_are_an_error(options: list[str], message: str, recorded: Path) -> None:
    pytest.importorskip("matplotlib")

    result = runner.invoke(app, ["plot", "timeline", str(recorded), *options])

    assert result.exit_code == 2
    assert message in result.output
