"""A file per rank for node-exporter's textfile collector, written by a thread, as disks may block."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.registry import Collector

_logger = logging.getLogger("commtrace")

SECONDS_BETWEEN: Final = 1.0
"""Shortest time between two versions of the file."""


class Textfile:
    """Keeps a ``.prom`` file up to date.

    Args:
        path: in node-exporter's directory, which must exist.
        collector: of the samples.
    """

    def __init__(self, path: Path, collector: Collector) -> None:
        self.path = path
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commtrace-textfile", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Have the file written."""
        self._news.set()

    def close(self) -> None:
        """Stop, and remove the file, which node-exporter would else export for ever."""
        self._closing.set()
        self._news.set()
        self._thread.join(1.0)
        self.path.unlink(missing_ok=True)

    def abandon_after_fork(self) -> None:
        """The thread and the file are the parent's."""

    def _run(self) -> None:
        failed = False
        while not self._closing.is_set():
            self._news.wait()
            self._news.clear()
            if self._closing.is_set():
                return
            try:
                write_to_textfile(str(self.path), self._registry)
                failed = False
            except OSError as error:
                if not failed:
                    _logger.warning(
                        "commtrace: cannot write %s (%s); set COMMTRACE_PROMETHEUS_TEXTFILE to the directory that "
                        "node-exporter reads, and let this user write to it",
                        self.path,
                        error,
                    )
                failed = True
            self._closing.wait(SECONDS_BETWEEN)
