"""Questions in the page: the answers are those of ``commtrace whatif``, and the predicted step is drawn."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.commands.whatif import predict_for_page
from commtrace.cli.main import app
from commtrace.synth import Job, synthesize, write
from commtrace.viewer.run_view import RunView
from tests.browser.page_texts import milliseconds
from tests.browser.reader import Reader
from tests.browser.serving import serving


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whatif") / "run"
    write(synthesize(Job(pp=2, dp=2, steps=4)), path)
    return path


def predicted(run: Path, *words: str) -> Any:
    return json.loads(CliRunner().invoke(app, ["whatif", str(run), *words, "--json"]).stdout)


def test_a_question_is_answered_and_drawn_under_the_step(reader: Reader, run: Path) -> None:
    expected = predicted(run, "--bandwidth", "dp=4x", "--microbatches", "2")
    with serving({"run": run}, {}, partial(RunView, predict=predict_for_page)) as server:
        page = reader.page
        reader.go_to(server.address("run"))
        before = reader.window()
        reader.show("what-if")
        form = page.get_by_role("region", name="What if")

        form.get_by_label("Bandwidth of").select_option("dp")
        form.get_by_label("times").fill("4")
        form.get_by_label("Microbatches").fill("2")
        form.get_by_label("Microbatches").press("Enter")
        page.wait_for_selector("#show-other[aria-pressed=true]", state="attached")
        replay, answer, *assumed = page.locator("#what-if div > p:not(.hint)").all_inner_texts()

        fidelity = expected["fidelity"]
        missed = f"{abs(fidelity['error']):.1%}".replace("%", " %")
        assert f"misses its step of {milliseconds(fidelity['measured_ns'])} ms by {missed}" in replay
        times = f"{milliseconds(expected['predicted_ns'])} ± {milliseconds(expected['uncertainty_ns'])} ms"
        assert f"With {'; '.join(expected['changes'])}, a step would take {times}" in answer
        assert f"{expected['throughput_ratio']:.3f} times as many per second" in answer
        assert assumed == [f"Assumed: {sentence}" for sentence in expected["assumptions"]]
        assert "as predicted" in page.inner_text("#plan-note")
        assert reader.window() == before
        page.get_by_role("button", name="Show the timeline").click()
        page.focus("#timeline")
        page.keyboard.press("o")
        page.wait_for_selector("#show-other[aria-pressed=false]")
        assert page.inner_text("#plan-note") == ""
        assert not reader.errors


def test_an_impossible_prediction_is_explained(reader: Reader, run: Path) -> None:
    with serving({"run": run}, {}, partial(RunView, predict=predict_for_page)) as server:
        page = reader.page
        reader.go_to(server.address("run")).show("what-if")

        form = page.get_by_role("region", name="What if")
        form.get_by_label("Schedule").select_option("interleaved_1f1b")
        form.get_by_label("Microbatches").fill("3")
        page.get_by_role("button", name="Predict").click()
        page.wait_for_selector("#what-if .empty")

        assert "It cannot be predicted: " in page.inner_text("#what-if .empty")
        assert page.get_by_role("button", name="Predict").is_enabled()


def test_a_report_has_the_command(reader: Reader, run: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "report.html")]).exit_code == 0

    reader.load(tmp_path / "report.html").show("what-if")

    assert reader.page.inner_text("#what-if pre").startswith("commtrace whatif RUN --bandwidth ")
    assert not reader.errors


def test_a_predicted_run_is_compared_as_another_one(reader: Reader, run: Path, tmp_path: Path) -> None:
    predicted(run, "--bandwidth", "dp=4x", "-o", str(tmp_path / "predicted"))
    with serving({"run": run}, {}, partial(RunView, against=tmp_path / "predicted")) as server:
        page = reader.page
        reader.go_to(server.address("run"))
        page.focus("#timeline")
        page.keyboard.press("o")
        page.wait_for_selector("#show-other[aria-pressed=true]")

        assert page.locator("#comparison th").all_text_contents()[1:3] == ["predicted", "run"]
        assert "of the other run" in page.inner_text("#plan-note")
        assert not reader.errors
