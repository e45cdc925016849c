"""The sinks of the monitor: the log and the files of the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.messages import Job, Report
from commtrace.exporters.monitor.sinks import FileSink, LogSink
from commtrace.exporters.monitor.store import MonitorStore
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
