"""The recordings of the tests of this folder."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from commtrace.capture import hooks
from commtrace.capture.collectives.cpp_communication import torch_has_hooks
from commtrace.capture.instrumentation import Instrumentation
from commtrace.capture.model import phases
from commtrace.capture.native import NativeClock
from commtrace.recording.recorder import Recorder
from tests.safety import models
from tests.safety.recorded import Recorded


@pytest.fixture
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Makes recordings; no thread of commtrace's runs beside the training."""
    monkeypatch.setattr(Recorder, "start", lambda recorder: None)
    monkeypatch.setattr(phases, "SHORTEST_GARBAGE_NS", 0)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    # What takes most of the time of a start: Dynamo's list of what it skips is compiled anew.
    monkeypatch.setattr(hooks, "_skip_own_files", lambda rules: lambda: None)
    monkeypatch.setattr(NativeClock, "close", lambda _: True)  # nothing is harvested before a recording has ended
    models.alive.clear()
    # Looking for models among all objects takes most of the time.
    monkeypatch.setattr(gc, "get_objects", lambda: list(models.alive))

    usual_engine = getattr(request, "param", "python")

    @contextmanager
    def record(engine: str = usual_engine) -> Iterator[Recorded]:
        recording = Recorded(engine)
        handler = logging.Handler(logging.WARNING)
        monkeypatch.setattr(handler, "emit", lambda record: recording.messages.append(record.getMessage()))
        logger = logging.getLogger("commtrace")
        logger.addHandler(handler)
        monkeypatch.setattr(Instrumentation, "_open_sinks", lambda _: [recording.sink])
        monkeypatch.setattr(sys, "unraisablehook", lambda told: recording.unraisable.append(told.exc_value))
        monkeypatch.setattr(threading, "excepthook", lambda told: recording.unraisable.append(told.exc_value))
        gc.disable()
        try:
            yield recording
        finally:
            gc.enable()
            logger.removeHandler(handler)
            if recording.instrumentation is not None and torch_has_hooks():
                # They stay where another thread runs, as those of pytest's plugins do, and would be broken, idle, next.
                instrumentation: Any = recording.instrumentation
                instrumentation._cpp._hooks._take_out()

    recorder: Any = record
    recorder.engine = usual_engine
    logging.getLogger("commtrace").propagate = False
    yield recorder
    logging.getLogger("commtrace").propagate = True
