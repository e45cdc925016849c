"""What the sinks of the monitor make of how things stand."""

from __future__ import annotations

import logging

import pytest

from commtrace.exporters.monitor.sinks import LogSink
from tests.live.findings import status


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
