"""A training process with a simulated GPU whose graphs are stamped, for the tests of stamps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.graphs.replays import GraphReplays
from commtrace.capture.graphs.stamps import StampingOfGraphs
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from commtrace.trace.spans import Spans
from tests.capture.recording import Recording
from tests.capture.simulated_cuda import MICROSECOND, MILLISECOND, SimulatedCuda, SimulatedGraph, SimulatedStream
from tests.capture.simulated_nccl import SimulatedNccl, options, tensor
from tests.trace.rows import write_rank

BYTES = 8 << 20
"""Of a communication that is stamped wherever it is."""


class StampedJob:
    """Rank 1 of 4, in scripted time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "nccl", *, is_stamped: bool = True) -> None:
        self.cuda = SimulatedCuda()
        self.driver = self.cuda.driver
        self.nccl = SimulatedNccl(self.cuda, backend)
        self.nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
        self.recording = Recording(cuda=self.cuda)
        self.tracer = self.recording.tracer
        native = self.recording.native
        assert native is not None
        self.core = native.core
        self.stamping = StampingOfGraphs(self.core, self.tracer.guard.noticed) if is_stamped else None
        self.replays = GraphReplays(self.tracer, self.cuda.CUDAGraph, self.stamping)
        self.group: Any = distributed_c10d._get_default_group()
        self.devices: DeviceCalls | None = None

    @contextmanager
    def recorded(self) -> Iterator[StampedJob]:
        with self.recording.capturing() as capture:
            self.devices = capture.devices
            self.replays.install()
            try:
                yield self
            finally:
                self.replays.uninstall()

    def prepare(self) -> None:
        """Have the device made ready before the first capture: its self-test needs a clock that goes."""
        assert self.stamping is not None
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

    def marks(self, name: str = "graph") -> list[dict[str, Any]]:
        self.recording.recorder.flush()
        rows = [row for row in self.recording.sink.rows if row.kind == schema.MARK and row.name == name]
        return [json.loads(row.detail or "") for row in rows]

    def replay_rows(self) -> list[Any]:
        self.finish()
        return self.recording.rows(schema.REPLAY)

    def read(self, folder: Path) -> Run:
        """What a reader gets of all rows."""
        self.finish()
        self.recording.rows()
        write_rank(folder, self.recording.sink.rows, rank=1, world_size=4)
        return load_run(folder)

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
