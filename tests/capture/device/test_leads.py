"""How far the host is ahead of the device at each mark, by both engines, on a simulated GPU in scripted time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from commtrace.capture.device.clock import LONGEST_RECORD_NS, WIDEST_BRACKET_NS
from commtrace.capture.records import lead_of
from commtrace.trace import schema
from tests.capture.device.marked_job import Job
from tests.capture.simulated_cuda import MICROSECOND, MILLISECOND
from tests.capture.simulated_nccl import SimulatedNccl, options, tensor


@pytest.fixture
def job(world: None) -> Iterator[Job]:
    job = Job()
    with job.recording.capturing():
        yield job


def test_a_host_that_waits_for_nothing_is_ahead_by_the_queue(job: Job) -> None:
    idle = job.clock.mark()
    job.cuda.current_stream().run(700 * MICROSECOND)
    behind = job.clock.mark()

    assert (job.lead_us(idle), job.lead_us(behind)) == (0, 700)


def test_a_queue_of_many_milliseconds_is_as_long_as_can_be_written(job: Job) -> None:
    job.cuda.current_stream().run(40 * MILLISECOND)
    mark = job.clock.mark()

    job.cuda.advance(40 * MILLISECOND)
    assert job.lead_us(mark) == schema.MOST_LEAD_US


def test_the_lead_is_counted_from_before_the_record_call(job: Job) -> None:
    job.cuda.current_stream().run(100 * MICROSECOND)
    job.cuda.reading_ns = 4 * MICROSECOND  # of which there is one before the call, and one behind it

    mark = job.clock.mark()
    job.cuda.reading_ns = 0

    assert job.lead_us(mark) == 100 - 4


def test_a_host_that_lost_its_core_around_the_call_has_no_lead(job: Job) -> None:
    job.cuda.reading_ns = LONGEST_RECORD_NS + 1
    lost = job.clock.mark()
    job.cuda.reading_ns = LONGEST_RECORD_NS
    kept = job.clock.mark()
    job.cuda.reading_ns = 0

    assert (job.lead_us(lost), job.lead_us(kept)) == (schema.UNKNOWN_LEAD, 0)


def test_the_first_mark_after_a_synchronisation_is_of_its_own_class(job: Job) -> None:
    job.clock.synchronized()
    first, second = job.clock.mark(), job.clock.mark()

    assert (job.lead_us(first), job.lead_us(second)) == (schema.SYNCHRONIZED_LEAD, 0)


def test_each_stream_of_each_device_has_a_first_mark_after_a_synchronisation(job: Job) -> None:
    cuda, side = job.cuda, job.cuda.Stream()
    cuda.driver.use_device(1)
    cuda.contexts.add(1)

    def leads() -> list[int]:
        cuda.driver.set_current(0)  # it is another one since marks were resolved in this thread
        marks = [job.clock.mark()]
        with cuda.stream(side):
            marks += [job.clock.mark()]
        marks += [job.clock.mark(1), job.clock.mark()]
        return [job.lead_us(mark) for mark in marks]

    first = schema.SYNCHRONIZED_LEAD
    assert leads() == [0, 0, 0, 0]
    job.clock.synchronized()
    assert leads() == [first, first, first, 0]
    assert leads() == [0, 0, 0, 0]
    job.clock.synchronized()
    job.clock.synchronized()
    assert leads() == [first, first, first, 0]


def test_a_stream_that_comes_later_is_no_exception(job: Job) -> None:
    job.clock.synchronized()
    job.clock.mark()
    with job.cuda.stream(job.cuda.Stream()):
        marks = [job.clock.mark(), job.clock.mark()]

    assert [job.lead_us(mark) for mark in marks] == [schema.SYNCHRONIZED_LEAD, 0]


def test_without_a_good_anchor_there_is_no_lead(job: Job) -> None:
    mark = job.clock.mark()
    job.cuda.reading_ns = WIDEST_BRACKET_NS + 1  # between the readings around an anchor
    job.clock.refresh()

    assert job.clock.resolve(mark) is not None
    assert lead_of(mark) == schema.UNKNOWN_LEAD


def test_a_time_of_the_host_has_no_lead(job: Job) -> None:
    job.cuda.initialized = False

    assert lead_of(job.clock.mark()) == schema.UNKNOWN_LEAD


def test_a_phase_and_a_stall_have_the_leads_of_their_marks_and_a_communication_has_none(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    nccl = SimulatedNccl(job.cuda)
    nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
    nccl.duration_ns = 2 * MILLISECOND
    world_group: Any = dist.group.WORLD
    with job.recording.capturing():
        job.cuda.current_stream().run(3 * MILLISECOND)
        span = job.recording.tracer.enter(schema.FORWARD, "forward")
        world_group.allreduce([tensor(32)], options(False))
        job.recording.tracer.leave(span)
        job.cuda.advance(10 * MILLISECOND)

        leads = {row.kind: (row.start_lead_us, row.end_lead_us) for row in job.recording.rows()}
    none = schema.UNKNOWN_LEAD, schema.UNKNOWN_LEAD
    assert leads == {schema.FORWARD: (3_000, 5_000), schema.STALL: (3_000, 5_000), schema.COLLECTIVE: none}
