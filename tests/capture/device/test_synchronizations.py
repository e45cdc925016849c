"""What the host waits for in Python is seen, so that the mark after it is not taken for one of a late host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.capture.device.synchronizations import Synchronizations
from commtrace.trace import schema
from tests.capture.device.marked_job import Job


class Torch:
    """Stands for ``torch.cuda``, on which nothing runs."""

    def __init__(self) -> None:
        def synchronize(_device: object = None) -> str:
            return "waited"

        def fails(_self: object) -> None:
            raise RuntimeError("the device has failed")

        self.synchronize = synchronize
        self.Stream = type("Stream", (), {"synchronize": synchronize})
        self.Event = type("Event", (), {"synchronize": fails})


@pytest.fixture
def job(world: None) -> Any:
    job = Job()
    with job.recording.capturing():
        yield job


def leads(job: Job, wait: Any) -> list[int]:
    wait()
    marks = [job.clock.mark(), job.clock.mark()]
    return [job.lead_us(mark) for mark in marks]


def test_the_mark_after_a_wait_of_the_host_says_so(job: Job) -> None:
    cuda = Torch()
    originals = cuda.synchronize, dict(cuda.Stream.__dict__), dict(cuda.Event.__dict__)
    part = Synchronizations(job.recording.tracer, job.clock, cuda)
    part.install()

    assert cuda.synchronize() == "waited"
    assert leads(job, lambda: None) == [schema.SYNCHRONIZED_LEAD, 0]
    assert leads(job, cuda.Stream().synchronize) == [schema.SYNCHRONIZED_LEAD, 0]
    assert leads(job, lambda: None) == [0, 0]
    with pytest.raises(RuntimeError, match="has failed"):
        cuda.Event().synchronize()
    assert leads(job, lambda: None) == [0, 0]

    part.uninstall()
    assert (cuda.synchronize, dict(cuda.Stream.__dict__), dict(cuda.Event.__dict__)) == originals
    assert leads(job, cuda.synchronize) == [0, 0]


def test_a_failure_of_it_reaches_nobody(job: Job) -> None:
    def fails() -> None:
        raise ValueError("ours")

    cuda = Torch()
    part = Synchronizations(job.recording.tracer, SimpleNamespace(synchronized=fails), cuda)
    part.install()

    assert cuda.synchronize() == "waited"
    assert any("synchronisations" in message for message in job.recording.warnings())
    part.uninstall()
