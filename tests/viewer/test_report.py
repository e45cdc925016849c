from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.trace.run import Run
from commtrace.viewer.report import Page, render
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob
from tests.viewer.hostile import HOSTILE


def rendered(run: Run, steps: str | None = None, **options: Any) -> Page:
    analysis = analyse(run, steps)
    return render(summarise_steps(OpenedRun.of(analysis)), Timeline.of_analysis(analysis), **options)


def scripts(page: Page) -> dict[str, str]:
    """Contents of the script elements by id, as a browser reads them: up to the first end tag."""
    found = re.findall(r"<script([^>]*)>(.*?)</script", page.html, re.DOTALL)
    return {(re.findall(r'id="resource:([^"]+)"', attributes) or ["program"])[0]: text for attributes, text in found}


def run_data(page: Page) -> Any:
    return json.loads(scripts(page)["run.json"])


def table(page: Page, name: str) -> dict[str, list[int]]:
    """Columns of a table as the page decodes them."""
    stored = pa.ipc.open_stream(gzip.decompress(base64.b64decode(scripts(page)[name]))).read_all()
    return {
        field.name: np.cumsum(values).tolist() if field.metadata == {b"encoding": b"delta"} else values.tolist()
        for field, values in zip(stored.schema, (column.to_numpy() for column in stored.columns), strict=True)
    }


def steps_of(durations: list[int]) -> Run:
    rows, begin = [], 0
    for step, duration in enumerate(durations):
        rows.append(span("step", begin, begin + duration, step=step))
        begin += duration
    return make_run({0: rows})


def test_a_page_holds_the_summary_and_the_steps() -> None:
    page = rendered(PipelineJob(stages=2, microbatches=3, steps=4).run())

    data, work = run_data(page), table(page, "step/1/work")

    assert json.loads(scripts(page)["summary.json"])["run"]["id"] == "made-run"
    assert [step["step"] for step in data["steps"]] == [1, 2, 3]
    assert work["rank"] == [0] * 6 + [1] * 6
    assert work["microbatch"][:6] == [0, 1, 0, 2, 1, 2]
    assert page.note == "The timeline holds all 3 steps."


def test_nothing_is_fetched() -> None:
    page = rendered(PipelineJob(stages=2, microbatches=2).run())

    assert "default-src 'none'" in page.html
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|https?://""", page.html)


def test_only_the_script_of_the_page_may_run() -> None:
    page = rendered(PipelineJob(stages=2, microbatches=2).run())

    digest = base64.b64encode(hashlib.sha256(scripts(page)["program"].encode()).digest()).decode()

    assert f"script-src 'sha256-{digest}'" in page.html


def test_names_cannot_leave_the_data() -> None:
    run = make_run({0: [span("step", 0, 9, step=0), span("user", 1, 5, step=0) | {"name": HOSTILE}]})

    page = rendered(run)

    assert HOSTILE in json.loads(scripts(page)["outline.json"])["names"]
    assert (
        page.html.count("<script") == page.html.count("</script>") == 4 + 6
    )  # run, summary, outline, program; the step's
    assert "<!--" not in page.html.partition("<body>")[2]


def test_a_long_run_shows_the_typical_the_slowest_and_others_over_the_run() -> None:
    durations = [1000 + step % 7 for step in range(200)]
    durations[121] = 5000

    page = rendered(steps_of(durations))

    assert len(page.embedded) == 10
    assert {1, 121, 199} <= set(page.embedded)
    assert "of the 199 steps" in page.note
    assert "the slowest one (121)" in page.note
    assert "--steps A:B" in page.note


def test_the_typical_step_is_shown_first() -> None:
    page = rendered(steps_of([9, 10, 30, 20, 5]), "0:")

    data = run_data(page)

    assert data["first_shown"] == 1
    assert [step["note"] for step in data["steps"]] == ["", "typical", "slowest", "", ""]


def test_a_page_stays_within_its_size_and_says_what_it_left_out() -> None:
    run = PipelineJob(stages=2, microbatches=8, steps=8).run()
    most = len(rendered(run).html) - 10_000

    page = rendered(run, most_bytes=most)

    assert len(page.html) <= most
    assert 1 <= len(page.embedded) < 7
    assert f"{7 - len(page.embedded)} more would have made this page larger than {most / 1e6:g} MB." in page.note


def test_a_step_that_is_too_large_has_the_boxes_of_chosen_ranks() -> None:
    run = PipelineJob(stages=2, microbatches=24, data_parallel=12, steps=3).run()
    most = (len(rendered(run, most_steps=1).html) + len(rendered(run, most_steps=1, most_bytes=0).html)) // 2

    page = rendered(run, most_bytes=most)

    ranks = table(page, "step/1/ranks")
    shown = {rank for rank, has_boxes in zip(ranks["rank"], ranks["has_boxes"], strict=True) if has_boxes}
    assert len(page.html) <= most
    assert len(ranks["rank"]) == 24
    assert 4 <= len(shown) < 24
    assert set(table(page, "step/1/work")["rank"]) == shown
    assert f"It has the boxes of {len(shown)} of the 24 ranks" in page.note


def test_one_step_is_shown_however_large_it_is() -> None:
    page = rendered(PipelineJob(stages=2, microbatches=8, steps=5).run(), most_bytes=1)

    assert len(page.embedded) == 1


def test_steps_that_were_asked_for_are_all_there() -> None:
    page = rendered(PipelineJob(stages=2, microbatches=2, steps=30).run(), "5:28", most_steps=None)

    assert page.embedded == tuple(range(5, 28))


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_no_more_steps_than_asked_for(most: int) -> None:
    page = rendered(steps_of([10, 11, 12, 13, 14, 15]), most_steps=most)

    assert len(page.embedded) == most


def test_a_run_that_ended_before_a_step_was_complete_still_has_a_page() -> None:
    run = make_run({0: [span("step", 0, 5, step=0)], 1: [span("step", 0, 5, step=1)]})

    page = rendered(run)

    assert page.embedded == ()
    assert page.note == "No step was recorded, so there is no timeline."
