"""The methods of ``ProcessGroup`` as NCCL implements them, on a simulated GPU.

Synchronous operations run on the current stream and return no Work. Asynchronous ones run on a stream of the group (or,
for P2P outside a bracket, of the pair), after what is on the current stream; ``wait`` makes the current stream wait.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.capture.simulated_cuda import MILLISECOND, ForbiddenError, SimulatedCuda, SimulatedStream


def tensor(num_bytes: int, device: str = "cuda:0") -> Any:
    """What capture reads of a tensor."""
    return SimpleNamespace(nbytes=num_bytes, dtype=torch.float32, device=torch.device(device))


class SimulatedWork(dist.Work):
    """Of an asynchronous operation."""

    def __init__(self, nccl: SimulatedNccl, end_ns: int) -> None:
        super().__init__()
        self.nccl = nccl
        self.cuda = nccl.cuda
        self.end_ns = end_ns

    def wait(self, *_arguments: Any) -> bool:
        """Has the current stream wait."""
        self.nccl.check_not_aborted()
        self.cuda.current_stream().wait_until(self.end_ns)
        return True

    def get_future(self) -> Any:
        raise ForbiddenError("a callback would run on a stream that is not ours")


class SimulatedNccl:
    """Takes the place of the methods of the class.

    Attributes:
        duration_ns: of the operations to come.
        is_aborted: the communicator is gone.
        intervals: when each one ran.
    """

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        self.duration_ns = MILLISECOND
        self.intervals: list[tuple[int, int]] = []
        self._streams: dict[int, SimulatedStream] = {}
        self._bracket: list[int] | None = None
        self.is_aborted = False

    def take_the_place_of(self, owner: type, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the methods that the tests use."""

        def allreduce(_group: Any, _tensors: Any, opts: Any) -> Any:
            return self._launch(opts.asyncOp, -1)

        def send(_group: Any, _tensors: Any, peer: int, _tag: int) -> Any:
            return self._launch(True, peer)

        def barrier(_group: Any, opts: Any) -> Any:
            return self._launch(True, -1)

        def start_coalescing(_group: Any, _device: Any) -> None:
            self._bracket = []

        def end_coalescing(_group: Any, _device: Any) -> Any:
            members, self._bracket = self._bracket or [], None
            self.duration_ns, single = sum(members), self.duration_ns
            work = self._launch(True, -1)
            self.duration_ns = single
            return work

        for name, method in {
            "allreduce": allreduce,
            "send": send,
            "recv": send,
            "barrier": barrier,
            "_start_coalescing": start_coalescing,
            "_end_coalescing": end_coalescing,
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

    def _launch(self, asynchronous: bool, peer: int) -> Any:
        self.check_not_aborted()
        if self._bracket is not None:
            self._bracket.append(self.duration_ns)
            return None
        current = self.cuda.current_stream()
        if not asynchronous:
            self.intervals.append(current.run(self.duration_ns))
            return None
        stream = self._streams.setdefault(peer, SimulatedStream(self.cuda, current.device))
        stream.wait_until(current.position_ns())
        self.intervals.append(stream.run(self.duration_ns))
        return SimulatedWork(self, self.intervals[-1][1])


def options(asynchronous: bool) -> Any:
    """The options of an all_reduce."""
    return SimpleNamespace(asyncOp=asynchronous)
