"""The report as a reader meets it: opened from a file, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.viewer.report import render
from tests.browser.reader import Reader
from tests.browser.written_reports import written
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob
from tests.viewer.hostile import HOSTILE

STAGES, MICROBATCHES = 2, 4


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = PipelineJob(
        stages=STAGES,
        microbatches=MICROBATCHES,
        data_parallel=2,
        transfer_ns=150_000,
        all_reduce_ns=1_000_000,
        optimizer_ns=1_000_000,
        steps=4,
    )
    return written(job.run(), tmp_path_factory.mktemp("report"))


@pytest.fixture
def opened(reader: Reader, report: Path) -> Reader:
    return reader.load(report)


def test_it_opens_without_errors_and_without_the_network(opened: Reader) -> None:
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("file:")] == []
    assert len(opened.requests) == 1


def test_every_forward_and_backward_is_drawn_on_its_rank(opened: Reader) -> None:
    for rank in range(2 * STAGES):
        for kind in ("forward", "backward"):
            drawn = opened.boxes(rank=rank, kind=kind)
            assert [box["microbatch"] for box in drawn] == list(range(MICROBATCHES))


def test_bubbles_are_drawn_where_a_stage_waits(opened: Reader) -> None:
    first_forward = opened.boxes(rank=2, kind="forward")[0]
    bubbles = opened.boxes(rank=2, kind="bubble")

    assert bubbles[0]["x"] + bubbles[0]["width"] <= first_forward["x"]
    assert bubbles[0]["width"] > 10


def test_the_first_stage_draws_before_the_second(opened: Reader) -> None:
    assert opened.boxes(rank=0, kind="forward")[0]["x"] < opened.boxes(rank=2, kind="forward")[0]["x"]


def test_the_ideal_schedule_comes_and_goes_with_a_key(opened: Reader) -> None:
    opened.page.focus("#timeline")
    opened.page.keyboard.press("p")
    opened.page.wait_for_selector("#show-plan[aria-pressed=true]")

    assert "mean forwards and backwards and no transfers" in opened.page.inner_text("#plan-note")
    opened.page.keyboard.press("p")
    opened.page.wait_for_selector("#show-plan[aria-pressed=false]")
    assert opened.page.inner_text("#plan-note") == ""


def test_without_a_pipeline_there_is_no_plan(reader: Reader, tmp_path: Path) -> None:
    reader.load(written(make_run({0: [span("step", 0, 10_000, step=0), span("forward", 0, 5_000, step=0)]}), tmp_path))
    assert reader.errors == []
    assert not reader.page.is_visible("#show-plan")


def test_the_step_selector_switches_the_step(opened: Reader) -> None:
    opened.choose_step(0, step=1)
    first = opened.window()["step"]
    opened.page.click("#next")
    opened.wait_for_step(2)

    assert (first, opened.window()["step"]) == (1, 2)


def test_the_last_step_has_no_next(opened: Reader) -> None:
    opened.choose_step(2, step=3)

    assert opened.page.is_disabled("#next")
    assert opened.page.is_enabled("#previous")


def test_the_wheel_with_ctrl_zooms_at_the_pointer(opened: Reader) -> None:
    box = opened.boxes(rank=0, kind="backward", microbatch=1)[0]
    before = opened.window()
    opened.point_at(box)
    opened.page.keyboard.down("Control")
    opened.page.mouse.wheel(0, -400)
    opened.page.keyboard.up("Control")
    opened.settle()
    after = opened.window()
    zoomed = opened.boxes(rank=0, kind="backward", microbatch=1)[0]

    assert after["to"] - after["from"] < 0.7 * (before["to"] - before["from"])
    assert zoomed["width"] > 1.4 * box["width"]
    assert zoomed["x"] < box["x"] + box["width"] / 2 < zoomed["x"] + zoomed["width"]


def test_dragging_pans(opened: Reader) -> None:
    opened.page.click("#zoom-in")
    opened.settle()
    before = opened.window()
    opened.point_at(opened.boxes(rank=1, kind="backward")[0])
    opened.page.mouse.down()
    opened.page.mouse.move(300, 400, steps=4)
    opened.page.mouse.up()
    opened.settle()

    assert opened.window()["from"] != before["from"]
    assert opened.window()["to"] - opened.window()["from"] == pytest.approx(before["to"] - before["from"])


def test_the_keyboard_zooms_pans_and_goes_back(opened: Reader) -> None:
    opened.page.focus("#timeline")
    whole = opened.window()
    opened.page.keyboard.press("+")
    opened.settle()
    zoomed = opened.window()
    opened.page.keyboard.press("ArrowRight")
    opened.settle()
    panned = opened.window()
    opened.page.keyboard.press("0")
    opened.settle()

    assert zoomed["to"] - zoomed["from"] < whole["to"] - whole["from"]
    assert panned["from"] > zoomed["from"]
    assert opened.window() == whole


def test_the_tooltip_tells_about_a_message(opened: Reader) -> None:
    opened.page.click("#lanes")
    opened.settle()
    message = max(opened.boxes(rank=2, headline="recv · pp"), key=lambda box: float(box["width"]))
    opened.point_at(message)

    assert opened.tooltip().startswith("recv · pp")
    for fact in (
        "rank 2 · pp1 dp0 · node0",
        "1.02 kB",
        "peer\nrank 0",
        "0, 2 (seq 8)",
        "wait\n1 ms",
        "transfer\n150 µs",
    ):
        assert fact in opened.tooltip()


def test_the_tooltip_of_a_bubble_says_what_was_waited_for(opened: Reader) -> None:
    opened.point_at(opened.boxes(rank=2, kind="bubble")[0])

    assert opened.tooltip().startswith("pipeline bubble")
    assert "waits for\nrecv · pp" in opened.tooltip()


def test_the_tooltip_goes_away(opened: Reader) -> None:
    opened.point_at(opened.boxes(rank=0, kind="forward")[0])
    opened.page.mouse.move(5, 5)
    opened.settle()

    assert opened.page.locator("#tooltip").is_hidden()


def test_communication_lanes_are_shown_for_one_rank_or_for_all(opened: Reader) -> None:
    none = opened.boxes(table="communication")
    canvas = opened.page.locator("#timeline").bounding_box()
    row = opened.boxes(rank=1, kind="forward")[0]
    opened.page.mouse.click(canvas["x"] + 60, canvas["y"] + row["y"] + 15)
    opened.settle()
    one = opened.boxes(table="communication")
    opened.page.click("#lanes")
    opened.settle()
    every = opened.boxes(table="communication")

    assert none == []
    assert {box["rank"] for box in one} == {1}
    assert {box["rank"] for box in every} == {0, 1, 2, 3}
    assert opened.page.get_attribute("#lanes", "aria-pressed") == "true"


def test_a_click_on_a_message_shows_its_peers_and_who_came_last(opened: Reader) -> None:
    opened.point_at(opened.boxes(rank=2, kind="bubble")[0])
    opened.page.mouse.down()
    opened.page.mouse.up()
    pinned = opened.page.inner_text("#pinned")

    assert pinned.startswith("pipeline bubble")
    assert "rank 0 · pp0 dp0 · node0 came last, 1 ms after rank 2 · pp1 dp0 · node0." in pinned
    assert opened.page.locator("#pinned tbody tr").count() == 2
    assert opened.page.is_hidden("#tooltip")
    opened.page.focus("#timeline")
    opened.page.keyboard.press("Escape")
    assert opened.page.is_hidden("#pinned")


def test_a_selected_range_is_measured_and_divided(opened: Reader) -> None:
    row = opened.boxes(rank=0, kind="forward")[0]
    canvas = opened.page.locator("#timeline").bounding_box()
    opened.page.keyboard.down("Shift")
    opened.page.mouse.move(canvas["x"] + row["x"], canvas["y"] + row["y"] + 5)
    opened.page.mouse.down()
    opened.page.mouse.move(canvas["x"] + row["x"] + row["width"], canvas["y"] + row["y"] + 5, steps=3)
    opened.page.mouse.up()
    opened.page.keyboard.up("Shift")
    shares = [
        float(cell.removesuffix(" %")) for cell in opened.page.locator("#selected td:last-child").all_inner_texts()
    ]

    assert "selected, 4 ranks shown" in opened.page.inner_text("#selected")
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_a_click_in_the_small_picture_moves_the_window_there(opened: Reader) -> None:
    whole = opened.window()
    for _ in range(4):
        opened.page.click("#zoom-in")
    opened.settle()
    before = opened.window()
    small = opened.page.locator("#minimap").bounding_box()
    opened.page.mouse.click(small["x"] + 0.9 * small["width"], small["y"] + small["height"] / 2)
    opened.settle()
    after = opened.window()

    assert after["to"] - after["from"] == pytest.approx(before["to"] - before["from"])
    assert (after["from"] + after["to"]) / 2 > whole["from"] + 0.75 * (whole["to"] - whole["from"])
    assert before["to"] < after["to"]


def test_the_search_leads_to_a_rank_and_to_a_microbatch(opened: Reader) -> None:
    opened.page.focus("#timeline")
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("mb 3")
    hits = opened.page.locator("#hits button").all_inner_texts()
    opened.page.keyboard.press("Enter")

    assert hits[0].startswith("forward · rank 0")
    assert "microbatch\n3" in opened.page.inner_text("#pinned")
    opened.page.fill("#search", "no such name")
    assert opened.page.inner_text("#hits") == "Nothing of that name in this step."


def test_a_link_holds_the_view(opened: Reader) -> None:
    opened.choose_step(2, step=3)
    opened.page.select_option("#grouping", "stage")
    opened.page.click("#zoom-in")
    opened.page.wait_for_url("**/report.html#step=3&*rows=stage*")
    before, address = opened.window(), opened.page.url
    opened.page.goto("about:blank")
    opened.page.goto(address)
    opened.page.wait_for_selector("html[data-ready]")

    assert opened.window() == {name: pytest.approx(value, abs=1) for name, value in before.items()}
    assert opened.page.input_value("#grouping") == "stage"


def test_tables_are_sorted_by_a_click_on_a_heading(opened: Reader) -> None:
    opened.show("communication")
    column = opened.page.locator("#communication th", has_text="bytes").get_by_role("button")
    column.click()
    heading = opened.page.locator("#communication th", has_text="bytes")

    assert heading.get_attribute("aria-sort") == "descending"
    column.click()
    assert heading.get_attribute("aria-sort") == "ascending"


def test_help_is_a_key_away(opened: Reader) -> None:
    opened.page.keyboard.press("?")

    assert "measure a range" in opened.page.inner_text("#help")
    opened.page.keyboard.press("Escape")
    assert opened.page.is_hidden("#help")


def test_many_ranks_begin_with_the_median_and_the_slowest_of_each_stage(reader: Reader, tmp_path: Path) -> None:
    job = PipelineJob(stages=2, microbatches=2, data_parallel=16)
    reader.load(written(job.run(), tmp_path))
    few = {box["rank"] for box in reader.boxes(kind="forward")}
    canvas = reader.page.locator("#timeline").bounding_box()
    reader.page.mouse.click(canvas["x"] + 60, canvas["y"] + 24 + 10)
    reader.settle()
    opened = {box["rank"] for box in reader.boxes(kind="forward")}

    assert reader.page.input_value("#grouping") == "stage"
    assert len(few) <= 4
    assert set(range(12)) <= opened


def test_the_numbers_of_the_summary_are_there(opened: Reader) -> None:
    for view, panels in {
        "time": ("Where the time of a step goes", "Critical path", "Lost time"),
        "findings": ("Findings",),
        "pipeline": ("Pipeline",),
        "communication": ("Exposed communication", "Communication"),
        "recording": ("What these numbers rest on",),
    }.items():
        shown = opened.show(view).page.locator("section h2:visible").all_inner_texts()
        assert [panel for panel in panels if panel not in shown] == []
    opened.show("time")
    assert opened.page.locator("#breakdown .stack").count() == 4
    opened.page.click("#breakdown-details summary")
    cells = opened.page.locator("#breakdown-table tbody tr").nth(0).locator("td").all_inner_texts()
    wall, *rest = [float(cell) for cell in cells[1:]]
    assert sum(rest[:-1]) == pytest.approx(wall, abs=0.05)  # the last column is hidden communication


def test_the_critical_path_and_the_lost_time_add_up(opened: Reader) -> None:
    opened.show("time")
    for panel in ("critical-path", "lost-time"):
        rows = opened.page.locator(f"#{panel} tbody tr").all()
        shares = [float(row.locator("td").last.inner_text().removesuffix(" %")) for row in rows]
        assert opened.page.locator(f"#{panel} .stack").count() == 1
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(rows))
    assert "rank 0, forward" in opened.page.inner_text("#critical-path")


def test_light_and_dark(opened: Reader) -> None:
    def background() -> str:
        colour: str = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return colour

    light = background()
    opened.page.click("#theme")

    assert background() != light
    opened.page.emulate_media(color_scheme="light")
    opened.page.emulate_media(color_scheme="dark")
    assert background() != light


def test_a_hostile_name_is_only_text(reader: Reader, tmp_path: Path) -> None:
    run = make_run({0: [span("step", 0, 9, step=0), span("user", 1, 8, step=0) | {"name": HOSTILE}]})

    reader.load(written(run, tmp_path))
    reader.point_at(reader.boxes(kind="user")[0])

    assert (reader.errors, reader.dialogs) == ([], [])
    assert "<script>alert(1)</script>" in reader.tooltip()


def test_the_pointer_is_as_wide_as_the_clocks_are_uncertain(reader: Reader, tmp_path: Path) -> None:
    run = PipelineJob(stages=2, microbatches=2, nodes={0: "node0", 1: "node1"}).run()
    analysis = analyse(run)
    timeline = Timeline(analysis.run, analysis.matches, analysis.roles, {"p50": 1000, "p99": 40_000, "max": 50_000})
    path = tmp_path / "report.html"
    path.write_text(render(summarise_steps(OpenedRun.of(analysis)), timeline).html, encoding="utf-8")
    reader.load(path)
    reader.page.focus("#timeline")
    for _ in range(60):
        reader.page.keyboard.press("+")
    reader.settle()

    assert "comparable to within 40 µs" in reader.page.inner_text("#precision")
    assert reader.window()["to"] - reader.window()["from"] >= 40_000


def test_many_ranks_are_scrolled(reader: Reader, tmp_path: Path) -> None:
    rows = {rank: [span("step", 0, 9, step=0), span("forward", 0, 9, step=0, microbatch=0)] for rank in range(64)}
    reader.load(written(make_run(rows), tmp_path))
    reader.page.select_option("#grouping", "none")
    reader.settle()
    top = {box["rank"] for box in reader.boxes(kind="forward")}
    reader.page.focus("#timeline")
    for _ in range(80):
        reader.page.keyboard.press("ArrowDown")
    reader.settle()
    bottom = {box["rank"] for box in reader.boxes(kind="forward")}

    assert (min(top), max(bottom)) == (0, 63)
    assert 63 not in top
    assert 0 not in bottom


def test_a_run_without_complete_steps_says_so(reader: Reader, tmp_path: Path) -> None:
    reader.load(written(make_run({0: [span("step", 0, 5, step=0)], 1: [span("step", 0, 5, step=1)]}), tmp_path))

    assert reader.errors == []
    assert "No step was recorded, so there is no timeline." in reader.page.inner_text("main")


def test_what_the_search_finds_is_said_in_full(opened: Reader) -> None:
    room, needed = opened.page.evaluate(
        """() => {
            const input = document.getElementById("search");
            const style = getComputedStyle(input);
            const context = document.createElement("canvas").getContext("2d");
            context.font = style.font;
            const inside = input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
            return [inside, context.measureText(input.placeholder).width];
        }"""
    )
    assert needed > 0
    assert needed <= room


def test_that_the_navigation_goes_on_is_seen_on_a_narrow_page(opened: Reader) -> None:
    opened.page.set_viewport_size({"width": 820, "height": 900})
    shown, all_of_it, mask = opened.page.evaluate(
        """() => {
            const nav = document.getElementById("views");
            return [nav.clientWidth, nav.scrollWidth, getComputedStyle(nav).maskImage];
        }"""
    )
    assert "gradient" in mask
    if all_of_it > shown:  # its last entry is clear of what fades
        opened.page.evaluate("() => { const nav = document.querySelector('nav'); nav.scrollLeft = nav.scrollWidth; }")
        last = opened.page.evaluate(
            "() => document.querySelector('nav').lastElementChild.getBoundingClientRect().right"
        )
        assert last <= shown - 64
