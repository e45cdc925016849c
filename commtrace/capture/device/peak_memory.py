"""Record the peak of torch's allocator at the end of steps, on the training thread, where nobody has reset it yet."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from commtrace.capture.device.clock import DeviceTiming, now_ns
from commtrace.capture.records import Entry, peak_memory_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "the peak memory"


class PeakMemoryReader:
    """Read the allocator's own statistics after each recorded step, and record the highest so far when it has grown.

    A reading is a look into counters on the host: nothing waits for the device or allocates on it, and the script's
    own peak, which it may look at or reset, stays as it is. What a reading takes is measured
    by tests/gpu/programs/peak_memory.py.
    """

    def __init__(self, tracer: Tracer, clock: DeviceTiming, cuda: ModuleType | None = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._tracer = tracer
        self._clock = clock
        self._cuda = cuda
        self._allocated = self._reserved = 0

    def install(self) -> None:
        self._tracer.end_listeners.append(self._step_ends)

    def uninstall(self) -> None:
        if self._step_ends in self._tracer.end_listeners:
            self._tracer.end_listeners.remove(self._step_ends)

    def _step_ends(self, step: int) -> None:
        device = self._clock.used_device
        if device is None:
            return
        try:
            # The nested form: memory_stats makes a sorted flat copy of it, which takes longer than the reading.
            statistics = self._cuda.memory_stats_as_nested_dict(device)
            if not statistics:  # nothing was allocated yet
                return
            allocated = statistics["allocated_bytes"]["all"]["peak"]
            reserved = statistics["reserved_bytes"]["all"]["peak"]
        except Exception as error:  # an allocator of the script's own may have no statistics
            self._tracer.failed(PART, error)
            return
        if allocated > self._allocated or reserved > self._reserved:
            self._allocated = max(allocated, self._allocated)
            self._reserved = max(reserved, self._reserved)
            entry: Entry = (peak_memory_rows, schema.MARK, step, now_ns(), self._allocated, self._reserved)
            self._tracer.append(entry)
