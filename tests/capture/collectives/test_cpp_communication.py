"""Communication of C++ on a torch with hooks of process groups: each once, and training undisturbed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commtrace.capture import threads
from commtrace.capture.collectives import cpp_communication, group_lifecycle
from commtrace.capture.collectives.cpp_communication import Hooked, ProcessGroupHooks
from tests.capture.recording import Recording, of_all_reduce
from tests.process_groups import world_group

pytestmark = pytest.mark.skipif(
    not cpp_communication.torch_has_hooks(), reason="process groups of this torch have no hooks: they came with 2.14"
)

OPERATIONS: Any = torch.ops._c10d_functional
REPOSITORY = str(Path(__file__).resolve().parents[3])


@pytest.fixture
def alone(recording: Recording) -> Iterator[Recording]:
    """The only rank under gloo, with all communication captured."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hooked = Hooked(recording.tracer)
    with recording.capturing():
        hooked.install()
        recording.tracer.guard.on_failure(cpp_communication.HOOKS_PART, hooked.uninstall)
        try:
            yield recording
        finally:
            recording.tracer.completions.wait(5)
            hooked.uninstall()
            dist.destroy_process_group()


def seen(recording: Recording) -> list[tuple[str, int, int]]:
    """Name, number and bytes of every communication, in the order of their numbers."""
    recording.tracer.completions.wait(5)
    rows = sorted(recording.communications(), key=lambda row: row.seq)
    return [(row.name, row.seq, row.bytes) for row in rows]


def test_methods_functional_collectives_and_operators_are_counted_once_and_together(alone: Recording) -> None:
    name = world_group().group_name

    dist.all_reduce(torch.ones(1))
    OPERATIONS.wait_tensor(OPERATIONS.all_reduce(torch.ones(2), "sum", name))
    OPERATIONS.wait_tensor(OPERATIONS.all_to_all_single(torch.ones(3), [3], [3], name))
    torch.ops.c10d.allreduce_([torch.ones(4)], world_group().boxed(), torch.classes.c10d.ReduceOp(), None, True, -1)
    dist.barrier()

    assert seen(alone) == [
        ("all_reduce", 0, 4), ("all_reduce", 1, 8), ("all_to_all", 2, 12), ("all_reduce", 3, 16), ("barrier", 4, 0),
    ]  # fmt: skip
    assert alone.warnings() == []


def test_a_wait_for_a_result_is_a_stall_and_a_reducers_bucket_ends_with_one(alone: Recording) -> None:
    result = OPERATIONS.all_gather_into_tensor(torch.ones(2), 1, world_group().group_name)
    OPERATIONS.wait_tensor(result)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.ones(1, 3)).sum().backward()
    alone.tracer.completions.wait(5)

    rows = {row.id: (row.name, row.bytes) for row in alone.communications()}
    stalled = [rows[stall.stalled_on] for stall in alone.stalls()]
    assert ("all_gather", 8) in stalled
    assert ("all_reduce", 12) in rows.values()
    assert len(stalled) == len({stall.stalled_on for stall in alone.stalls()})


@pytest.mark.skipif(not hasattr(OPERATIONS, "wait_tensors"), reason="this torch has no wait for several results")
def test_a_wait_for_several_results_is_a_stall_on_each_of_them(alone: Recording) -> None:
    name = world_group().group_name
    OPERATIONS.wait_tensors(
        [OPERATIONS.all_reduce(torch.ones(1), "sum", name), OPERATIONS.all_reduce(torch.ones(2), "sum", name)]
    )
    alone.tracer.completions.wait(5)

    stalls = sorted(alone.stalls(), key=lambda stall: stall.start)
    assert [stall.stalled_on for stall in stalls] == sorted(row.id for row in alone.communications())
    assert stalls[0].end <= stalls[1].start


def test_a_call_that_the_backend_refuses_takes_no_number(alone: Recording) -> None:
    with pytest.raises(RuntimeError):
        dist._broadcast_coalesced(world_group(), [torch.ones(2)], 100, 7)
    OPERATIONS.wait_tensor(OPERATIONS.all_reduce(torch.ones(2), "sum", world_group().group_name))

    assert seen(alone) == [("all_reduce", 0, 8)]


def test_groups_that_are_made_later_have_hooks_too(alone: Recording) -> None:
    later = dist.new_group([0])
    alone.tracer.groups.register_known_groups()  # as commtrace.capture.collectives.group_lifecycle does

    OPERATIONS.wait_tensor(OPERATIONS.all_reduce(torch.ones(2), "sum", later.group_name))

    (row,) = alone.communications()
    assert row.group == alone.tracer.groups.state(later).group.id


