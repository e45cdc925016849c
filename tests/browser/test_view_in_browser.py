"""The page of ``commtrace view``: boxes are read when their rows come into view."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.comparison.compare import compare, step_series
from commtrace.analysis.summary import summarise
from commtrace.analysis.windows.run import open_run
from commtrace.cli.main import app
from commtrace.history.runs import list_runs
from commtrace.synth import Fault, Job, synthesize, write
from commtrace.viewer.run_view import RunView
from commtrace.viewer.server import RunServer
from tests.browser.page_texts import cells, duration, milliseconds
from tests.browser.reader import Reader
from tests.browser.serving import serving

RANKS = 64


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    job = Job(pp=4, dp=16, microbatches=4, steps=14, faults=(Fault("slow-rank", (37,), 1.5),))
    write(synthesize(job), directory / "many")
    write(synthesize(Job(pp=2, steps=4)), directory / "few")
    return directory


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[RunServer]:
    assert CliRunner().invoke(app, ["summary", str(runs / "many"), "--keep"]).exit_code == 0
    listed = list_runs(runs, now_ns=time.time_ns()).to_json()
    with serving({name: runs / name for name in ("few", "many")}, listed) as server:
        yield server


def opened(reader: Reader, server: RunServer) -> Reader:
    reader.go_to(server.address("many"))
    reader.page.locator("#stage").scroll_into_view_if_needed()
    reader.settle()
    return reader


def costliest(page: Any) -> str:
    """The first finding that is listed."""
    words: str = page.locator("#found .what").first.inner_text()
    return words


def read_ranks(reader: Reader, table: str = "work") -> set[int]:
    """Ranks whose boxes the page has asked for."""
    asked: set[int] = set()
    for request in reader.requests:
        if found := re.search(rf"/step/\d+/{table}\?ranks=(.*)$", request):
            for part in found[1].split(","):
                first, _, last = part.partition("-")
                asked |= set(range(int(first), int(last or first) + 1))
    return asked


def test_a_closed_group_reads_the_boxes_of_its_representatives(reader: Reader, server: RunServer, runs: Path) -> None:
    page = opened(reader, server).page

    assert costliest(page) == summarise(runs / "many").findings[0].words
    assert "rank 37" in page.locator("#found").inner_text().lower()
    shown = {box["rank"] for box in reader.boxes()}
    assert 37 in shown
    assert shown == read_ranks(reader)
    assert len(shown) == 8
    assert not reader.errors


def test_opening_a_group_reads_its_ranks_once(reader: Reader, server: RunServer) -> None:
    opened(reader, server)
    before = read_ranks(reader)

    canvas = reader.page.locator("#timeline").bounding_box()
    with reader.page.expect_response(re.compile(r"/work\?ranks=")):
        reader.page.mouse.click(canvas["x"] + 40, canvas["y"] + 34)  # the heading of stage 0

    assert read_ranks(reader) - before == set(range(16)) - before
    asked = [request for request in reader.requests if "/work?ranks=" in request]
    assert len(asked) == 2
    assert not reader.errors


def test_a_pinned_collective_reads_all_that_took_part(reader: Reader, server: RunServer) -> None:
    opened(reader, server)
    waits = reader.boxes(table="stalls", headline="wait for dp")
    longest = max(waits, key=lambda box: box["width"])

    reader.point_at(longest)
    canvas = reader.page.locator("#timeline").bounding_box()
    reader.page.mouse.click(
        canvas["x"] + longest["x"] + longest["width"] / 2, canvas["y"] + longest["y"] + longest["height"] / 2
    )
    reader.page.wait_for_selector("#pinned table")

    members = {rank for rank in range(RANKS) if rank // 16 == longest["rank"] // 16}
    assert members <= read_ranks(reader, "communication")
    assert reader.page.locator("#pinned tbody tr").count() == 16
    assert "came last" in reader.page.locator("#pinned").inner_text()


def test_any_step_can_be_shown(reader: Reader, server: RunServer) -> None:
    page = opened(reader, server).page
    listed = page.locator("#step option").evaluate_all("(options) => options.map((option) => Number(option.value))")
    other = next(step for step in range(1, 14) if step not in listed)

    page.fill("#any-step", str(other))
    page.press("#any-step", "Enter")
    reader.wait_for_step(other)

    assert reader.window()["step"] == other
    page.fill("#any-step", "99")
    page.press("#any-step", "Enter")
    assert "was not recorded" in page.evaluate("document.getElementById('any-step').validationMessage")
    assert not reader.errors


def test_the_list_of_runs_leads_to_their_pages(reader: Reader, server: RunServer, runs: Path) -> None:
    reader.page.goto(server.address())
    reader.page.wait_for_selector("#runs tbody tr")

    rows = {row[0]: row for row in cells(reader, "#runs")}
    listed: Any = server.list_runs()
    facts = {run["directory"]: run["facts"] for run in listed["runs"]}
    assert list(rows) == [run["directory"] for run in reversed(listed["runs"])]  # the newest first
    assert rows["many"][1:3] == ["ended", verdict_of(server, "many")]
    assert "rank 37" in rows["many"][2]
    assert rows["few"][2] == "not read yet"
    assert [row[3] for row in rows.values()] == [duration(facts[name]["step_ns"]) for name in rows]
    assert [rows["many"][column] for column in (5, 6)] == ["64", "8"]
    reader.page.locator("#runs tbody tr").filter(has_text="few").click()
    reader.page.wait_for_selector("html[data-ready] #stage[data-step]")

    assert "/run/few/" in reader.page.url
    reader.page.click("#all-runs")
    reader.page.wait_for_selector("#runs tbody tr")
    (read,) = (row for row in cells(reader, "#runs") if row[0] == "few")
    assert read[1:3] == ["ended", summarise(runs / "few").findings[0].line()]
    assert not reader.errors


def verdict_of(server: RunServer, directory: str) -> str:
    listed: Any = server.list_runs()
    (text,) = (run["verdict"]["text"] for run in listed["runs"] if run["directory"] == directory)
    return str(text)


def test_a_wrong_address_is_explained(reader: Reader, server: RunServer) -> None:
    reader.page.goto(server.address("many").replace("a-token", "another"))

    assert "commtrace view" in reader.page.locator("body").inner_text()


def test_a_server_that_has_ended_is_reported(reader: Reader, server: RunServer) -> None:
    page = opened(reader, server).page
    page.route("**/data/step/**", lambda route: route.abort())

    page.fill("#any-step", "3")
    page.press("#any-step", "Enter")
    page.wait_for_selector("#failure:visible")

    assert "Start commtrace view again" in page.locator("#failure").inner_text()


def test_another_run_is_compared_and_drawn_under_this_one(reader: Reader, tmp_path: Path) -> None:
    after = Job(pp=2, steps=4, faults=(Fault("slow-rank", (1,), 1.5),))
    write(synthesize(Job(pp=2, steps=4)), tmp_path / "before")
    write(synthesize(after), tmp_path / "after")
    runs = [open_run(tmp_path / name) for name in ("before", "after")]
    wall = compare([runs[0].measure(step_series)], [runs[1].measure(step_series)]).wall_ns
    assert wall.before is not None
    assert wall.after is not None
    assert wall.difference is not None
    with serving({"after": tmp_path / "after"}, {}, partial(RunView, against=tmp_path / "before")) as server:
        page = reader.page
        reader.go_to(server.address("after"))
        before = reader.window()
        page.focus("#timeline")
        page.keyboard.press("o")
        page.wait_for_selector("#show-other[aria-pressed=true]")
        row = page.locator("#comparison tbody tr").nth(0).locator("td").all_text_contents()
        page.keyboard.press("w")
        reader.settle()

        assert row[1:3] == [milliseconds(wall.before), milliseconds(wall.after)]
        assert row[3] == f"+{milliseconds(wall.difference)}"
        assert page.inner_text("#plan-note") != ""
        assert reader.window()["to"] - reader.window()["from"] < before["to"] - before["from"]
        assert not reader.errors


@pytest.mark.long
def test_a_thousand_ranks_have_the_numbers_of_the_summary(reader: Reader, tmp_path: Path) -> None:
    job = Job(tp=8, pp=8, dp=16, microbatches=8, steps=3, faults=(Fault("slow-rank", (517,), 1.5),))
    path = tmp_path / "large"
    write(synthesize(job), path)
    with serving({"large": path}, {}) as server:
        page = reader.page
        page.goto(server.address("large"), timeout=120_000)
        page.wait_for_selector("#stage[data-step]", timeout=120_000)
        reader.settle()
        shown = {box["rank"] for box in reader.boxes()}

        assert page.input_value("#grouping") == "stage"
        assert 517 in shown
        assert len(shown) <= 2 * job.pp
        assert shown <= read_ranks(reader)

        page.wait_for_selector("html[data-ready]", timeout=300_000)
        summary = summarise(path)
        assert costliest(page) == summary.findings[0].words
        reader.show("time")
        page.select_option("#breakdown-by", "rank")
        page.click("#breakdown-details summary")
        listed = page.locator("#breakdown-table tbody").evaluate(
            "(body) => [...body.rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        compute = {f"rank {rank.rank}": milliseconds(rank.part("compute")) for rank in summary.ranks}
        assert len(listed) == len(compute) == 1024
        assert {row[0].split(" · ")[0]: row[2] for row in listed} == compute
        assert not reader.errors
