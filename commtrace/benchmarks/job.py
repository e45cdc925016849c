"""The processes of a benchmark as one job: where each runs, how they agree, and how a user stops them."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from commtrace.benchmarks.device import device_name, device_of_backend
from commtrace.benchmarks.signals import acting_on_signals
from commtrace.config import Config
from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.recording import launchers

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")

_SECONDS_TO_STOP: Final = 10.0
"""A rank that has not stopped so long after a signal waits for another one that never will."""

_SHARE_OF_MEMORY: Final = 0.8

_WRONG_OPTIONS: Final = 2
"""Exit status of the commtrace command for wrong options."""


class BenchmarkError(CommtraceError):
    """The job of a benchmark could not go on."""


class StopRequest:
    """Whether the user wants to end the job: SIGINT and SIGTERM ask for it."""

    def __init__(self) -> None:
        self.is_requested = False
        self.last_words: Callable[[], None] = lambda: None  # what is left to say if a rank does not answer

    def request(self) -> None:
        self.is_requested = True


@dataclass(frozen=True, slots=True)
class BenchmarkJob:
    """This process among those of the job. Ranks agree through ``control``, a group of gloo."""

    rank: int
    nodes: tuple[str, ...]  # of each rank
    backend: str
    device: torch.device
    device_name: str
    control: ProcessGroup
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def gather(self, value: _T) -> list[_T]:
        """Return the value of every rank, on all ranks."""
        import torch.distributed as dist

        values: list[_T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return [value for value in values if value is not None]

    def await_rank_0(self) -> None:
        """Return when rank 0 gets here too, or has ended.

        It says what was found, or what is wrong, and a launcher would end it as soon as another rank ends.
        """
        with suppress(RuntimeError):
            self.gather(None)

    def most_bytes(self) -> int:
        """Return the memory that every rank can use."""
        return min(self.gather(self._own_memory()))

    def _own_memory(self) -> int:
        import torch

        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0] * _SHARE_OF_MEMORY)
        # Emulated nodes share the memory of the machine, too: the ranks of one host count.
        hosts = self.gather(socket.gethostname())
        return int(_free_memory() * _SHARE_OF_MEMORY) // hosts.count(socket.gethostname())


def _free_memory() -> int:
    """Return the free bytes of this machine, or of the container if it has fewer."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


@contextmanager
def join(backend: str = "", seconds: float = 300.0) -> Iterator[BenchmarkJob]:
    """Yield this process's place in the job that a launcher started.

    A ConfigurationError inside is the same on all ranks: it leaves rank 0, and the others end without a word.

    Args:
        backend: ``nccl`` or ``gloo``; by default NCCL where there is a GPU.
        seconds: a rank that does not answer for so long ends the job.

    Raises:
        ConfigurationError: no launcher started this process.
        BenchmarkError: the ranks did not find one another.
    """
    position = launchers.position(os.environ)
    if position is None or "MASTER_ADDR" not in os.environ:
        raise ConfigurationError(
            "this needs the processes of a job: torchrun --nproc-per-node 8 -m commtrace bench …; "
            "under another launcher MASTER_ADDR and MASTER_PORT must be set"
        )
    import torch
    import torch.distributed as dist

    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = device_of_backend(backend, position.local_rank or 0)
    try:
        dist.init_process_group(
            backend, rank=position.rank, world_size=position.world_size, timeout=timedelta(seconds=seconds)
        )
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        raise BenchmarkError(
            f"rank {position.rank} did not reach the others within {seconds:g} s ({first_line(error)}): "
            "`torchrun … -m commtrace preflight` says which ranks are missing"
        ) from error
    names: list[str | None] = [None] * position.world_size
    dist.all_gather_object(names, Config.from_env().node_id or socket.gethostname(), group=control)
    job = BenchmarkJob(position.rank, tuple(map(str, names)), backend, device, device_name(device), control)
    with _stopped_by_signals(job.stop):
        try:
            yield job
        except ConfigurationError as error:
            # The threads of gloo drop the last references to the tensors of `gather`, for which they need the GIL: one
            # that asks for it while Python is finalised aborts the process. They end with the group.
            atexit.register(dist.destroy_process_group, control)
            if job.rank == 0:
                raise
            job.await_rank_0()
            raise SystemExit(_WRONG_OPTIONS) from error
    # Not after an error: other ranks may wait for this one, and destroying waits for them.
    dist.destroy_process_group()


def first_line(error: Exception) -> str:
    """Return the first line of an error: torch appends stacks of C++ to its own."""
    return str(error).strip().partition("\n")[0]


@contextmanager
def _stopped_by_signals(stop: StopRequest) -> Iterator[None]:
    """Ask to stop at a signal. If that takes long, a thread says the last words and ends the process."""
    ended = threading.Event()

    def end_for_certain(number: signal.Signals) -> None:
        stop.request()
        if not ended.wait(_SECONDS_TO_STOP):
            stop.last_words()
            os._exit(128 + number)

    try:
        with acting_on_signals(end_for_certain):
            yield
    finally:
        ended.set()
