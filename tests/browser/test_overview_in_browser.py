"""The overview of a report in a real browser: its numbers are those of ``summary --json``, and lead to the timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import Summary, summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace.run import Run
from commtrace.viewer.overview import critical_tables, overview_resources
from commtrace.viewer.report import render
from tests.browser.page_texts import cells, duration, milliseconds
from tests.browser.reader import Reader
from tests.factory import make_run, span
from tests.viewer.hostile import HOSTILE

STEPS = 14


@dataclass(frozen=True)
class Report:
    path: Path
    summary: Summary
    embedded: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Return the longest step that counts."""
        steps = self.summary.all_steps
        return int(steps.step[np.where(steps.reason < 0, steps.duration_ns, 0).argmax()])


def written(run: Run, directory: Path) -> Report:
    analysis = analyse(run)
    summary, timeline = summarise_steps(OpenedRun.of(analysis), is_whole=True), Timeline.of_analysis(analysis)
    tables = dict(critical_tables(analysis, timeline, timeline.steps))
    page = render(summary, timeline, most_steps=5, views={**overview_resources(summary), **tables})
    path = directory / "report.html"
    path.write_text(page.html, encoding="utf-8")
    return Report(path, summary, page.embedded)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    faults = (Fault.parse("checkpoint=1:80@9:10"),)
    job = Job(pp=2, dp=2, microbatches=4, steps=STEPS, gpus_per_host=2, faults=faults)
    return written(synthesize(job).run, tmp_path_factory.mktemp("overview"))


@pytest.fixture
def opened(reader: Reader, report: Report) -> Reader:
    return reader.load(report.path)


def test_every_step_is_a_point_that_says_how_long_it_took(opened: Reader, report: Report) -> None:
    summary: Any = report.summary.to_json()
    counted = summary["run"]["steps"]["count"]
    chart = opened.page.locator("#steps-chart .uplot")

    assert opened.page.locator("#steps-note").inner_text().startswith(f"{counted} steps count · ")
    assert opened.page.locator("#steps-legend").inner_text().startswith("step\nmedian ")
    assert "1 warm-up" in opened.page.locator("#steps-note").inner_text()
    chart.press("End")
    assert opened.page.locator("#steps-chart .tooltip strong").inner_text().startswith(f"step {STEPS - 1} · ")
    chart.press("Home")
    assert opened.page.locator("#steps-chart .tooltip").inner_text().splitlines()[-1] == "does not count: warm-up"


def test_the_longest_step_is_named_and_leads_to_the_timeline(opened: Reader, report: Report) -> None:
    longest = opened.page.locator("#steps-outliers button").first

    assert longest.inner_text().startswith(f"step {report.longest}, ")
    longest.click()
    opened.wait_for_step(report.longest)
    assert opened.window()["step"] == report.longest


def test_a_step_outside_of_the_timeline_says_how_to_see_it(opened: Reader, report: Report) -> None:
    outside = next(step for step in range(1, STEPS) if step not in report.embedded)
    chart = opened.page.locator("#steps-chart .uplot")
    chart.press("Home")
    for _ in range(outside):
        chart.press("ArrowRight")
    chart.press("Enter")

    assert f"commtrace report RUN --steps {outside}" in opened.page.locator("#steps-answer").inner_text()


def test_steps_can_be_seen_along_the_time_of_the_run(opened: Reader) -> None:
    opened.page.select_option("#steps-along", "time")

    assert "time of the run" in (opened.page.locator("#steps-chart .uplot").get_attribute("aria-label") or "")
    assert opened.errors == []


def test_the_budget_is_a_bar_of_the_whole_run(opened: Reader, report: Report) -> None:
    opened.show("time")
    budget = report.summary.run_budget
    assert budget is not None
    text = opened.page.locator("#run-budget-bar").inner_text()

    assert f"training steps {100 * budget.job.training_ns / budget.job.wall_ns:.1f} %" in text
    shares = opened.page.evaluate(
        "[...document.querySelectorAll('#run-budget-bar .stack i')].map((piece) => parseFloat(piece.style.width))"
    )
    assert sum(shares) == pytest.approx(100, abs=0.1)
    opened.page.locator("#run-budget-ranks summary").click()
    opened.page.locator("#run-budget-table tbody tr").first.wait_for()  # The rows are made when it has opened.
    assert len(cells(opened, "#run-budget-table")) == 4


def test_bars_of_ranks_are_sorted_by_a_part(opened: Reader, report: Report) -> None:
    opened.show("time")
    opened.page.select_option("#breakdown-sort", "compute")
    ranks = sorted(report.summary.ranks, key=lambda rank: -rank.part("compute"))
    rows = cells(opened, "#breakdown-table")

    assert [row[0].split(" · ")[0] for row in rows] == [f"rank {rank.rank}" for rank in ranks]
    assert [row[2] for row in rows] == [milliseconds(rank.part("compute")) for rank in ranks]


def test_bars_of_steps_have_the_mean_of_the_ranks(opened: Reader, report: Report) -> None:
    opened.show("time")
    opened.page.select_option("#breakdown-by", "step")
    steps = report.summary.totals.steps
    rows = cells(opened, "#breakdown-table")

    assert [row[0] for row in rows] == [f"step {step}" for step in steps.step]
    assert [row[1] for row in rows] == [milliseconds(ns / 4) for ns in steps.ns.sum(axis=1)]
    opened.page.get_by_role("button", name=f"step {report.longest}", exact=True).click()
    opened.wait_for_step(report.longest)


