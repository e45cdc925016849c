"""Questions that the page of ``commtrace view`` asks: what would a step take with changes?

The answers are those of ``commtrace whatif --json``, with the predicted typical step as resources of the page.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.analysis.prediction.changes import BandwidthChange, Changes, LatencyChange, OverlapChange
from commtrace.analysis.windows.run import OpenedRun, open_run
from commtrace.errors import ConfigurationError
from commtrace.viewer.comparison import step_under
from commtrace.viewer.data import Resources, encode_json

MOST_KEPT: Final = 8
"""Predicted steps that a page can draw; older ones are forgotten."""


_MOST_SHOWN: Final = 20


class Question(NamedTuple):
    """Changes of a run, and the ranks that work as fast as their peers: numbers, or ``all``."""

    changes: Changes
    without_slow_rank: tuple[str, ...]

    @classmethod
    def of_query(cls, query: Mapping[str, Sequence[str]]) -> Question:
        """Read options of ``commtrace whatif``, without their dashes. Raise ConfigurationError for anything else."""
        known = {"bandwidth", "latency", "overlap", "without_slow_rank", "schedule", "chunks", "microbatches", "token"}
        if unknown := sorted(set(query) - known):
            raise ConfigurationError(f"{unknown[0]} is no change that this page knows: use commtrace whatif")
        changes = Changes(
            bandwidth=tuple(map(BandwidthChange.parse, query.get("bandwidth", ()))),
            latency=tuple(map(LatencyChange.parse, query.get("latency", ()))),
            overlap=tuple(map(OverlapChange.parse, query.get("overlap", ()))),
            schedule=_last(query, "schedule"),
            chunks=_count(query, "chunks"),
            microbatches=_count(query, "microbatches"),
        )
        return cls(changes, tuple(query.get("without_slow_rank", ())))


Predict = Callable[[OpenedRun, Question, Path], Mapping[str, object]]
"""Answers a question as ``commtrace whatif --json`` does, and writes the predicted steps into a new directory."""


class WhatIfs:
    """Answers questions on a run, one at a time, and keeps the steps of the last answers."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._answering = threading.Lock()
        self._asked = 0
        self._steps: OrderedDict[str, Resources] = OrderedDict()

    def answer(self, run: OpenedRun, question: Question) -> bytes:
        """Return the answer as JSON; ``drawn`` in it names its step.

        Raises:
            CommtraceError: the run cannot have these changes, or cannot be replayed.
        """
        with self._answering, tempfile.TemporaryDirectory(prefix="commtrace-") as folder:
            predicted = Path(folder) / "whatif"
            answer = self._predict(run, question, predicted)
            self._asked += 1
            name = f"whatif/{self._asked}"
            self._steps[name] = step_under(open_run(predicted), name)
            while len(self._steps) > MOST_KEPT:
                self._steps.popitem(last=False)
        return encode_json({**answer, "drawn": name})

    def resource(self, name: str) -> bytes | None:
        """Return a part of a predicted step; None if it was forgotten."""
        prediction = "/".join(name.removesuffix(".json").split("/")[:2])
        return self._steps.get(prediction, {}).get(name)


def _last(query: Mapping[str, Sequence[str]], name: str) -> str:
    return query[name][-1] if query.get(name) else ""


def _count(query: Mapping[str, Sequence[str]], name: str) -> int | None:
    text = _last(query, name)
    if not text:
        return None
    try:
        count = int(text) if text.isdecimal() else 0
    except ValueError:  # more than 4300 digits
        count = 0
    if count < 1:
        raise ConfigurationError(f"{name} {text[:_MOST_SHOWN]}: write a number of at least 1")
    return count
