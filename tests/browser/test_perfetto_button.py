"""The button "Open in Perfetto" of ``commtrace view``, with the real Perfetto UI in the place of ui.perfetto.dev."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from commtrace.cli.commands.view import perfetto_trace
from commtrace.synth import Job, synthesize, write
from commtrace.viewer.run_view import RunView
from commtrace.viewer.server import RunServer
from tests.browser.perfetto_ui import perfetto_ui_files, wait_for_trace

_LIMIT_MS = 90_000


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    write(synthesize(Job(pp=2, microbatches=3, steps=4)), tmp_path / "run")
    server = RunServer(
        lambda: {"run": tmp_path / "run"},
        lambda path: RunView(path, trace_of=perfetto_trace),
        lambda: {"runs": []},
        "a-token",
    )
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server.address("run")
    server.close()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    """A browser that finds the UI at https://ui.perfetto.dev."""
    folder = perfetto_ui_files()

    def answer(route: Any) -> None:
        path = urlsplit(route.request.url).path
        file = folder / (path.strip("/") or "index.html")
        if path in ("/vizviewer_info", "/file_info"):
            route.fulfill(body="{}", content_type="application/json")
        elif file.is_file():
            route.fulfill(path=file)
        else:
            route.fulfill(status=404)

    opened = browser.new_context(service_workers="block")
    opened.route("https://ui.perfetto.dev/**", answer)
    yield opened
    opened.close()


def test_the_perfetto_ui_shows_the_step_that_is_in_view(context: Any, address: str) -> None:
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    step = page.evaluate("commtraceViewer.window().step")

    with context.expect_page() as opening:
        page.click("#open-perfetto")
    ui = opening.value
    trust = ui.get_by_role("button", name="Yes")
    wait_for_trace(ui, _LIMIT_MS, or_else="document.querySelector('.pf-modal-dialog, .modal-dialog')")
    if trust.is_visible():
        trust.click()
    wait_for_trace(ui, _LIMIT_MS)
    ui.get_by_text("rank 0").first.wait_for(timeout=_LIMIT_MS)

    assert ui.evaluate("app.trace.traceInfo.traceTitle").startswith(f"commtrace: run: step {step} (")
    assert page.locator("#perfetto-state").inner_text() == ""
