"""What the timeline tells apart, and the page on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.synth import Job, synthesize
from commtrace.viewer.report import render
from tests.browser.reader import Reader
from tests.browser.written_reports import written
from tests.factory import make_run, span

A4_WIDTH = 794  # pixels of a style sheet


def colour_at(reader: Reader, box: dict[str, Any]) -> list[int]:
    """The colour of a box, beside its outline and below its number."""
    at = [box["x"] + box["width"] - 3, box["y"] + box["height"] / 2]
    found: list[int] = reader.page.evaluate(
        "([x, y]) => [...document.getElementById('timeline').getContext('2d').getImageData(x, y, 1, 1).data]", at
    )
    return found


def test_chunks_have_colours_of_their_own(reader: Reader, tmp_path: Path) -> None:
    reader.load(written(synthesize(Job(pp=2, chunks=2, microbatches=4, steps=2)).run, tmp_path))

    first = reader.boxes(rank=0, kind="forward", chunk=0)[0]
    second = reader.boxes(rank=0, kind="forward", chunk=1)[0]
    legend = reader.page.inner_text("#legend")

    assert colour_at(reader, first) != colour_at(reader, second)
    assert colour_at(reader, first) == colour_at(reader, reader.boxes(rank=1, kind="forward", chunk=0)[0])
    assert "forward of an odd chunk (microbatch·chunk)" in legend
    assert reader.errors == []


def test_gradients_of_weights_are_apart_from_those_of_inputs(reader: Reader, tmp_path: Path) -> None:
    reader.load(written(synthesize(Job(pp=2, schedule="zero-bubble", microbatches=4, steps=2)).run, tmp_path))

    inputs = reader.boxes(rank=0, kind="backward", headline="backward")[0]
    weights = reader.boxes(rank=0, headline="backward · backward weights")[0]

    assert colour_at(reader, inputs) != colour_at(reader, weights)
    assert "backward, weights" in reader.page.inner_text("#legend")


def test_times_shorter_than_the_clocks_agree_are_pale_and_say_so(reader: Reader, tmp_path: Path) -> None:
    analysis = analyse(synthesize(Job(pp=2, microbatches=4, steps=2)).run)
    drawn = []
    for residual_ns in (0, 20_000_000):  # a forward takes 4 ms
        residual = dict.fromkeys(("p50", "p99", "max"), residual_ns)
        timeline = Timeline(analysis.run, analysis.matches, analysis.roles, residual)
        path = tmp_path / f"{residual_ns}.html"
        path.write_text(render(summarise_steps(OpenedRun.of(analysis)), timeline).html, encoding="utf-8")
        reader.load(path)
        box = reader.boxes(rank=0, kind="forward")[0]
        drawn.append(colour_at(reader, box))
        reader.point_at(box)

    assert drawn[0] != drawn[1]
    assert "shorter than the clock residual of 20 ms" in reader.tooltip()
    assert "pale: shorter than the clocks of hosts agree" in reader.page.inner_text("#legend")


def test_a_recording_of_kernels_begins_with_its_communication(reader: Reader, tmp_path: Path) -> None:
    rows = {
        rank: [
            span("step", 0, 10_000, step=0),
            span("kernel", 0, 4_000 + 1_000 * rank, step=0),
            span("collective", 6_000, 9_000, step=0, timing="kernel"),
        ]
        for rank in range(2)
    }
    reader.load(written(make_run(rows), tmp_path))

    assert {box["rank"] for box in reader.boxes(table="communication")} == {0, 1}
    assert reader.page.get_attribute("#lanes", "aria-pressed") == "true"
    assert "kernel" in reader.page.inner_text("#legend")
    assert "hatched: wait" in reader.page.inner_text("#legend")


def test_paper_has_headings_names_and_whole_charts_in_light_colours(reader: Reader, tmp_path: Path) -> None:
    reader.load(written(synthesize(Job(pp=2, dp=2, steps=4)).run, tmp_path))
    page = reader.page
    page.click("#theme")
    # Chromium lays a page out for paper without telling it.
    page.evaluate("window.addEventListener('resize', (event) => event.stopImmediatePropagation(), true)")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": A4_WIDTH, "height": 1123})
    reader.settle()

    assert page.is_visible("#communication th button")
    assert page.is_visible("#breakdown button >> nth=0")
    assert page.is_hidden("#zoom-in")
    assert page.is_hidden("#views")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    assert page.evaluate("document.documentElement.scrollWidth") <= A4_WIDTH
    for canvas in page.locator("canvas:visible").all():
        box = canvas.bounding_box()
        assert box["x"] + box["width"] <= A4_WIDTH


def test_a_dark_page_is_drawn_light_for_paper(reader: Reader, tmp_path: Path) -> None:
    reader.load(written(synthesize(Job(pp=2, steps=3)).run, tmp_path))
    page = reader.page
    if page.get_attribute("html", "data-theme") == "light":
        page.click("#theme")
    corner = "[...document.getElementById('timeline').getContext('2d').getImageData(1, 1, 1, 1).data]"
    reader.settle()
    assert max(page.evaluate(corner)[:3]) < 100

    on_paper = page.evaluate(f"dispatchEvent(new Event('beforeprint')) && {corner}")
    page.evaluate("dispatchEvent(new Event('afterprint'))")

    assert min(on_paper[:3]) > 200
    assert page.get_attribute("html", "data-theme") == "dark"
