"""Communication of DistributedDataParallel from C++: seen, and never disturbed."""

from __future__ import annotations

import _thread
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commtrace.capture.collectives.ddp_reducer import CppCalls, HostCall, ReducerCapture
from commtrace.capture.collectives.operations import OPERATIONS
from commtrace.capture.records import ENDED
from commtrace.capture.threads import CompletionCallbacks
from tests.capture.recording import Recording, of_all_reduce
from tests.process_groups import world_group
from tests.waiting import until


@pytest.fixture
def alone(recording: Recording) -> Iterator[Recording]:
    """The only rank under gloo, with the reducer captured."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    capture = ReducerCapture(recording.tracer, CppCalls(recording.tracer))
    capture.install()
    try:
        yield recording
    finally:
        recording.tracer.completions.wait(5)
        capture.uninstall()
        dist.destroy_process_group()


@pytest.mark.parametrize(("over", "stalls"), [(5, []), (10, []), (12, [(10, 12)]), (25, [(10, 20)]), (0, [(10, 20)])])
def test_a_bucket_stalls_from_the_end_of_the_backward_until_it_is_over(
    recording: Recording, world: None, over: int, stalls: list[tuple[int, int]]
) -> None:
    """The reducer waits from 10 to 20; 0 is the end of what has not called back by then."""
    issued = CppCalls(recording.tracer)
    state = recording.tracer.groups.state(world_group())
    call = issued.launch(OPERATIONS["allreduce"], state, 0, (8, -1, torch.float32, None, None), None)
    assert isinstance(call, HostCall)
    call.completion[ENDED] = over

    issued.stalled(call, 10, 20)

    assert [(stall.start, stall.end) for stall in recording.stalls()] == stalls


class Working:
    """A Work that is over when it is told so."""

    def __init__(self) -> None:
        self.is_over = False
        self.callbacks: list[Any] = []

    def is_completed(self) -> bool:
        return self.is_over

    def get_future(self) -> Any:
        return self

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        self.is_over = True
        for callback in self.callbacks:
            callback(self)
        self.callbacks.clear()


@pytest.fixture
def buckets(recording: Recording, world: None) -> tuple[CppCalls, list[Working]]:
    """Three buckets of 8, 16 and 24 bytes, sent one after another, of which the first was over before the third."""
    issued, works = CppCalls(recording.tracer), [Working() for _ in range(3)]
    state = recording.tracer.groups.state(world_group())
    for number, work in enumerate(works):
        if number == 2:
            works[0].end()
        call = issued.launch(
            OPERATIONS["allreduce"], state, number, (8 * (number + 1), -1, torch.float32, None, None), None
        )
        assert isinstance(call, HostCall)
        asked: Any = work  # of a Work, as much as is asked
        issued.ask_later(call, asked)
    return issued, works


def ends(recording: Recording) -> list[tuple[int, bool]]:
    return sorted((row.bytes, row.end_exact) for row in recording.communications())


def test_a_bucket_that_is_over_as_another_one_is_sent_ended_by_then(
    recording: Recording, buckets: tuple[CppCalls, list[Working]]
) -> None:
    issued, _ = buckets

    assert ends(recording) == [(8, False)]
    assert [launch.num_bytes for launch in issued.unfinished()] == [16, 24]


def test_each_pass_lets_go_of_what_is_over(recording: Recording, buckets: tuple[CppCalls, list[Working]]) -> None:
    """A Work keeps the tensor of its bucket, and after the last step nobody sends another one."""
    issued, works = buckets
    for work in works:
        work.end()

    assert issued.unfinished() == []
    assert not issued._asked
    assert ends(recording) == [(8, False), (16, False), (24, False)]


def test_the_last_bucket_calls_back_and_those_before_it_ended_by_then(
    recording: Recording, buckets: tuple[CppCalls, list[Working]]
) -> None:
    issued, works = buckets
    issued.about_to_wait(None, 0)
    assert [len(work.callbacks) for work in works] == [0, 0, 1]

    works[1].end()
    works[2].end()

    assert ends(recording) == [(8, False), (16, False), (24, True)]
    assert issued.unfinished() == []


def test_a_bucket_that_outlives_the_last_one_ended_by_the_next_question(
    recording: Recording, buckets: tuple[CppCalls, list[Working]]
) -> None:
    issued, works = buckets
    issued.about_to_wait(None, 0)
    works[2].end()
    assert ends(recording) == [(8, False), (24, True)]

    works[1].end()
    issued.ask()

    assert ends(recording) == [(8, False), (16, False), (24, True)]


def test_a_recording_that_stops_gives_buckets_under_way_no_end(
    recording: Recording, buckets: tuple[CppCalls, list[Working]]
) -> None:
    issued, works = buckets
    works[1].end()

    issued.forget_asked()

    (last,) = [row for row in recording.communications() if row.bytes == 24]
    assert [size for size, _ in ends(recording)] == [8, 16, 24]
    assert last.start == last.end
    assert "unfinished" in last.detail


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients_are_reduced_and_seen(alone: Recording) -> None:
    model = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))

    model(torch.tensor([1, 2])).sum().backward()

    assert model.module.weight.grad.to_dense().sum() == 8
    alone.tracer.completions.wait(5)
    assert 2 * 8 + 2 * 4 * 4 in [row.bytes for row in alone.communications() if row.name == "all_reduce"]
    assert alone.warnings() == []


def test_every_argument_of_its_constructor_may_be_named(alone: Recording) -> None:
    model = DistributedDataParallel(module=torch.nn.Linear(2, 1, bias=False), process_group=dist.group.WORLD)

    model(torch.ones(1, 2)).sum().backward()

    alone.tracer.completions.wait(5)
    assert 8 in [row.bytes for row in alone.communications() if row.name == "all_reduce"]


def test_a_thread_of_cpp_has_no_python_below_the_kernel(alone: Recording) -> None:
    """As autograd's threads of devices have none: the reducer sends from them."""
    DistributedDataParallel(torch.nn.Linear(2, 2))
    group = dist.group.WORLD
    assert group is not None
    before = len(alone.communications())

    arguments = ([torch.ones(5)], group.boxed(), *of_all_reduce())
    _thread.start_new_thread(torch.ops.c10d.allreduce_.default._op, arguments)

    until(lambda: len(alone.communications()) > before)
    (row,) = alone.communications()[before:]
    assert (row.name, row.bytes) == ("all_reduce", 20)
    assert alone.warnings() == []


def test_tensors_of_cpp_that_became_python_objects_are_known(alone: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the buckets, which live as long as the reducer."""
    known: list[int] = []
    add = CompletionCallbacks.add_temporaries

    def add_temporaries(callbacks: CompletionCallbacks, tensors: list[torch.Tensor]) -> None:
        known.append(len(tensors))
        add(callbacks, tensors)

    monkeypatch.setattr(CompletionCallbacks, "add_temporaries", add_temporaries)

    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    before = len(known)
    model(torch.ones(2, 2)).sum().backward()

    assert before > 0
    assert len(known) == before
    assert alone.tracer.completions.settle(5)
    assert alone.warnings() == []
