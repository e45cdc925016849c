"""The thread that writes scalars: what it writes when, and places that fail."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from commtrace.config import Config
from commtrace.errors import MissingExtraError
from commtrace.exporters.scalars import exporter as module
from commtrace.exporters.scalars.exporter import RETRY_SECONDS, ScalarExporter, open_tensorboard
from commtrace.exporters.scalars.series import DatedEvent, Point
from commtrace.findings.status import JobView, LiveEvent
from commtrace.live.rank import LiveRank
from tests.exporters.prometheus.steps import rank, summary
from tests.live.findings import SECOND, silent_finding

EVENT = LiveEvent("found", 5 * SECOND, silent_finding(2), "Training has stopped.")


@dataclass
class Place:
    """A sink and the clock beside it."""

    has_run: bool = True
    takes_points: bool = True
    error: Exception | None = None
    now: float = 0.0
    steps: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    closed: int = 0

    def is_open(self) -> bool:
        return self.has_run

    def is_ready(self) -> bool:
        return self.takes_points

    def write(self, points: Sequence[Point], findings: Sequence[DatedEvent]) -> None:
        if self.error is not None:
            raise self.error
        self.steps += [point.step for point in points]
        self.texts += [finding.event.sentence for finding in findings]

    def close(self) -> None:
        self.closed += 1


@contextmanager
def exporting(place: Place, live: LiveRank) -> Iterator[ScalarExporter]:
    """An exporter whose thread writes only when it is told or at the end."""
    exporter = ScalarExporter(lambda: place, live, "a place", seconds=3600, monotonic=lambda: place.now)
    try:
        yield exporter
    finally:
        exporter.close()
        exporter._thread.join(60)
        assert not exporter._thread.is_alive()


def test_closing_writes_the_rest_and_closes_the_place() -> None:
    place = Place()
    with exporting(place, rank()) as exporter:
        exporter.step(summary(1), [])
        exporter.step(summary(2), [])
    assert (place.steps, place.closed) == ([2], 1)


def test_without_steps_findings_are_written_as_they_come() -> None:
    place, live = Place(), rank()
    with exporting(place, live) as exporter:
        live.job = JobView((), (EVENT,), None)
        exporter._try_to_write()
        assert (place.steps, place.texts) == ([], ["Training has stopped."])
        exporter._try_to_write()
    assert place.texts == ["Training has stopped."]


def test_steps_are_added_up_until_the_place_is_ready() -> None:
    place = Place(takes_points=False)
    with exporting(place, rank()) as exporter:
        exporter.step(summary(1), [])
        exporter._try_to_write()
        assert place.steps == []
        exporter.step(summary(2), [])
        place.takes_points = True
        exporter._try_to_write()
        assert place.steps == [2]


def test_a_place_that_fails_is_tried_again_later_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    place = Place(error=OSError(28, "No space left on device"))
    with caplog.at_level(logging.WARNING), exporting(place, rank()) as exporter:
        for step in (1, 2):
            exporter.step(summary(step), [])
            exporter._try_to_write()
        place.now += RETRY_SECONDS
        exporter._try_to_write()
        assert [record.getMessage() for record in caplog.records] == [
            "commtrace: no scalars are written to a place: OSError: [Errno 28] No space left on device. Training and "
            "the trace go on; it is tried again every 60 s"
        ]
        place.error = None
        exporter.step(summary(3), [])
        exporter._try_to_write()
        assert place.steps == []
        place.now += RETRY_SECONDS
        exporter._try_to_write()
        assert place.steps == [3]
        place.error = OSError(28, "No space left on device")
        exporter.step(summary(4), [])
        exporter._try_to_write()
        assert len(caplog.records) == 2


def test_a_place_that_hangs_holds_up_neither_steps_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    is_asked, goes_on = threading.Event(), threading.Event()

    class Hanging(Place):
        def write(self, points: Sequence[Point], findings: Sequence[DatedEvent]) -> None:
            is_asked.set()
            goes_on.wait(60)

    exporter = ScalarExporter(Hanging, rank(), "a place", seconds=0.001)
    exporter.step(summary(1), [])
    assert is_asked.wait(60)
    for step in range(2, 1_000):
        exporter.step(summary(step), [])
    exporter.close()
    assert exporter._thread.is_alive()
    goes_on.set()
    exporter._thread.join(60)
    assert not exporter._thread.is_alive()


def test_the_monitor_is_asked_for_the_job_once_there_is_a_run_to_write_to() -> None:
    place, live = Place(has_run=False), rank()
    with exporting(place, live) as exporter:
        exporter._try_to_write()
        assert not live.asks_job
        place.has_run = True
        exporter._try_to_write()
        assert live.asks_job


def test_tensorboard_is_written_by_rank_0_alone() -> None:
    assert open_tensorboard(Config(), rank(number=3)) is None


def test_a_missing_tensorboard_is_answered_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as error:
        open_tensorboard(Config(), rank(number=0))
    assert str(error.value) == "TensorBoard is not installed: pip install 'commtrace[tensorboard]'"
