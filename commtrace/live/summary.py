"""The summary of one step of one rank, and the interface of its listeners. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from commtrace.analysis.matching.roles import PIPELINE
from commtrace.analysis.utilization import peak_flops
from commtrace.trace.schema import Row


class DeviceMemory(NamedTuple):
    """A device, and the memory of torch's allocator on it; peaks since the process began or the script reset them."""

    name: str
    peak_memory_bytes: int  # of tensors
    memory_bytes: int  # of tensors, now
    reserved_bytes: int  # held for tensors, now
    peak_reserved_bytes: int


def training_device() -> DeviceMemory | None:
    """Return the device with the highest peak of torch's allocator, without waiting for it; None if none is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    # The harvester's current device need not be the training thread's; a rank allocates on one device.
    # Only of devices that are in use: with some allocators, asking would begin to use the others.
    in_use = torch._C._cuda_hasPrimaryContext
    memory = {n: torch.cuda.memory_stats(n) for n in range(torch.cuda.device_count()) if in_use(n)}
    number = max(memory, key=lambda number: _bytes(memory[number], _PEAK), default=None)
    if number is None or not _bytes(memory[number], _PEAK):
        return None
    return DeviceMemory(
        str(torch.cuda.get_device_name(number)),
        peak_memory_bytes=_bytes(memory[number], _PEAK),
        memory_bytes=_bytes(memory[number], "allocated_bytes.all.current"),
        reserved_bytes=_bytes(memory[number], "reserved_bytes.all.current"),
        peak_reserved_bytes=_bytes(memory[number], "reserved_bytes.all.peak"),
    )


_PEAK: Final = "allocated_bytes.all.peak"


def _bytes(statistics: Mapping[str, int], name: str) -> int:
    """Return a statistic of torch's allocator; 0 before it has been asked for anything."""
    return int(statistics.get(name, 0))


def mfu(model_flops: float, seconds: float, device: str) -> float | None:
    """Return ``model FLOPs / (time · peak)``; None for an unknown GPU."""
    peak = peak_flops(device)
    return model_flops / (seconds * peak) if peak and model_flops and seconds > 0 else None


_POINT_TO_POINT: Final = ("send", "recv")

ENDING_TOGETHER: Final = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Collectives that end on all members at once. An uneven all_to_all and those with a root do not."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One call of a collective on a process group in a step; all members choose the same one."""

    group: int  # id, the same on all members
    operation: int  # index in ENDING_TOGETHER
    name: str
    role: str
    size: int  # members of the group
    seq: int  # members with the same number have chosen the same call
    duration_ns: int  # in flight; −1 if its end was never seen
    stalled_ns: int  # on it in this step
    num_bytes: int  # of all calls of the step


@dataclass(frozen=True, slots=True)
class OperationSummary:
    """The calls of one operation for one role in a step."""

    operation: str
    role: str
    count: int = 0  # calls; of a coalesced bracket once per operation
    num_bytes: int = 0  # full tensors of all calls
    duration_ns: int = 0  # in flight, wait included, summed over the calls whose end was seen
    stalled_ns: int = 0  # stalls of the rank on these calls inside the step
    hidden_ns: int = 0  # in flight without a stall
    bus_bytes: float = 0.0  # Σ bytes moved · bus factor, over the calls that have a bandwidth (docs/definitions.md)
    bus_ns: int = 0  # time in flight of those calls
    unfinished: int = 0  # calls whose end was never seen
    expected_ns: float = 0.0  # time at the baseline of the calls that were measured there
    compared_ns: int = 0  # time in flight of those calls

    @property
    def is_pipeline_transfer(self) -> bool:
        """Return True if its stalls are bubble, as one rank alone cannot separate the transfer."""
        return self.role == PIPELINE and self.operation in _POINT_TO_POINT

    @property
    def exposed_ns(self) -> int:
        """Return the exposed communication; 0 for pipeline transfers, whose stalls are bubble."""
        return 0 if self.is_pipeline_transfer else self.stalled_ns

    @property
    def busbw_bytes_per_second(self) -> float | None:
        """Return the bus bandwidth over the duration, wait included; None without one."""
        return self.bus_bytes / self.bus_ns * 1e9 if self.bus_ns and self.bus_bytes else None

    @property
    def baseline_ratio(self) -> float | None:
        """Return the time at the baseline over the time in flight, wait included; None without a baseline.

        None of pipeline transfers, too: on every rank they wait for the work of other stages.
        """
        return self.expected_ns / self.compared_ns if self.compared_ns and not self.is_pipeline_transfer else None

    @property
    def overlap_ratio(self) -> float | None:
        """Return the share of the time in flight without a stall; None if nothing was in flight."""
        in_flight = self.stalled_ns + self.hidden_ns
        return self.hidden_ns / in_flight if in_flight else None


