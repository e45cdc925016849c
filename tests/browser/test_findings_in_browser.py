"""The first screen of a run: its state, its findings, and the way from each to its evidence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import Summary, summarise, summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.cli.main import app
from commtrace.findings.finding import HANG, LOST, SLOW, Finding
from commtrace.synth import Fault, Job, synthesize, write
from commtrace.viewer.health import health_resources
from commtrace.viewer.report import render
from tests.browser.reader import Reader
from tests.factory import make_run, span
from tests.viewer.hang_reports import hang

SLOW_RANK, SLOW_LINK = 37, 20
SCREEN = {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("findings") / "run"
    faults = (Fault.parse(f"slow-rank={SLOW_RANK}:1.3"), Fault.parse(f"slow-link={SLOW_LINK}:4@10:13"))
    write(synthesize(Job(pp=4, dp=8, tp=2, microbatches=4, steps=24, faults=faults)), path)
    return path


@pytest.fixture(scope="module")
def summary(run: Path) -> Summary:
    return summarise(run)


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    page = run.parent / "report.html"
    assert CliRunner().invoke(app, ["report", str(run), "-o", str(page)]).exit_code == 0
    return page


@pytest.fixture
def opened(reader: Reader, report: Path) -> Reader:
    reader.page.set_viewport_size(SCREEN)
    return reader.load(report)


def finding_of(summary: Summary, rank: int) -> Finding:
    return next(finding for finding in summary.slow if rank in finding.ranks)


def click_on(reader: Reader, words: str) -> None:
    reader.page.locator("#found > li > button").filter(has_text=words).click()
    reader.settle()


def test_state_findings_figures_and_timeline_are_on_the_first_screen(opened: Reader) -> None:
    page = opened.page

    assert page.evaluate("scrollY") == 0
    for part in ("#state-heading", "#found", "#figures", "#steps-chart", "#timeline"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] <= SCREEN["height"], part
        assert box["height"] > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= SCREEN["width"]
    assert opened.errors == []


def test_the_findings_are_those_of_the_commands(opened: Reader, summary: Summary) -> None:
    listed = opened.page.locator("#found .what").all_inner_texts()
    costly = [one for one in summary.findings if one.kind != LOST or (one.share or 0) >= 0.005]

    assert listed == [one.words for one in costly]
    assert "rank-hours a day · since step 1, " in opened.page.inner_text("#found")  # there is no GPU in it
    assert {one.kind for one in costly} == {SLOW, LOST}
    assert opened.page.inner_text("#verdict") == ""  # it would say once more what the list says
    assert opened.page.inner_text("#state-heading .badge") == summary.state
    assert f"{summary.together_ns / 1e6:.1f} ms" in opened.page.inner_text("#state-heading")


def test_the_row_of_the_costliest_finding_is_shown_and_marked_to_begin_with(opened: Reader) -> None:
    assert opened.boxes(rank=SLOW_RANK, kind="forward")
    (row,) = {box["y"] for box in opened.boxes(rank=SLOW_RANK, kind="forward")}
    edge = f"[...document.getElementById('timeline').getContext('2d').getImageData(1, {row} + 15, 1, 1).data]"
    red, green, blue, _ = opened.page.evaluate(edge)

    assert red > 1.5 * max(green, blue)
    opened_finding = opened.page.locator(".finding.open")
    assert opened_finding.locator(".what").inner_text().startswith(f"rank {SLOW_RANK} on ")
    assert opened_finding.locator(".links button").all_inner_texts() == ["Heat map", "Findings"]


def test_a_click_on_a_finding_shows_its_step_its_rank_and_its_evidence(opened: Reader, summary: Summary) -> None:
    finding = finding_of(summary, SLOW_LINK)
    assert finding.occurrence is not None
    before = opened.window()["step"]
    click_on(opened, finding.words)
    opened.page.wait_for_selector(", ".join(f"#stage[data-step='{step}']" for step in finding.occurrence.steps))
    opened.settle()
    window = opened.window()

    assert before not in finding.occurrence.steps
    assert window["step"] in finding.occurrence.steps
    assert window["from"] < 0  # fitted, with a margin
    assert opened.boxes(rank=SLOW_LINK, kind="forward")
    behind = opened.page.locator(".finding.open .behind").inner_text()
    assert finding.evidence in behind
    assert finding.advice in behind
    assert f"Most is added on rank {SLOW_LINK} on node2: " in opened.page.inner_text("#difference")
    assert opened.errors == []


def test_a_step_is_compared_with_the_typical_one_by_part_and_rank(opened: Reader) -> None:
    typical = opened.window()["step"]
    assert not opened.page.locator("#difference").is_visible()
    click_on(opened, f"rank {SLOW_LINK} on")
    opened.page.locator("#difference button").click()
    parts, ranks = (opened.page.locator("#difference-beside table").nth(number) for number in (0, 1))

    assert f"longer than the typical step {typical:.0f}." in opened.page.inner_text("#difference")
    assert ranks.locator("tbody tr").first.locator("td").first.inner_text().startswith(f"rank {SLOW_LINK} ")
    assert "forward" in parts.locator("tbody td:first-child").all_inner_texts()
    opened.page.locator("#timeline").press("x")
    assert not opened.page.locator("#difference-beside").is_visible()
    assert opened.errors == []


def test_lost_time_leads_to_its_numbers_and_back(opened: Reader) -> None:
    click_on(opened, "exposed communication")

    assert opened.page.locator("#exposed-heading").is_visible()
    assert opened.page.locator("#state-heading").is_visible()
    opened.page.go_back()
    assert opened.page.locator("#timeline").is_visible()


def test_a_link_to_a_view_opens_it(opened: Reader, report: Path) -> None:
    opened.show("heat-map")
    address = opened.page.url
    opened.page.goto("about:blank")
    opened.page.goto(address)
    opened.page.wait_for_selector("html[data-ready]")

    assert "view=heat-map" in address
    assert opened.page.locator("#heat-map canvas").is_visible()
    assert opened.page.get_attribute("#views [data-view='heat-map']", "aria-current") == "page"


def test_the_heat_map_shows_what_a_finding_names(opened: Reader, summary: Summary) -> None:
    page = opened.show("heat-map").page
    assert page.input_value("#heat-map-colours") == "slowness"
    assert (page.input_value("#heat-map-rows"), page.input_value("#heat-map-columns")) == ("dp", "pp")
    click_on(opened, f"rank {SLOW_LINK} on")
    page.locator(".finding.open .links button").filter(has_text="Heat map").click()

    assert page.locator("#heat-map canvas").is_visible()
    assert page.input_value("#heat-map-colours") == "bandwidth"
    assert (page.input_value("#heat-map-rows"), page.input_value("#heat-map-columns")) == ("rank", "step")


@pytest.mark.parametrize("has_step", [True, False])
def test_a_job_that_hangs_says_so_first_and_shows_where_its_ranks_are(
    reader: Reader, tmp_path: Path, has_step: bool
) -> None:
    # Of two ranks that recorded different steps none is there in full.
    run = make_run({rank: [span("step", 0, 10, step=0 if has_step else rank)] for rank in range(2)})
    analysis = analyse(run)
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    (folder / "hang-001.json").write_text(json.dumps(hang(0, "train.py:8 loss").to_json()))
    stop = Finding(id="hang/1", kind=HANG, who="rank 1", ranks=(1,), evidence="Rank 1 has not come.", advice="Look.")
    summary = replace(
        summarise_steps(OpenedRun.of(analysis)), state="hangs since noon", findings=(stop,), verdict=stop.evidence
    )
    views = health_resources(replace(run, path=tmp_path))
    page = tmp_path / "report.html"
    page.write_text(render(summary, Timeline.of_analysis(analysis), views=views).html, encoding="utf-8")
    reader.load(page)

    assert reader.page.inner_text("#state-heading").splitlines() == ["hangs since noon", "The job makes no progress"]
    assert reader.page.locator("#found .what").all_inner_texts() == ["rank 1: no progress"]
    assert reader.page.locator("#stops-heading").is_visible() != has_step  # there is nothing else to show
    click_on(reader, "rank 1")
    assert reader.page.locator("#stops-heading").is_visible()
    assert "train.py:8 loss" in reader.page.locator("#stops pre").text_content()
    assert reader.errors == []


def test_a_figure_leads_to_what_it_is_made_of(opened: Reader, summary: Summary) -> None:
    figure = opened.page.locator(".figure").filter(has_text="Bubble")
    ranks = summary.ranks
    share = sum(rank.part("bubble") for rank in ranks) / sum(rank.wall_ns for rank in ranks)

    assert f"{share:.1%}".replace("%", " %") == figure.locator("strong").inner_text()
    figure.click()
    assert opened.page.locator("#pipeline-heading").is_visible()
