"""A job with a simulated GPU: everything that is timed by events."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import commtrace
from commtrace.capture import instrumentation
from commtrace.capture.device import hidden_ends
from commtrace.capture.device.clock import DeviceTiming
from commtrace.capture.native import Native
from commtrace.capture.tracer import Tracer
from tests.capture.recording import device_clock
from tests.capture.simulated_cuda import MILLISECOND, ForbiddenError, SimulatedCuda
from tests.capture.simulated_nccl import SimulatedNccl, options, tensor
from tests.native.bare_core import BareCore, load_core
from tests.safety.jobs import digest


def make_graphed_callables(warm_up: Callable[[], object]) -> None:
    """As torch's, which runs what is to be captured first without a graph."""
    warm_up()


class SimulatedGpu:
    """A GPU that forgets everything before each job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = SimulatedCuda()
        self.nccl = SimulatedNccl(self.cuda)
        monkeypatch.setattr(self.nccl, "system_ns", time.time_ns)  # as the recorder's own clocks go
        self.nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
        monkeypatch.setattr(instrumentation, "_device_clock", self._clock)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.cuda.CUDAGraph)
        for module in (torch.cuda, torch.cuda.graphs):
            monkeypatch.setattr(module, "make_graphed_callables", make_graphed_callables)
        monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")
        monkeypatch.setattr(hidden_ends, "dump_of", self.nccl.dump)
        # Whatever the steps of the test's recording are: the ends of these are looked for.
        monkeypatch.setattr(Tracer, "is_in_window", lambda _tracer, _step: True)

    def prepare_stamps(self) -> SimulatedGpu:
        """Have the device ready for stamps before jobs: its self-test takes time, which is scripted in jobs."""
        bare = BareCore(
            times_devices=True, raw_stream=self.cuda.raw_stream, current_device=self.cuda.current_device,
            open_device=self._open_device,
        )  # fmt: skip
        bare.core.use_clock(self.cuda.driver.host_clock)
        bare.core.mark()
        self.cuda.reading_ns = 20_000
        assert bare.core.prepare_stamps(True) == ""
        self.cuda.reading_ns = 0
        bare.core.end()
        bare.core.close_device(1_000)
        return self

    def _open_device(self) -> bool:
        load_core().open_driver(self.cuda.library_path, False)
        return True

    def _clock(self, native: Native | None) -> DeviceTiming:
        return device_clock(self.cuda, native)

    def _capture_and_replay(self, group: Any) -> None:
        """Graphs with all kinds of communication, one of which becomes a part of another."""
        make: Any = torch.cuda.make_graphed_callables  # the simulated one
        make(lambda: group.allreduce([tensor(32)], options(False)))
        inner, outer = self.cuda.CUDAGraph(), self.cuda.CUDAGraph()
        with self.cuda.graph(inner):
            group.allreduce([tensor(32)], options(False))
            group.send([tensor(16)], 2, 0).wait()
            group._start_coalescing(torch.device("cuda:0"))
            group.allreduce([tensor(8)], options(True))
            group.send([tensor(8)], 2, 0)
            group._end_coalescing(torch.device("cuda:0")).wait()
            group.allreduce([tensor(4, "cpu")], options(False))
            self._capture_streams(group)
            self.nccl.is_aborted = True
            with suppress(dist.DistBackendError):
                group.allreduce([tensor(32)], options(False))
            self.nccl.is_aborted = False
        with self.cuda.graph(outer):
            inner.replay()
            self.cuda.current_stream().run(MILLISECOND)
        inner.replay()
        outer.replay()

    def _capture_streams(self, group: Any) -> None:
        """Works that are waited for late, beside, or not at all, and streams that wait for each other, in a capture."""
        main, beside = self.cuda.current_stream(), self.cuda.Stream()
        late = group.allreduce([tensor(8)], options(True))
        beside.wait_stream(main)
        with self.cuda.stream(beside):
            late.wait()
            group.allreduce([tensor(8)], options(False))
        main.wait_event(beside.record_event())
        unwaited = group.allreduce([tensor(8)], options(True))
        main.follow(unwaited.captured_on)
        for _ in range(18):
            group.allreduce([tensor(1)], options(False))

    def stamped_job(self) -> str:
        """Go through the same with stamps in graphs."""
        return self.job()

    def job(self) -> str:
        """Synchronous and asynchronous operations, brackets, pairs, graphs and their replays, phases, works that nobody
        waits for, streams that wait for each other."""
        self.cuda.advance(100 * MILLISECOND)  # a job before it may have been cut short
        started = self.cuda.now_ns
        self.nccl.intervals.clear()
        self.nccl.recorded.clear()
        self.nccl._streams.clear()
        self.nccl._free_at_ns.clear()
        self.nccl._bracket, self.nccl.duration_ns = None, MILLISECOND
        group: Any = distributed_c10d._get_default_group()
        with commtrace.step(0), commtrace.span("forward"):
            self.cuda.current_stream().run(MILLISECOND)
            group.allreduce([tensor(32)], options(False))
            work = group.allreduce([tensor(32)], options(True))
            self.cuda.current_stream().run(MILLISECOND)
            work.wait()
            group.send([tensor(16)], 2, 0).wait()
            group._start_coalescing(torch.device("cuda:0"))
            group.allreduce([tensor(8)], options(True))
            group.send([tensor(8)], 2, 0)
            group._end_coalescing(torch.device("cuda:0")).wait()
            group.barrier(SimpleNamespace(device=torch.device("cuda:0"), asyncOp=True)).wait()
            with self.cuda.graph():
                group.allreduce([tensor(32)], options(False))
            self._capture_and_replay(group)
            beside, after = self.cuda.Stream(), self.cuda.Stream()
            with self.cuda.stream(beside):
                group.allreduce([tensor(32)], options(False))
            after.wait_stream(beside)
            behind = beside.record_event()
            self.cuda.current_stream().wait_event(behind)
            self.cuda.Event().record()
            behind.record(after)
            hooked = group.allreduce([tensor(32)], options(True))
            with suppress(ForbiddenError):  # of commtrace only
                hooked.get_future()
            unwaited = [group.allreduce([tensor(32)], options(True)) for _ in range(2)]
        del unwaited
        self.cuda.advance(100 * MILLISECOND)
        return digest(torch.tensor(self.nccl.intervals) - started)
