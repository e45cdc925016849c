"""A training process with a simulated GPU whose graphs are captured, for the tests of this folder."""

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
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.capture.recording import Recording
from tests.capture.simulated_cuda import MILLISECOND, SimulatedCuda
from tests.capture.simulated_nccl import SimulatedNccl
from tests.trace.rows import write_rank


class GraphJob:
    """Rank 1 of 4, in scripted time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, backend: str = "nccl", steps: str | None = None) -> None:
        self.cuda = SimulatedCuda()
        self.nccl = SimulatedNccl(self.cuda, backend)
        self.nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
        self.recording = Recording(cuda=self.cuda, steps=steps)
        self.tracer = self.recording.tracer
        self.replays = GraphReplays(self.tracer, self.cuda.CUDAGraph)
        self.group: Any = distributed_c10d._get_default_group()
        self.devices: DeviceCalls | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with self.recording.capturing() as capture:
            self.devices = capture.devices
            self.replays.install()
            try:
                yield
            finally:
                self.replays.uninstall()

    def finish(self) -> None:
        """Let the device come to an end."""
        self.cuda.advance(100 * MILLISECOND)

    def marks(self) -> list[dict[str, Any]]:
        """Return the details of the marks of graphs."""
        self.recording.recorder.flush()
        rows = [row for row in self.recording.sink.rows if row.kind == schema.MARK and row.name == "graph"]
        return [json.loads(row.detail or "") for row in rows]

    def replay_rows(self) -> list[Any]:
        self.finish()
        return self.recording.rows(schema.REPLAY)

    def read(self, folder: Path) -> Run:
        """Return what a reader gets of all rows."""
        self.finish()
        self.recording.rows()
        write_rank(folder, self.recording.sink.rows, rank=1, world_size=4)
        return load_run(folder)
