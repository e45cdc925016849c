"""A server of `commtrace view` for as long as a test lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from commtrace.viewer.run_view import RunView
from commtrace.viewer.server import RunServer


@contextmanager
def serving(
    paths: Mapping[str, Path], listed: Mapping[str, object], open_view: Callable[[Path], RunView] = RunView
) -> Iterator[RunServer]:
    server = RunServer(lambda: paths, open_view, lambda: listed, "a-token")
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(30)
    assert not thread.is_alive()
