"""The methods of ``ProcessGroup`` as NCCL implements them, on a simulated GPU.

Synchronous operations run on the current stream. Asynchronous ones run on a stream of the group, after what is on the
current stream; ``wait`` makes the current stream wait. Operations of one communicator run one after another, whichever
streams they were launched on: NCCL has a stream wait for what the communicator runs on another one. The backends
differ:

* ``nccl`` (``nccl-legacy`` since torch 2.15) returns no Work of a synchronous operation, runs point-to-point operations
  outside of a bracket on a stream of the pair, and launches a bracket's members at its end.
* ``nccl2`` always returns a Work, has one stream for everything, runs barriers on the current stream, and launches
  collectives in a bracket where they are called: the bracket's Work covers them.
"""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commtrace.trace.metadata import ClockAnchor
from tests.capture.simulated_cuda import MILLISECOND, ForbiddenError, SimulatedCuda, SimulatedStream

SYSTEM_AHEAD_NS = 1_700_000_000_000_000_000


class SimulatedTensor:
    """What capture reads of a tensor."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.nbytes = num_bytes
        self.dtype = torch.float32
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.is_meta = False

    def untyped_storage(self) -> Any:
        """Return its storage, whose number is its own as long as it lives."""
        return SimpleNamespace(_cdata=id(self))

    def get_device(self) -> int:
        """Return the number of its device; -1 on the host."""
        return (self.device.index or 0) if self.is_cuda else -1


def tensor(num_bytes: int, device: str = "cuda:0") -> Any:
    """A tensor without values."""
    return SimulatedTensor(num_bytes, device)


class SimulatedWork(dist.Work):
    """Of an asynchronous operation."""

    def __init__(self, nccl: SimulatedNccl, end_ns: int, captured_on: SimulatedStream | None = None) -> None:
        super().__init__()
        self.nccl = nccl
        self.cuda = nccl.cuda
        self.end_ns = end_ns
        self.captured_on = captured_on

    def wait_for_stream(self, *_arguments: Any) -> bool:
        """Has the current stream wait."""
        self.nccl.check_not_aborted()
        stream = self.cuda.current_stream()
        if self.captured_on is not None and stream.is_capturing:
            stream.follow(self.captured_on)
        else:
            stream.wait_until(self.end_ns)
        return True

    # As pybind has it: not a function of Python, which the native part leaves to Python.
    wait = type(dist.ProcessGroup.__dict__["rank"])(wait_for_stream)

    def get_future(self) -> Any:
        raise ForbiddenError("a callback would run on a stream that is not ours")


class SimulatedNccl:
    """Takes the place of the methods of the class.

    Args:
        cuda: the device.
        backend: ``nccl`` or ``nccl2``.

    Attributes:
        duration_ns: of the operations to come.
        is_aborted: the communicator is gone.
        intervals: when each one ran.
        recorded: what torch's flight recorder holds: of an operation its number, when it was launched on the system's
            clock, and when it ran, None for a member of a bracket.
        capacity: of the flight recorder.
    """

    def __init__(self, cuda: SimulatedCuda, backend: str = "nccl") -> None:
        self.cuda = cuda
        self.backend = backend
        self.duration_ns = MILLISECOND
        self.intervals: list[tuple[int, int]] = []
        self._streams: dict[int, SimulatedStream] = {}
        self._free_at_ns: dict[int, int] = {}
        self._bracket: list[int] | None = None
        self._launched_in_bracket: list[SimulatedWork] = []
        self.is_aborted = False
        self.capacity = 2_000
        self.recorded: list[tuple[int, int, tuple[int, int] | None]] = []
        self._readings = itertools.count()

    def host_ns(self) -> int:
        """The host's monotonic time: another one at each reading."""
        return self.cuda.now_ns + next(self._readings)

    def system_ns(self) -> int:
        """The system's time, by which the flight recorder goes."""
        return self.host_ns() + SYSTEM_AHEAD_NS

    def anchor(self) -> ClockAnchor:
        """The host's monotonic clock against the system's."""
        now = self.host_ns()
        return ClockAnchor(now, now + SYSTEM_AHEAD_NS, 0)

    def dump(self, backend: str) -> bytes:
        """What the flight recorder of ``backend`` holds, with the durations of what is over, as torch writes it."""
        if backend != self.backend or not self.recorded:
            return b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
        entries = []
        for number, created, interval in self.recorded[-self.capacity :]:
            entry = {"process_group": ["0", "default_pg"], "record_id": number, "time_created_ns": created}
            if interval is not None and interval[1] <= self.cuda.now_ns:
                entry["duration_ms"] = float(np.float32((interval[1] - interval[0]) / MILLISECOND))
            entries.append(entry)
        return json.dumps({"comm_lib_version": "", "entries": entries}, separators=(",", ":")).encode()

    def _record(self, interval: tuple[int, int] | None) -> None:
        self.recorded.append((len(self.recorded), self.system_ns(), interval))

    def take_the_place_of(self, owner: type, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the methods that the tests use."""

        def allreduce(_group: Any, _tensors: Any, opts: Any) -> Any:
            return self._collective(opts.asyncOp)

        def send(_group: Any, _tensors: Any, peer: int, _tag: int) -> Any:
            if self._bracket is not None:
                self._bracket.append(self.duration_ns)
                self._record(None)
                return self._completed()
            return self.launch(True, peer)

        def barrier(_group: Any, opts: Any) -> Any:
            return self._collective(self.backend == "nccl")

        def start_coalescing(_group: Any, _device: Any) -> None:
            self._bracket, self._launched_in_bracket = [], []

        def end_coalescing(_group: Any, _device: Any) -> Any:
            members, self._bracket = self._bracket or [], None
            if self._launched_in_bracket:
                return self._launched_in_bracket[-1]
            self.duration_ns, single = sum(members), self.duration_ns
            work = self.launch(True, -1)
            self.duration_ns = single
            return work

        def get_backend(_group: Any, _device: Any) -> Any:
            return SimpleNamespace(name=lambda: self.backend)

        for name, method in {
            "allreduce": allreduce,
            "send": send,
            "recv": send,
            "barrier": barrier,
            "_start_coalescing": start_coalescing,
            "_end_coalescing": end_coalescing,
            "_get_backend": get_backend,
        }.items():
            monkeypatch.setattr(owner, name, method)

    def abort(self) -> None:
        """Stop the kernels that run, and refuse everything from now on."""
        self.is_aborted = True
        self._streams.clear()

    def check_not_aborted(self) -> None:
        """Raise what torch raises of a communicator that was aborted."""
        if self.is_aborted:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")

    def launch(self, asynchronous: bool, peer: int) -> Any:
        """Run an operation, outside of a bracket."""
        self.check_not_aborted()
        stream = current = self.cuda.current_stream()
        communicator = peer if self.backend == "nccl" else -1
        if asynchronous:
            stream = self._streams.setdefault(communicator, SimulatedStream(self.cuda, current.device))
            stream.follow(current)
        stream.wait_until(self._free_at_ns.get(communicator, 0))
        self.intervals.append(stream.run(self.duration_ns))
        self._free_at_ns[communicator] = end_ns = self.intervals[-1][1]
        self._record(self.intervals[-1])
        has_work = asynchronous or self.backend != "nccl"
        return SimulatedWork(self, end_ns, stream if stream.is_capturing else None) if has_work else None

    def _collective(self, asynchronous: bool) -> Any:
        if self._bracket is None:
            return self.launch(asynchronous, -1)
        if self.backend == "nccl":
            self._bracket.append(self.duration_ns)
            self._record(None)
            return None
        self._launched_in_bracket.append(self.launch(asynchronous, -1))
        return self._launched_in_bracket[-1]

    def _completed(self) -> Any:
        """What stands for a member of a bracket."""
        return None if self.backend == "nccl" else SimulatedWork(self, self.cuda.now_ns)


def options(asynchronous: bool) -> Any:
    """The options of an all_reduce."""
    return SimpleNamespace(asyncOp=asynchronous)
