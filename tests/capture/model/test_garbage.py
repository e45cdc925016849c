"""Garbage collections: long ones are spans of the host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import commtrace.capture.model.garbage as garbage_module
from commtrace.capture.model.garbage import SHORTEST_NS, GarbageCollections
from commtrace.trace import schema
from tests.capture.recording import Recording


class Time:
    """Each reading is ``step_ns`` later than the one before."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.step_ns = 0

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(garbage_module, "now_ns", time)
    return time


@pytest.fixture
def collecting(recording: Recording, time: Time) -> Iterator[Recording]:
    gc.disable()
    collections = GarbageCollections(recording.tracer)
    collections.install()
    yield recording
    collections.uninstall()
    gc.enable()


def test_a_long_collection_is_a_span(collecting: Recording, time: Time) -> None:
    collecting.tracer.begin_step(3)
    time.step_ns = SHORTEST_NS
    gc.collect(1)

    (row,) = collecting.rows()
    assert (row.kind, row.name, row.lane, row.step) == (schema.GC, "generation 1", schema.HOST, 3)
    assert row.end - row.start == SHORTEST_NS
    assert row.timing == schema.HOST_TIMING


def test_a_short_one_is_not(collecting: Recording, time: Time) -> None:
    time.step_ns = SHORTEST_NS - 1
    gc.collect()

    assert collecting.rows() == []


def test_outside_of_steps_and_of_the_window_there_is_none(collecting: Recording, time: Time) -> None:
    time.step_ns = SHORTEST_NS
    gc.collect()
    collecting.tracer.begin_step()
    collecting.tracer.recording = False
    gc.collect()

    assert collecting.rows() == []


def test_it_listens_once_and_stops(recording: Recording) -> None:
    before = list(gc.callbacks)
    collections = GarbageCollections(recording.tracer)
    collections.install()
    collections.install()
    assert len(gc.callbacks) == len(before) + 1

    collections.uninstall()
    collections.uninstall()

    assert gc.callbacks == before


def test_a_failure_of_ours_does_not_stop_the_collector(
    collecting: Recording, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise ZeroDivisionError

    collecting.tracer.begin_step()
    monkeypatch.setattr(collecting.tracer, "append", fail)
    time.step_ns = SHORTEST_NS

    gc.collect()

    assert len(collecting.warnings()) == 1