def test_communication_of_ddps_constructor_is_recorded_even_as_the_first(recording: Recording) -> None:
    """C++ sends it all, and is the first one to use the group."""
    hooked = Hooked(recording.tracer)
    hooked.install()
    stop_watching = group_lifecycle.watch_creation(recording.tracer)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        DistributedDataParallel(torch.nn.Linear(3, 2))

        # The number of the parameters, their shapes, the parameters.
        assert [name for name, _, _ in seen(recording)] == ["all_gather", "broadcast", "broadcast"]
        assert recording.warnings() == []
    finally:
        stop_watching()
        hooked.uninstall()
        dist.destroy_process_group()


def test_a_failure_of_ours_does_not_reach_training(alone: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a hook would raise out of the communication."""
    monkeypatch.setattr(alone.tracer.thread, "issuing", None)  # a list no longer
    tensor = torch.ones(2)
    torch.ops.c10d.allreduce_([tensor], world_group().boxed(), *of_all_reduce())

    assert tensor.tolist() == [1.0, 1.0]
    (message,) = alone.warnings()
    assert message.startswith(cpp_communication.HOOKS_PART)


def hooks_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the name of every post-hook that torch calls from here on."""
    called: list[str] = []
    make = ProcessGroupHooks._hooks_of

    def counting(hooks: ProcessGroupHooks, *arguments: Any) -> Any:
        pre, post = make(hooks, *arguments)

        def post_hook(arguments: Any) -> None:
            called.append(arguments.name.name)
            post(arguments)

        return pre, post_hook

    monkeypatch.setattr(ProcessGroupHooks, "_hooks_of", counting)
    return called


@pytest.mark.parametrize(
    ("another_thread", "running", "stays"), [(False, set(), False), (True, set(), True), (False, {1}, True)]
)
def test_hooks_are_taken_out_where_no_other_thread_can_be_in_one(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, another_thread: bool, running: set[int], stays: bool
) -> None:
    """torch ends the process with a segmentation fault if one is taken out while a communication passes it."""
    called = hooks_called(monkeypatch)
    monkeypatch.setattr(threads, "other_threads", lambda: running)  # pytest has threads of its own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hooked = Hooked(recording.tracer)
        hooked.install()
        if another_thread:
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
            thread.start()
            thread.join()
        dist.all_reduce(torch.ones(1))
        recording.tracer.completions.wait(5)
        hooked.uninstall()
        called.clear()
        before = len(recording.communications())

        dist.all_reduce(torch.ones(1))

        assert bool(called) is stays
        assert len(recording.communications()) == before
    finally:
        dist.destroy_process_group()


def test_a_thread_of_ours_is_none_that_could_communicate() -> None:
    done = threading.Event()
    started = [threading.Thread(target=done.wait, name=name) for name in ("commtrace-harvester", "evaluation")]
    before = threads.other_threads()
    for thread in started:
        thread.start()
    try:
        assert threads.other_threads() - before == {started[1].ident}
    finally:
        done.set()
        for thread in started:
            thread.join()


def test_a_process_that_exits_while_a_daemon_thread_communicates_ends_as_without_commtrace(tmp_path: Path) -> None:
    """Torch aborts it. With a hook taken out under the thread it would have been a segmentation fault."""
    program = """
import sys, threading, time
import torch, torch.distributed as dist
import commtrace
if sys.argv[1] == "recorded":
    commtrace.start()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def talk():
    while True:
        dist.all_reduce(torch.ones(2))
        sent.set()
sent = threading.Event()
threading.Thread(target=talk, daemon=True).start()
sent.wait()
"""
    environment = os.environ | {"COMMTRACE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": REPOSITORY}
    ends = [
        subprocess.run(
            [sys.executable, "-c", program, way], env=environment, timeout=60, capture_output=True
        ).returncode
        for way in ("plain", "recorded", "recorded", "recorded")
    ]

    assert -signal.SIGSEGV not in ends


def test_a_hook_does_not_keep_its_group_alive(alone: Recording) -> None:
    group = dist.new_group([0])
    alone.tracer.groups.register_known_groups()
    reference = weakref.ref(group)

    dist.destroy_process_group(group)
    del group
    gc.collect()

    assert reference() is None
