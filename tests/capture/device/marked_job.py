"""A job of one rank on a simulated GPU, of whose marks the leads are asked."""

from __future__ import annotations

from commtrace.capture.records import lead_of
from tests.capture.recording import Recording
from tests.capture.simulated_cuda import MILLISECOND, SimulatedCuda


class Job:
    """Rank 0, whose compute stream is torch's default one."""

    def __init__(self) -> None:
        self.cuda = SimulatedCuda()
        self.recording = Recording(cuda=self.cuda)
        clock = self.recording.device_clock
        assert clock is not None
        self.clock = clock

    def lead_us(self, mark: object) -> int:
        self.cuda.advance(MILLISECOND)
        self.clock.refresh()
        assert self.clock.resolve(mark) is not None
        return lead_of(mark)
