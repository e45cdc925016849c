"""A recorder without files or threads, and the fake backend, for the tests of capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commtrace.capture.collectives.groups import GroupRegistry
from commtrace.capture.collectives.process_groups import ProcessGroupCapture
from commtrace.capture.device.clock import CudaClock, DeviceClock
from commtrace.capture.native import Native, NativeClock
from commtrace.capture.tracer import Tracer
from commtrace.recording.recorder import Recorder
from commtrace.trace import schema
from commtrace.trace.marks import read_mark
from commtrace.trace.schema import Row
from commtrace.trace.selection import QuietPlan, StepRange
from commtrace.trace.spans import RowBatch
from tests.capture.simulated_cuda import SimulatedCuda
from tests.capture.simulated_nccl import SimulatedTensor
from tests.native.bare_core import load_core


def native(capacity: int = 10_000) -> Native:
    """The native part; skips the test where it was not built."""
    return Native(load_core(), capacity)


def cuda_clock(cuda: SimulatedCuda, host_ns: Callable[[], int] | None = None) -> CudaClock:
    """A clock of the Python engine on a simulated GPU."""
    module: Any = cuda  # it has what CudaClock calls of torch.cuda
    return CudaClock(module, cuda, host_ns or cuda.host_ns)


def device_clock(cuda: SimulatedCuda, native: Native | None) -> CudaClock | NativeClock:
    """The clock of a simulated GPU."""
    if native is None:
        return cuda_clock(cuda)
    native.core.use_clock(cuda.driver.host_clock)
    return NativeClock(native.core, cuda, driver=cuda.library_path, is_threaded=False)


class MemorySink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, rows: RowBatch) -> None:
        self.rows += rows

    def close(self) -> None:
        return None


class Recording:
    """A tracer whose rows can be read at once.

    Attributes:
        engine: of all recordings; tests/capture/conftest.py has most tests run with either.
    """

    engine: ClassVar[str] = "python"

    def __init__(
        self,
        clock: DeviceClock | None = None,
        *,
        cuda: SimulatedCuda | None = None,
        steps: str | None = None,
        capacity: int = 10_000,
        quiet: QuietPlan | None = None,
    ) -> None:
        self.sink = MemorySink()
        self.native = native(capacity) if self.engine == "native" else None
        self._added_before = 0 if self.native is None else self.native.num_added
        self.device_clock = None if cuda is None else device_clock(cuda, self.native)
        clock = clock or self.device_clock
        refresh = clock.refresh if clock is not None else None

        def before_pass() -> list[tuple[str, Any]]:
            if refresh is not None:
                refresh()
            return []

        self.recorder = Recorder(lambda: [self.sink], capacity=capacity, before_pass=before_pass, source=self.native)
        window = StepRange.parse(steps) if steps else None
        groups = GroupRegistry((), None if self.native is None else self.native.make_counters)
        self.tracer = Tracer(self.recorder, clock=clock, window=window, groups=groups, native=self.native, quiet=quiet)

    def marks(self, name: str) -> list[Any]:
        """The facts of the marks of this name so far."""
        self.recorder.flush()
        marks = [row for row in self.sink.rows if row.kind == schema.MARK and row.name == name]
        return [read_mark(name, row.detail, most_ranks=64) for row in marks]

    def rows(self, *kinds: int) -> list[Any]:
        """The rows so far, but for marks; only those of ``kinds`` if any are given."""
        self.recorder.flush()
        rows = [row for row in self.sink.rows if row.kind != schema.MARK]
        return [row for row in rows if not kinds or row.kind in kinds]

    @property
    def num_added(self) -> int:
        """How many spans and communications wait in the buffer, or were given to the native part."""
        return len(self.recorder.buffer) + (0 if self.native is None else self.native.num_added - self._added_before)

    def communications(self) -> list[Any]:
        """In the order of their launches: that of the rows of a pass says nothing."""
        return sorted(self.rows(schema.COLLECTIVE, schema.P2P), key=lambda row: row.start)

    def stalls(self) -> list[Any]:
        return sorted(self.rows(schema.STALL), key=lambda row: row.start)

    def warnings(self) -> list[str]:
        return self.tracer.guard.take_messages()

    @contextmanager
    def capturing(self, device_clock: CudaClock | NativeClock | None = None) -> Iterator[ProcessGroupCapture]:
        """With the methods of ``ProcessGroup`` replaced."""
        capture = ProcessGroupCapture(self.tracer, device_clock or self.device_clock, (SimulatedTensor,))
        capture.install()
        try:
            yield capture
        finally:
            capture.uninstall()


@contextmanager
def fake_backend(rank: int = 0, world_size: int = 4) -> Iterator[None]:
    """torch.distributed on the backend that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_all_reduce() -> tuple[Any, ...]:
    """What ``c10d::allreduce_`` wants behind tensors and group: operation, sparse indices, asynchronous, timeout."""
    named = {argument.name for argument in torch.ops.c10d.allreduce_.default._schema.arguments}
    is_async = (True,) if "async_op" in named else ()  # since torch 2.8
    return torch.classes.c10d.ReduceOp(), None, *is_async, -1
