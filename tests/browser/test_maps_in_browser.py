"""The maps of a report in a real browser: their numbers are those of the analysis, and they lead to the timeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.communication.table import Detail, communication_table
from commtrace.analysis.comparison.compare import step_series
from commtrace.analysis.judged_run import measure_job
from commtrace.analysis.rank_steps import rank_steps
from commtrace.analysis.straggler_report import report_of_steps
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.viewer.comparison import comparison_resources
from commtrace.viewer.health import health_resources
from commtrace.viewer.network import measure_network, network_resources
from commtrace.viewer.report import render
from commtrace.viewer.whole_run import map_resources, slowdown_resources
from tests.browser.reader import Reader
from tests.pipeline_factory import PipelineJob
from tests.viewer.hang_reports import hang
from tests.viewer.hostile import HOSTILE

SLOW = 5  # stage 1, replica 2


FASTER = PipelineJob(
    stages=2,
    microbatches=4,
    data_parallel=3,
    transfer_ns=150_000,
    all_reduce_ns=1_000_000,
    optimizer_ns=1_000_000,
    steps=4,
    nodes={rank: f"node{rank // 3}" for rank in range(6)},
)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyse(replace(FASTER, extra_forward_ns={SLOW: 325_000}).run())


@pytest.fixture(scope="module")
def report(analysis: Analysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("maps") / "report.html"
    views = {
        **map_resources(rank_steps(analysis), measure_job(analysis).stragglers.work.steps),
        **network_resources(analysis.run, measure_network(analysis)),
        **slowdown_resources(OpenedRun.of(analysis), measure_job(analysis).stragglers.work),
        **comparison_resources(
            OpenedRun.of(analyse(replace(FASTER.run(), path=Path("faster")))), OpenedRun.of(analysis)
        ),
    }
    page = render(summarise_steps(OpenedRun.of(analysis)), Timeline.of_analysis(analysis), views=views)
    path.write_text(page.html, encoding="utf-8")
    return path


@pytest.fixture
def opened(reader: Reader, report: Path) -> Reader:
    return reader.load(report)


def walk(opened: Reader, *keys: str, panel: str = "#heat-map") -> str:
    """Move the cursor of a heat map and return what is said of its cell."""
    canvas = opened.page.locator(f"{panel} canvas")
    canvas.focus()
    for key in keys:
        canvas.press(key)
    text: str = opened.page.locator(f"{panel} .heat-map p").inner_text()
    return text


def test_the_slow_rank_stands_out_over_data_and_pipeline_parallel(opened: Reader) -> None:
    opened.show("heat-map")
    assert opened.errors == []
    assert walk(opened, "ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown") == "1.100 × · dp 2, pp 1 · rank 5"


def test_its_numbers_are_those_of_the_summary(opened: Reader, analysis: Analysis) -> None:
    opened.show("heat-map")
    opened.page.select_option("#heat-map-colours", "bubble")
    opened.page.select_option("#heat-map-rows", "rank")
    opened.page.select_option("#heat-map-columns", "host")

    bubble_ns = summarise_steps(OpenedRun.of(analysis)).ranks[3].part("bubble")

    assert (
        walk(opened, "ArrowRight", *["ArrowDown"] * 3, "ArrowRight")
        == f"{bubble_ns / 1e6:.3g} ms · rank 3, node1 · rank 3"
    )


def test_enter_shows_the_rank_in_its_step(opened: Reader) -> None:
    opened.show("heat-map")
    opened.page.select_option("#heat-map-rows", "rank")
    opened.page.select_option("#heat-map-columns", "step")

    walk(opened, "ArrowRight", *["ArrowDown"] * SLOW, "ArrowRight", "ArrowRight", "Enter")

    opened.wait_for_step(3)
    assert opened.boxes(rank=SLOW, kind="forward")


def test_the_pointer_shows_the_value_and_a_click_the_rank(opened: Reader) -> None:
    opened.show("heat-map")
    canvas = opened.page.locator("#heat-map canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 60, "y": 10})

    assert opened.page.locator("#heat-map .tooltip").inner_text().split("\n") == ["1.000 ×", "dp 0, pp 0", "rank 0"]

    canvas.click(position={"x": 60, "y": 10})
    opened.settle()
    assert opened.boxes(rank=0, kind="forward")


def test_messages_between_nodes_are_those_of_the_summary(opened: Reader, analysis: Analysis) -> None:
    opened.show("network")
    opened.page.select_option("#network-traffic", "messages")
    opened.page.select_option("#network-colours", "bytes")
    rows = [row for row in summarise_steps(OpenedRun.of(analysis)).communication if row.operation == "recv"]

    said = [
        walk(opened, *keys, panel="#network") for keys in (["ArrowRight", "ArrowRight"], ["ArrowDown", "ArrowLeft"])
    ]

    half = sum(row.num_bytes or 0 for row in rows) / 2e3  # from either node to the other
    assert [one.split(" · ")[:2] for one in said] == [
        [f"{half:.3g} kB in all steps", "node0 to node1"],
        [f"{half:.3g} kB in all steps", "node1 to node0"],
    ]


def test_groups_are_those_of_the_communication_by_group(opened: Reader, analysis: Analysis) -> None:
    opened.show("communication")
    context = analysis.context
    by_group = communication_table(
        context.run, context.matches, analysis.partition, context.roles, context.steps, Detail.GROUP
    )

    shown = opened.page.locator("#groups tbody tr").all_inner_texts()

    assert [[*row.split("\t")[:2], row.split("\t")[4]] for row in shown] == [
        [row.role, row.operation, str(row.count)] for row in by_group
    ]
    of_slow_rank = next(row for row in shown if row.startswith("dp\tall_reduce\t3–5"))
    assert of_slow_rank.endswith("(of 3)")
    assert f"rank {SLOW}: 100.0 %" in of_slow_rank


def test_the_slowdown_of_each_stage_is_that_of_the_replay(opened: Reader, analysis: Analysis) -> None:
    opened.show("findings")
    by_stage = report_of_steps(OpenedRun.of(analysis)).slowdown.by_stage
    opened.page.click("#slowdown summary")
    opened.page.select_option("#slowdown-by", "stage")

    shown = opened.page.locator("#slowdown tbody tr").all_inner_texts()

    assert [row.split("\t")[:2] for row in shown] == [
        [str(stage), f"{slowdown:.4f}"] for stage, slowdown in sorted(by_stage.items(), key=lambda one: -one[1])
    ]


def test_another_run_is_compared_and_drawn_under_this_one(opened: Reader, analysis: Analysis) -> None:
    opened.show("comparison")
    rows = opened.page.locator("#comparison tbody").first.locator("tr").all_inner_texts()
    verdict = opened.page.locator("#comparison > p").first.inner_text()
    opened.show("overview").page.focus("#timeline")
    opened.page.keyboard.press("o")
    opened.page.wait_for_selector("#show-other[aria-pressed=true]")

    step_ms = [series.wall_ns[0] / 1e6 for series in (step_series(analyse(FASTER.run())), step_series(analysis))]
    assert rows[0].split("\t")[:3] == ["step", *(f"{ms:.2f}" for ms in step_ms)]
    assert verdict.startswith("Whether a step of")  # of 3 steps
    assert "of the other run" in opened.page.locator("#plan-note").inner_text()
    opened.page.keyboard.press("o")
    opened.page.wait_for_selector("#show-other[aria-pressed=false]")
    assert opened.errors == []


def test_hangs_show_their_stacks_and_no_name_becomes_markup(reader: Reader, analysis: Analysis, tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    (folder / "hang-001.json").write_text(json.dumps(hang(0, f"{HOSTILE}.py:1 f").to_json()))
    ranks = {rank: replace(trace, dropped={"stall": rank + 1}) for rank, trace in analysis.recorded.ranks.items()}
    views = health_resources(replace(analysis.recorded, path=tmp_path, ranks=ranks))
    path = tmp_path / "report.html"
    page = render(summarise_steps(OpenedRun.of(analysis)), Timeline.of_analysis(analysis), views=views)
    path.write_text(page.html, encoding="utf-8")
    opened = reader.load(path)

    opened.show("recording")

    assert opened.errors == []
    assert "<script>alert(1)" in opened.page.locator("#stops pre").inner_text()
    assert opened.page.locator("#stops pre *").count() == 0
    lost = opened.page.locator("#coverage .data-table", has_text="kinds").locator("tbody tr").all_inner_texts()
    assert lost[0].split("\t") == ["5", "6", "6 stall"]


def test_a_report_without_maps_has_no_empty_panel(reader: Reader, analysis: Analysis, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(
        render(summarise_steps(OpenedRun.of(analysis)), Timeline.of_analysis(analysis)).html, encoding="utf-8"
    )
    reader.load(path)

    assert reader.errors == []
    assert not reader.page.locator("#show-other").is_visible()
    for view in ("heat-map", "network", "comparison", "plan"):
        assert not reader.page.locator(f"#views [data-view='{view}']").is_visible()
    assert not reader.show("communication").page.locator("#groups-section").is_visible()
