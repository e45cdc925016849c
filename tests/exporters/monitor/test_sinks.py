"""The sinks of the monitor: the log, files of the run, and a webhook."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from commtrace.exporters.monitor import sinks
from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.messages import Job, Report
from commtrace.exporters.monitor.sinks import FileSink, LogSink, WebhookSink
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.live.monitoring.findings import LiveEvent
from tests.json_schemas import errors
from tests.live.findings import status
from tests.live.monitoring.test_watch import SECONDS, report


def test_that_it_cannot_be_told_who_is_slow_is_logged_once_until_it_can_be_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = LogSink()
    with caplog.at_level(logging.WARNING, logger="commtrace"):
        for abstentions in (("Not told: 60 ms.",), ("Not told: 61 ms.",), (), ("Not told: 62 ms.",)):
            sink.alert([], status(abstentions=abstentions))
    assert [record.getMessage() for record in caplog.records] == [
        "commtrace: Not told: 60 ms.",
        "commtrace: Not told: 62 ms.",
    ]


def test_the_files_of_a_run_are_what_their_schemas_say(tmp_path: Path) -> None:
    job = Job("run", 0, 8, SECONDS)
    store = MonitorStore(job)
    aggregator = Aggregator(job, [FileSink(tmp_path)])
    states = []
    for window in range(8):
        for rank in range(8 if window < 6 else 7):
            is_slow = rank == 5 and window < 4
            store.answer(Report(job, report(rank, window, (72, 5, 0, 5) if is_slow else (60, 5, 0, 5))))
        aggregator.join(store, now=(window + 1) * SECONDS if window < 7 else 100.0)
        states.append(json.loads((tmp_path / "monitor.json").read_text()))
    events = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]

    assert [event["kind"] for event in events] == ["straggler", "recovered", *["silent"] * 1]
    assert [len(state["stragglers"]) for state in states] == [0, 1, 1, 1, 0, 0, 0, 0]
    assert [found for state in states for found in errors("monitor", state)] == []
    assert [found for event in events for found in errors("monitor-event", event)] == []


EVENT = LiveEvent("silent", 1.0, 3, "node0", "Rank 3 is silent.")
LIMIT_SECONDS = 30.0


def test_an_event_that_the_webhook_does_not_get_is_logged_without_control_characters(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WebhookSink, "_run", lambda _: None)
    sink = WebhookSink("http://127.0.0.1:1/")
    sink.alert([replace(EVENT, sentence="node\x1b[2J")] * 101, status())
    assert "\x1b" not in caplog.text
    assert caplog.text.count("the webhook is too slow") == 1


@pytest.fixture
def refusing() -> Iterator[int]:
    """The port of a receiver that answers 500 with a page of 5 MB."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(500)
            self.end_headers()
            try:
                self.wfile.write(b"x" * 5_000_000)
            except OSError:
                return  # nobody reads it

        def log_message(self, *_: Any) -> None:
            """Not on the test's output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["/services/s3cret", "/?token=s3cret"])
def test_a_refusal_is_said_once_without_what_is_secret(
    refusing: int, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = WebhookSink(f"http://127.0.0.1:{refusing}{path}")
    sink.alert([EVENT] * 3, status())
    sink.close()
    sink._thread.join(LIMIT_SECONDS)
    assert [record.getMessage() for record in caplog.records] == [
        f"commtrace: the webhook http://127.0.0.1:{refusing}/… did not accept an event: HTTP status 500"
    ]


@pytest.mark.parametrize(
    "url", ["http://me:s3cret@127.0.0.1:1/", "http://127.0.0.1:s3cret/", "http://127.0.0.1\x00/s3cret"]
)
def test_an_address_that_cannot_be_used_does_not_show_its_secret(url: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = WebhookSink(url)
    sink.alert([EVENT], status())
    sink.close()
    sink._thread.join(LIMIT_SECONDS)
    assert "did not accept an event" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_receiver_that_hangs_holds_up_neither_the_monitor_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "_WEBHOOK_SECONDS", 2 * LIMIT_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        sink = WebhookSink(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        begin = time.monotonic()
        sink.alert([EVENT] * 300, status())
        sink.close()
        assert time.monotonic() - begin < LIMIT_SECONDS
    assert caplog.text.count("the webhook is too slow") >= 190
