"""Waiting for a communication's future is the stall that waiting for its Work is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.collectives.waits import FutureWaits
from commtrace.capture.device.clock import now_ns
from commtrace.capture.hooks import installed
from tests.capture.recording import Recording, cuda_clock
from tests.capture.simulated_cuda import SimulatedCuda


@pytest.fixture(params=[False, True], ids=["a build for CPUs", "a build for CUDA"])
def alone(request: pytest.FixtureRequest) -> Iterator[Recording]:
    """The only rank under gloo, whose works have futures; its tensors are the host's, whatever torch is built for."""
    clock = None
    if request.param:
        cuda = SimulatedCuda()
        cuda.initialized = False
        clock = cuda_clock(cuda, now_ns)
    recording = Recording(clock)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = (dist.Work.__dict__["get_future"], torch._C.Future.__dict__["wait"])
    with recording.capturing(clock) as capture:
        uninstall = installed(
            FutureWaits(recording.tracer, capture.pending, capture.dead, capture.devices, capture.surrendered)
        )
        try:
            yield recording
        finally:
            recording.tracer.completions.wait(5)
            uninstall()
    assert (dist.Work.__dict__["get_future"], torch._C.Future.__dict__["wait"]) == before
    dist.destroy_process_group()


def all_reduce() -> dist.Work:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    return work


def test_a_wait_for_the_future_is_a_stall(alone: Recording) -> None:
    alone.tracer.begin_step(3)
    (result,) = all_reduce().get_future().wait()

    assert result.tolist() == [1.0] * 4
    alone.tracer.completions.wait(5)
    (row,) = alone.communications()
    (stall,) = alone.stalls()
    assert (stall.stalled_on, stall.name, stall.step) == (row.id, "all_reduce", 3)
    assert row.start <= stall.start <= stall.end


def test_a_future_may_be_waited_for_long_after_its_work_died(alone: Recording) -> None:
    futures = [all_reduce().get_future() for _ in range(3)]
    kept = [dist.Work() for _ in range(100)]  # some lie where a Work was
    works = [all_reduce() for _ in range(3)]
    futures[0].wait()
    futures[2].wait()
    alone.tracer.completions.wait(5)

    rows = alone.communications()
    assert [stall.stalled_on for stall in alone.stalls()] == [rows[0].id, rows[2].id]
    assert (len(rows), len(kept), len(works)) == (6, 100, 3)


def test_waiting_for_both_works_is_one_stall(alone: Recording) -> None:
    for wait_for_work_first in (False, True):
        work = all_reduce()
        future = work.get_future()
        for wait in (work.wait, future.wait) if wait_for_work_first else (future.wait, work.wait, future.wait):
            wait()

    alone.tracer.completions.wait(5)
    assert sorted(stall.stalled_on for stall in alone.stalls()) == sorted(row.id for row in alone.communications())
    assert len(alone.stalls()) == 2


def test_other_futures_are_let_alone(alone: Recording) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(7)

    assert future.wait() == 7
    assert future.then(lambda done: done.value() + 1).wait() == 8
    assert alone.stalls() == []


def test_a_future_that_fails_fails_as_before(alone: Recording) -> None:
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("lost"))

    with pytest.raises(ValueError, match="lost"):
        future.wait()
    assert alone.warnings() == []