WITHIN, BETWEEN, UNKNOWN = "within", "between", "unknown"
"""Places of a communication: all ranks on one node, on several, or not known."""

SIZES: Final[Mapping[str, int]] = {"64KiB": 2**16, "1MiB": 2**20, "16MiB": 2**24, "256MiB": 2**28}
"""Upper bounds of the sizes of messages, bytes; larger ones are ``LARGER``."""

LARGER: Final = "larger"


@dataclass(frozen=True, slots=True)
class MessageSummary:
    """The calls of one operation in a step, of one size, within the node or between nodes; those with a bandwidth."""

    operation: str
    nodes: str  # WITHIN, BETWEEN or UNKNOWN
    up_to: str  # one of SIZES, or LARGER
    count: int
    duration_ns: int  # in flight, waiting included
    bus_bytes: float  # Σ bytes moved · bus factor


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step of one rank. Times are ns; start and end on the host's monotonic clock.

    ``compute_ns``, ``exposed_ns``, ``bubble_ns``, ``data_ns``, ``checkpoint_ns``, ``gc_ns``, ``between_ns`` and
    ``other_ns`` add up to ``duration_ns`` exactly. A rank alone cannot separate wait from transfer: exposed and bubble
    hold both.
    """

    run_id: str
    rank: int
    step: int
    start_ns: int
    duration_ns: int
    compute_ns: Mapping[str, int]  # by phase: forward, backward, recompute, optimizer, evaluation, other
    exposed_ns: Mapping[str, int]  # stalls on communication by role; roles without any are left out
    bubble_ns: int = 0  # stalls on pipeline point-to-point operations
    data_ns: int = 0
    checkpoint_ns: int = 0
    gc_ns: int = 0
    between_ns: int = 0  # between the step before and the step's own work, for no known purpose
    other_ns: int = 0  # in no span
    # sorted by operation and role; a late row is counted in a later step, once
    operations: tuple[OperationSummary, ...] = ()
    messages: tuple[MessageSummary, ...] = ()  # sorted by operation, nodes and up_to
    collectives: tuple[GroupSummary, ...] = ()  # one call per group and collective, for a comparison with other ranks
    spans: int = 0  # rows handed out with this summary
    dropped: Mapping[str, int] = field(default_factory=dict)  # spans since the last summary, by kind
    overhead_ns: int = 0  # CPU time of the harvester thread since the last summary
    counts: Mapping[str, float] = field(default_factory=dict)  # sums of commtrace.count: tokens, samples, model_flops
    device: DeviceMemory | None = None  # None without an accelerator
    # Of compute by phase, and of the time in no span (IN_NO_SPAN): the device waited for its host; None if not known.
    launch_bound_ns: Mapping[str, int] | None = None

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilisation; None if the FLOPs or the peak of the GPU are unknown."""
        if self.device is None:
            return None
        return mfu(self.counts.get("model_flops", 0.0), self.duration_ns / 1e9, self.device.name)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def work_ns(self) -> int:
        """Return the rank's own time: without stalls and checkpoints."""
        return self.duration_ns - sum(self.exposed_ns.values()) - self.bubble_ns - self.checkpoint_ns


class StepListener(Protocol):
    """Gets every step on the harvester thread. Anything that can block belongs behind a bounded queue of its own.

    A listener that raises is switched off with one warning; training and the other listeners go on.
    """

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        """Take the summary of a complete step, and its rows, marks included.

        Those that came as rows stand before the others, which are made of columns when they are asked for: see
        :class:`commtrace.trace.spans.RowBatch`. Every row is handed out once: one that arrives after its step was
        closed comes with the next step.
        """

    def close(self) -> None:
        """Release threads, ports and files within a second or two."""

    def abandon_after_fork(self) -> None:
        """Close inherited sockets in a forked child and touch nothing else: everything belongs to the parent."""


def trace_id(run_id: str, step: int) -> int:
    """Return the 128-bit trace id of a step, the same on all ranks.

    It is the first 16 bytes of SHA-256 over ``RUN_ID/STEP``, big-endian, so ``f"{trace_id(run_id, step):032x}"`` is an
    OpenTelemetry trace id.
    """
    return int.from_bytes(hashlib.sha256(f"{run_id}/{step}".encode()).digest()[:16], "big")
