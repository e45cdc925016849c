"""The section on the plan of a run, beside what it sent: the numbers of ``commtrace plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.synth import Job, synthesize, write
from tests.browser.reader import Reader
from tests.browser.serving import serving
from tests.cli.planned_runs import LAYOUT, MODEL, recorded


def printed(*words: str) -> Any:
    return json.loads(CliRunner().invoke(app, ["plan", *words, "--json"]).stdout)


def cells(reader: Reader, table: int) -> list[list[str]]:
    found: list[list[str]] = (
        reader.page.locator("#expected table")
        .nth(table)
        .locator("tbody tr")
        .evaluate_all("(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))")
    )
    return found


def test_the_served_page_has_the_numbers_of_the_plan(reader: Reader, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", missing="all_gather", model=MODEL, layout=LAYOUT)
    beside, plan = printed("--against", run), printed(run)
    with serving({"run": Path(run)}, {}) as server:
        reader.go_to(server.address("run")).show("plan")

        assert reader.page.locator("#expected > p").first.inner_text() == beside["verdict"]
        assert [(row[1], row[2], int(row[3]), int(row[4]), row[7], row[8]) for row in cells(reader, 0)] == [
            tuple(row[name] for name in ("role", "operation", "expected_count", "measured_count", "verdict", "reason"))
            for row in sorted(beside["rows"], key=lambda row: row["verdict"])  # what differs stands first
        ]
        memory = plan["stages"][0]["memory"]
        bar = reader.page.locator("#expected .stack")
        assert bar.count() == 1
        widths = bar.locator("i").evaluate_all("(parts) => parts.map((part) => parseFloat(part.style.width))")
        parts = [memory[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer", "activations")]
        assert widths == pytest.approx([100 * part / memory["peak_bytes"] for part in parts], abs=0.01)
        assert "optimizer: " in bar.get_attribute("aria-label")
        assert not reader.errors


def test_the_recorded_peak_stands_under_its_stage(reader: Reader, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", model=MODEL, layout=LAYOUT, peaks=[(5 << 20, 6 << 20), (7 << 20, 8 << 20)])
    (row,) = printed("--against", run)["memory"]
    assert CliRunner().invoke(app, ["report", run, "-o", str(tmp_path / "report.html")]).exit_code == 0

    reader.load(tmp_path / "report.html").show("plan")

    bars = reader.page.locator("#expected .stack")
    widths = bars.evaluate_all(
        "(bars) => bars.map((bar) => [...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0))"
    )
    assert widths == pytest.approx([100 * row["planned"]["peak_bytes"] / row["measured_bytes"], 100], abs=0.01)
    assert bars.nth(1).get_attribute("aria-label") == "recorded peak: 7 MiB, reserved 8 MiB"
    text = reader.page.inner_text("#expected")
    assert "recorded on rank 1" in text
    assert f"Ranks 0, 1: {row['reason']}" in text
    assert not reader.errors


def test_the_report_has_it_too_and_a_run_without_sizes_has_not(reader: Reader, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", model=MODEL, layout=LAYOUT)
    write(synthesize(Job(pp=2, steps=3)), tmp_path / "unplanned")
    for name in ("run", "unplanned"):
        assert (
            CliRunner().invoke(app, ["report", str(tmp_path / name), "-o", str(tmp_path / f"{name}.html")]).exit_code
            == 0
        )

    reader.load(tmp_path / "run.html").show("plan")
    assert reader.page.locator("#expected > p").first.inner_text() == printed("--against", run)["verdict"]
    reader.load(tmp_path / "unplanned.html")

    assert not reader.page.locator("#views [data-view='plan']").is_visible()
    assert not reader.errors


def test_a_narrow_page_keeps_its_links_on_one_line_and_the_reasons_readable(reader: Reader, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", missing="all_gather", model=MODEL, layout=LAYOUT)
    assert CliRunner().invoke(app, ["report", run, "-o", str(tmp_path / "report.html")]).exit_code == 0
    reader.page.set_viewport_size({"width": 400, "height": 800})

    reader.load(tmp_path / "report.html").show("plan")

    links = reader.page.locator("#views button:visible")
    tops = links.evaluate_all("(links) => links.map((link) => link.getBoundingClientRect().top)")
    assert len(tops) > 5
    assert max(tops) == min(tops)
    heights = (
        reader.page.locator("#expected table")
        .first.locator("tbody tr")
        .evaluate_all("(rows) => rows.map((row) => row.getBoundingClientRect().height)")
    )
    assert 0 < max(heights) < 120
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= 400  # only the line and the table scroll
    reader.show("time")
    assert reader.page.locator("#breakdown-heading").is_visible()
    assert not reader.errors
