"""A training process with a simulated GPU whose graphs are stamped, for the tests of stamps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commtrace.capture.graphs.replays import GraphReplays
from commtrace.capture.graphs.stamps import StampingOfGraphs
from commtrace.trace.spans import Spans
from tests.capture.graphs.graph_job import GraphJob
from tests.capture.simulated_cuda import MICROSECOND, MILLISECOND, SimulatedGraph, SimulatedStream
from tests.capture.simulated_nccl import options, tensor

BYTES = 8 << 20
"""Of a communication that is stamped wherever it is."""


class StampedJob(GraphJob):
    """A job whose graphs are stamped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "nccl") -> None:
        super().__init__(monkeypatch, backend=backend)
        self.driver = self.cuda.driver
        native = self.recording.native
        assert native is not None
        self.core = native.core
        self.stamping = StampingOfGraphs(self.core, self.tracer.guard.noticed)
        self.replays = GraphReplays(self.tracer, self.cuda.CUDAGraph, self.stamping)

    def prepare(self) -> None:
        """Have the device made ready before the first capture: its self-test needs a clock that goes."""
        self.cuda.reading_ns = 20 * MICROSECOND
        self.stamping.prepare(is_alone=True)
        self.cuda.reading_ns = 0
        self.cuda.advance(1000 * MILLISECOND)
        self.core.pass_marks()  # takes an anchor between two readings at the same time: all is exact

    @property
    def stream(self) -> SimulatedStream:
        return self.cuda.current_stream()

    def run(self, milliseconds: int = 1) -> None:
        """Compute."""
        self.stream.run(milliseconds * MILLISECOND)

    def all_reduce(self, milliseconds: int = 1, num_bytes: int = BYTES, *, asynchronous: bool = False) -> Any:
        self.nccl.duration_ns = milliseconds * MILLISECOND
        return self.group.allreduce([tensor(num_bytes)], options(asynchronous))

    def graph(self, **how: Any) -> Any:
        return self.cuda.graph(self.cuda.CUDAGraph(), **how)

    def stamps_of(self, graph: SimulatedGraph) -> list[int]:
        return self.driver.stamps(graph._graph)

    def finish(self) -> None:
        """Let the device come to an end, and the harvester see it."""
        for _ in range(12):
            self.cuda.advance(20 * MILLISECOND)
            self.recording.recorder.flush()

    def spans(self, folder: Path, *kinds: int) -> Spans:
        spans = self.read(folder).ranks[1].spans
        chosen = spans.kind == kinds[0]
        for kind in kinds[1:]:
            chosen |= spans.kind == kind
        return spans.take(chosen)


def intervals(spans: Spans, begin: int) -> list[tuple[float, float]]:
    """When rows were, in ms since ``begin``."""
    pairs = zip(spans.start.tolist(), spans.end.tolist(), strict=True)
    return [(round((start - begin) / MILLISECOND, 3), round((end - begin) / MILLISECOND, 3)) for start, end in pairs]