def test_exposed_communication_is_that_of_the_summary(opened: Reader, report: Report) -> None:
    ranks, path = report.summary.ranks, report.summary.critical_path
    assert path is not None
    rows = {row[0]: row for row in cells(opened, "#exposed")}
    of_dp = [rank.exposed["dp"] for rank in ranks]
    saved = sum(share.ns for share in path.shares if (share.role, share.kind) == ("dp", "transfer")) / path.num_steps

    assert set(rows) >= {role for rank in ranks for role in rank.exposed}
    assert rows["dp"][3:5] == [
        duration(sum(times) / 4) for times in ([one.wait_ns for one in of_dp], [one.transfer_ns for one in of_dp])
    ]
    assert rows["dp"][6] == duration(saved)


def test_bandwidth_by_size_has_a_row_per_kind_of_calls(opened: Reader, report: Report) -> None:
    opened.show("communication")
    opened.page.locator("#bandwidth-section summary").click()
    bins = report.summary.totals.bandwidth.bins
    rows = cells(opened, "#bandwidth-table")

    assert len(rows) == len(bins)
    assert {(row[0], row[1], row[3], row[5]) for row in rows} == {
        (key.role, key.operation, str(key.group_size), str(len(own.busbw_gbps))) for key, own in bins.items()
    }
    opened.page.locator("#bandwidth-chart .uplot").press("Home")
    assert "of the best seen at this size" in opened.page.locator("#bandwidth-chart .tooltip").inner_text()


def test_modules_are_listed_and_a_click_leads_to_the_slowest_rank(reader: Reader, tmp_path: Path) -> None:
    rows = {
        rank: [
            row
            for step in range(4)
            for row in (
                span("step", 1_000 * step, 1_000 * step + 900, step=step),
                span("forward", 1_000 * step, 1_000 * step + 900, step=step),
                {**span("module", 1_000 * step, 1_000 * step + 400 + 100 * rank, step=step), "name": HOSTILE},
            )
        ]
        for rank in (0, 1)
    }
    reader.load(written(make_run(rows), tmp_path).path)

    (row,) = cells(reader, "#modules")
    assert row[0] == HOSTILE
    assert row[1] == "6"
    assert reader.errors == []


def test_a_report_without_these_data_leaves_the_sections_out(reader: Reader, report: Report, tmp_path: Path) -> None:
    run = synthesize(Job(dp=2, microbatches=2, steps=4)).run
    analysis = analyse(run)
    summary = replace(summarise_steps(OpenedRun.of(analysis)), run_budget=None)
    path = tmp_path / "report.html"
    path.write_text(render(summary, Timeline.of_analysis(analysis)).html, encoding="utf-8")
    reader.load(path)

    assert not reader.page.locator("#steps-section").is_visible()
    assert not reader.show("communication").page.locator("#bandwidth-section").is_visible()
    for section in ("#budget-section", "#modules-section"):
        assert not reader.show("time").page.locator(section).is_visible()
    assert reader.errors == []


def test_a_key_lights_up_the_critical_path_of_the_step(opened: Reader, report: Report) -> None:
    typical = opened.page.locator("#step option").filter(has_text="typical").get_attribute("value")
    opened.page.select_option("#step", typical)
    opened.wait_for_step(int(typical))
    opened.page.locator("#timeline").press("k")
    beside = opened.page.locator("#critical-beside")
    beside.locator("tbody tr").first.wait_for()
    rows = cells(opened, "#critical-beside")
    step = int(opened.window()["step"])
    steps = report.summary.all_steps
    (took,) = steps.duration_ns[steps.step == step]

    # The path begins where the step before it ends, if that is later than its first begin.
    assert beside.locator("h3").inner_text().startswith(f"Critical path of step {step}: ")
    assert sum(float(row[2].removesuffix(" %")) for row in rows) == pytest.approx(100, abs=0.06 * len(rows))
    assert rows == sorted(rows, key=lambda row: -float(row[2].removesuffix(" %")))
    assert beside.locator("h3").inner_text().endswith(duration(took))
    assert opened.page.locator("#show-critical").get_attribute("aria-pressed") == "true"

    rows_of_work = beside.locator("tbody tr").filter(has_text="backward")
    rows_of_work.first.click()
    opened.settle()
    window = opened.window()
    assert window["to"] - window["from"] < took

    opened.page.locator("#timeline").press("k")
    assert not beside.is_visible()
    assert opened.errors == []


def test_the_critical_path_follows_the_step(opened: Reader, report: Report) -> None:
    opened.page.click("#show-critical")
    other = next(step for step in report.embedded if step != opened.window()["step"])
    opened.page.select_option("#step", str(other))
    opened.wait_for_step(other)

    assert opened.page.locator("#critical-beside h3").inner_text().startswith(f"Critical path of step {other}: ")


def test_numbers_of_communication_lead_to_the_spans_behind_them(opened: Reader) -> None:
    opened.show("communication")
    opened.page.locator("#exposed tbody tr").filter(has_text="dp").click()
    opened.settle()
    assert "dp" in opened.page.locator("#pinned h3").inner_text()

    opened.show("communication").page.locator("#bandwidth-section summary").click()
    opened.page.locator("#bandwidth-table tbody tr").filter(has_text="all_reduce").first.click()
    assert "all_reduce" in opened.page.locator("#hits button").first.inner_text()
    assert opened.errors == []
