"""Callbacks that are about to run are let run before a process group goes; one that never comes costs a second once."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commtrace.capture.collectives import completions, destruction
from tests.capture.recording import Recording


def listen(recording: Recording) -> torch.futures.Future[int]:
    """A future with a callback of ours."""
    callbacks, future = recording.tracer.completions, torch.futures.Future[int]()
    callbacks.add(future, partial(lambda _alive, _future: None, callbacks.alive))
    return future


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    told: list[float] = []

    def wait(_callbacks: completions.CompletionCallbacks, timeout_seconds: float) -> bool:
        told.append(timeout_seconds)
        return False

    monkeypatch.setattr(completions.CompletionCallbacks, "settle", wait)
    return told


def test_the_name_of_the_run_is_waited_for_before_the_last_group_goes_only(recording: Recording) -> None:
    asked: list[str] = []
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    uninstall = destruction.install(recording.tracer, lambda: asked.append("asked"))

    dist.destroy_process_group(dist.new_group([0, 1]))
    assert asked == []
    dist.destroy_process_group()
    uninstall()

    assert asked == ["asked"]


def test_a_callback_has_run_when_the_group_is_destroyed(recording: Recording, world: None) -> None:
    uninstall = destruction.install(recording.tracer)
    group = dist.new_group([0, 1])
    future = listen(recording)
    timer = threading.Timer(0.05, future.set_result, [7])
    timer.start()

    dist.destroy_process_group(group)

    assert not recording.tracer.completions.pending
    timer.join()
    uninstall()


def test_what_never_comes_is_waited_for_once(recording: Recording, world: None, waits: list[float]) -> None:
    uninstall = destruction.install(recording.tracer)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    dist.destroy_process_group(groups[0])
    assert waits == []
    future = listen(recording)

    for group in groups[1:]:
        dist.destroy_process_group(group)

    assert waits == [destruction.LONGEST_SECONDS]
    future.set_result(7)
    assert recording.warnings() == []
    uninstall()


def test_it_waits_again_once_callbacks_have_come(recording: Recording, world: None, waits: list[float]) -> None:
    uninstall = destruction.install(recording.tracer)
    for _ in range(2):
        future = listen(recording)
        dist.destroy_process_group(dist.new_group([0, 1]))
        future.set_result(7)
        dist.destroy_process_group(dist.new_group([0, 1]))

    assert waits == [destruction.LONGEST_SECONDS] * 2
    uninstall()


def test_originals_are_put_back(recording: Recording, world: None) -> None:
    before = (dist.destroy_process_group, dist.distributed_c10d.destroy_process_group)
    shutdown = vars(dist.ProcessGroup).get("shutdown")

    destruction.install(recording.tracer)()

    assert (dist.destroy_process_group, dist.distributed_c10d.destroy_process_group) == before
    assert vars(dist.ProcessGroup).get("shutdown") is shutdown


def test_groups_that_come_and_go_cost_no_pause_where_no_reducer_was(
    recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(destruction.time, "sleep", pauses.append)
    uninstall = destruction.install(recording.tracer)
    dist.destroy_process_group(dist.new_group([0, 1]))
    assert pauses == []

    recording.tracer.completions.add_temporaries([torch.ones(2)])
    dist.destroy_process_group(dist.new_group([0, 1]))
    assert pauses == [destruction.PAUSE_SECONDS]
    uninstall()
