"""Communication that Python code hands to a process group: once each, with the right name and bytes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as all_reduce_bound_early
from torch.distributed import distributed_c10d

from commtrace.capture.collectives import operations, process_groups, waits
from commtrace.capture.collectives.groups import GroupRegistry
from commtrace.capture.collectives.process_groups import ProcessGroupCapture
from commtrace.capture.native import as_method
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from tests.capture.recording import Recording, fake_backend
from tests.unreadable import unreadable

# The names that frameworks call are those that old and new versions of torch share.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

WORLD = 4
RANK = 1


def original_of(replaced: Any) -> Any:
    """What a replaced method calls: a function of the native part keeps it in the object that it is bound to."""
    return getattr(replaced, "__wrapped__", None) or replaced.__self__.__wrapped__


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def parts(count: int = WORLD) -> list[torch.Tensor]:
    return [ones(8) for _ in range(count)]


COLLECTIVES: dict[str, tuple[Callable[[], object], str, int]] = {
    "all_reduce": (lambda: dist.all_reduce(ones(8)), "all_reduce", 32),
    "all_reduce of bfloat16": (lambda: dist.all_reduce(ones(8, dtype=torch.bfloat16)), "all_reduce", 16),
    "broadcast": (lambda: dist.broadcast(ones(8), 2), "broadcast", 32),
    "reduce": (lambda: dist.reduce(ones(8), 2), "reduce", 32),
    "all_gather": (lambda: dist.all_gather(parts(), ones(8)), "all_gather", 128),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(ones(32), ones(8)), "all_gather", 128),
    "gather at the root": (lambda: dist.gather(ones(8), parts(), dst=RANK), "gather", 32),
    "gather elsewhere": (lambda: dist.gather(ones(8), None, dst=2), "gather", 32),
    "scatter at the root": (lambda: dist.scatter(ones(8), parts(), src=RANK), "scatter", 32),
    "scatter elsewhere": (lambda: dist.scatter(ones(8), None, src=2), "scatter", 32),
    "reduce_scatter": (lambda: dist.reduce_scatter(ones(8), parts()), "reduce_scatter", 128),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(ones(8), ones(32)), "reduce_scatter", 128),
    "all_to_all": (lambda: dist.all_to_all(parts(), parts()), "all_to_all", 128),
    "all_to_all_single": (lambda: dist.all_to_all_single(ones(32), ones(32)), "all_to_all", 128),
    "barrier": (lambda: dist.barrier(), "barrier", 0),
}


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_collective_is_one_row_and_one_stall(captured: Recording, call: str) -> None:
    issue, name, num_bytes = COLLECTIVES[call]

    issue()

    (row,) = captured.communications()
    assert (row.kind, row.name, row.lane) == (schema.COLLECTIVE, name, schema.COMMUNICATION)
    assert (row.bytes, row.self_bytes, row.seq, row.op_in_seq, row.is_async) == (num_bytes, -1, 0, 0, False)
    assert row.start <= row.end
    assert row.timing == schema.HOST_TIMING
    assert row.detail is None
    (stall,) = captured.stalls()
    assert (stall.stalled_on, stall.name, stall.group, stall.seq) == (row.id, name, row.group, 0)
    assert stall.lane == schema.COMPUTE
    assert captured.warnings() == []


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_sparse_tensor_sends_its_indices_and_values(captured: Recording) -> None:
    dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (8,)))

    (row,) = captured.communications()
    assert (row.bytes, row.self_bytes) == (2 * 8 + 2 * 4, 0)
    assert captured.warnings() == []


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.int64, "int64")]
)
def test_the_dtype_is_a_word(captured: Recording, dtype: torch.dtype, word: str) -> None:
    dist.all_reduce(ones(8, dtype=dtype))

    assert [row.dtype for row in captured.communications()] == [word]


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_the_peer_of_a_rooted_collective_is_the_global_rank_of_its_root(captured: Recording, name: str) -> None:
    group = dist.new_group([1, 3])
    issue: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(ones(8), 3, group=group),
        "reduce": lambda: dist.reduce(ones(8), 3, group=group),
        "gather": lambda: dist.gather(ones(8), None, dst=3, group=group),
        "scatter": lambda: dist.scatter(ones(8), None, src=3, group=group),
    }

    issue[name]()

    assert [(row.name, row.peer) for row in captured.communications()] == [(name, 3)]


def test_an_uneven_all_to_all_says_what_the_rank_sends_to_itself(captured: Recording) -> None:
    dist.all_to_all_single(ones(10, 2), ones(10, 2), [1, 2, 3, 4], [4, 3, 2, 1])
    uneven = [ones(1), ones(5), ones(2), ones(2)]
    dist.all_to_all(uneven, uneven)
    dist.all_to_all_single(ones(8), ones(8), [2, 2, 2, 2], [2, 2, 2, 2])

    rows = captured.communications()
    assert [(row.bytes, row.self_bytes) for row in rows] == [(80, 3 * 8), (40, 20), (32, 8)]


@pytest.mark.parametrize("kind", [list, tuple, numpy.array])
def test_sizes_of_an_uneven_all_to_all_in_whatever_holds_them(captured: Recording, kind: Callable[..., Any]) -> None:
    dist.all_to_all_single(ones(4), ones(10), kind([1, 1, 1, 1]), kind([1, 5, 2, 2]))  # Megatron has arrays of numpy
    dist.all_to_all_single(ones(4), ones(4), kind([]), kind([]))

    assert [(row.bytes, row.self_bytes) for row in captured.communications()] == [(40, 20), (16, -1)]
    assert captured.warnings() == []


def test_an_all_to_all_of_nothing_has_no_bytes(captured: Recording) -> None:
    dist.all_to_all_single(ones(0), ones(0), [0] * WORLD, [0] * WORLD)

    assert [(row.bytes, row.self_bytes) for row in captured.communications()] == [(0, 0)]
    assert captured.warnings() == []


def test_an_async_collective_is_a_stall_only_where_it_is_waited_for(captured: Recording) -> None:
    work = dist.all_reduce(ones(8), async_op=True)
    assert work is not None
    assert captured.stalls() == []

    captured.tracer.begin_step(7)
    work.wait()

    (row,) = captured.communications()
    assert (row.is_async, row.step) == (True, -1)
    (stall,) = captured.stalls()
    assert (stall.stalled_on, stall.step, stall.is_async) == (row.id, 7, True)


def test_a_second_wait_for_the_same_work_tells_nothing(captured: Recording) -> None:
    work = dist.all_reduce(ones(8), async_op=True)
    assert work is not None
    work.wait()
    work.wait()

    assert len(captured.communications()) == 1
    assert len(captured.stalls()) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_point_to_point_tells_its_peer_and_whether_the_caller_waits(captured: Recording, asynchronous: bool) -> None:
    if asynchronous:
        for work in (dist.isend(ones(8), 2), dist.irecv(ones(4), 0)):
            assert work is not None
            work.wait()
    else:
        dist.send(ones(8), 2)
        dist.recv(ones(4), 0)

    rows = captured.communications()
    assert [(row.kind, row.name, row.peer, row.bytes, row.is_async) for row in rows] == [
        (schema.P2P, "send", 2, 32, asynchronous),
        (schema.P2P, "recv", 0, 16, asynchronous),
    ]
    assert [(stall.name, stall.peer) for stall in captured.stalls()] == [("send", 2), ("recv", 0)]


@pytest.mark.skipif("group_dst" not in signature(dist.send).parameters, reason="this torch knows global ranks only")
def test_point_to_point_in_a_subgroup_names_global_ranks(captured: Recording) -> None:
    group = dist.new_group([1, 3])

    dist.send(ones(8), 3, group=group)
    dist.send(ones(8), group=group, group_dst=1)

    assert [(row.peer, row.seq) for row in captured.communications()] == [(3, 0), (3, 1)]


def test_a_receive_from_anybody_has_no_peer(captured: Recording) -> None:
    work = dist.irecv(ones(8))
    assert work is not None
    work.wait()

    assert [(row.name, row.peer) for row in captured.communications()] == [("recv", -1)]


def test_batched_point_to_point_is_one_row_each(captured: Recording) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(8), 2), dist.P2POp(dist.irecv, ones(4), 0)])
    for work in works:
        work.wait()

    rows = captured.communications()
    assert [(row.name, row.peer, row.bytes, row.is_async) for row in rows] == [
        ("send", 2, 32, True),
        ("recv", 0, 16, True),
    ]


def test_numbers_count_collectives_per_group_and_messages_per_pair(captured: Recording) -> None:
    pair = dist.new_group([0, 1])
    dist.all_reduce(ones(8))
    dist.all_reduce(ones(8), group=pair)
    dist.send(ones(8), 2)
    dist.send(ones(8), 0)
    dist.recv(ones(8), 2)
    dist.send(ones(8), 2)
    dist.broadcast(ones(8), 0)

    rows = captured.communications()
    world = rows[0].group
    assert [(row.name, row.group == world, row.peer, row.seq) for row in rows] == [
        ("all_reduce", True, -1, 0),
        ("all_reduce", False, -1, 0),
        ("send", True, 2, 0),
        ("send", True, 0, 0),
        ("recv", True, 2, 0),
        ("send", True, 2, 1),
        ("broadcast", True, 0, 1),
    ]


def test_coalesced_operations_are_one_row_with_their_members(captured: Recording) -> None:
    with distributed_c10d._coalescing_manager():
        dist.all_reduce(ones(8))
        dist.all_reduce(ones(4))
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(ones(32), ones(8))
        dist.all_gather_into_tensor(ones(64), ones(16))
    manager.wait()

    rows = captured.communications()
    assert [(row.name, row.bytes, row.seq, json.loads(row.detail)) for row in rows] == [
        ("all_reduce", 48, 0, {"members": [32, 16]}),
        ("all_gather", 384, 1, {"members": [128, 256]}),
    ]
    assert [row.is_async for row in rows] == [False, True]
    assert len(captured.stalls()) == 2


def test_coalescing_one_operation_has_no_members(captured: Recording) -> None:
    with distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(ones(8), ones(32))

    assert [(row.name, row.bytes, row.detail) for row in captured.communications()] == [("reduce_scatter", 128, None)]


def test_object_collectives_are_the_collectives_they_are_made_of(captured: Recording) -> None:
    # The fake backend leaves the sizes as they are: the receiver unpickles its own object.
    dist.broadcast_object_list([{"a": 1}], src=RANK)
    dist.all_gather_object([None] * WORLD, {"a": 1})

    names = [row.name for row in captured.communications()]
    assert names == ["broadcast", "broadcast", "all_gather", "all_gather"]
    assert captured.warnings() == []


def test_functions_bound_before_the_start_are_captured(captured: Recording) -> None:
    all_reduce_bound_early(ones(8))

    assert [row.name for row in captured.communications()] == ["all_reduce"]


def test_methods_called_directly_are_captured(captured: Recording) -> None:
    world = distributed_c10d._get_default_group()
    work = world.allreduce(ones(8))
    work.wait()
    world.broadcast(tensor=ones(8), root=3).wait()

    rows = captured.communications()
    assert [(row.name, row.bytes, row.peer) for row in rows] == [("all_reduce", 32, -1), ("broadcast", 32, 3)]
    assert [row.is_async for row in rows] == [True, True]  # the caller gets the Work
    assert captured.warnings() == []


def test_a_work_that_nobody_waited_for_is_unfinished(recording: Recording, world: None) -> None:
    with recording.capturing() as capture:
        work = dist.isend(ones(8), 2)
        assert [launch.operation.name for launch in capture.unfinished()] == ["send"]
        del work

    (row,) = recording.communications()
    assert row.start == row.end
    assert json.loads(row.detail) == {"unfinished": True}
    assert recording.stalls() == []


@pytest.mark.engine("python")
def test_works_that_died_are_given_up_whatever_has_their_memory(recording: Recording, world: None) -> None:
    kept = []
    with recording.capturing() as capture:
        for _ in range(100):
            dist.isend(ones(8), 2)
            kept.append(dist.Work())  # lives on, where the Work was
            assert capture.unfinished() == []
        assert capture.pending == {}
        assert len(recording.communications()) == 99  # of the last one at the next launch

    assert len(recording.communications()) == 100


def test_an_id_that_is_used_again_is_not_taken_for_the_old_work(captured: Recording) -> None:
    for _ in range(50):
        dist.isend(ones(8), 2)  # its Work is gone at once, and its id free
    captured.tracer.recording = False
    works = [dist.isend(ones(8), 2) for _ in range(50)]
    captured.tracer.recording = True
    for work in works:
        assert work is not None
        work.wait()

    assert captured.stalls() == []
    assert all(json.loads(row.detail) == {"unfinished": True} for row in captured.communications())


def test_coordinates_are_those_of_the_launch(captured: Recording) -> None:
    tracer = captured.tracer
    tracer.begin_step(3)
    phase = tracer.enter(schema.FORWARD, "forward", microbatch=2, chunk=0, stage=1)
    dist.all_reduce(ones(8))
    tracer.leave(phase)

    (row,) = captured.communications()
    assert (row.step, row.microbatch, row.chunk, row.stage) == (3, 2, 0, 1)


def test_exceptions_of_torch_come_through_unchanged(captured: Recording) -> None:
    refused: Any = "no tensor"
    with pytest.raises(TypeError) as with_us:
        distributed_c10d._get_default_group().allreduce(refused)

    assert "allreduce()" in str(with_us.value)


def test_exceptions_of_the_original_are_not_ours(
    recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NetworkError(Exception):
        pass

    def broken(*_arguments: Any) -> None:
        raise NetworkError

    original = dist.ProcessGroup.__dict__["allreduce"]
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", broken)
    with recording.capturing(), pytest.raises(NetworkError):
        dist.all_reduce(ones(8))
    monkeypatch.undo()

    assert dist.ProcessGroup.__dict__["allreduce"] is original
    assert recording.warnings() == []


@pytest.mark.parametrize("place", ["registering the group", "reading where training is", "waiting"])
def test_a_failure_of_ours_never_reaches_the_caller_and_is_reported_once(
    captured: Recording, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise ZeroDivisionError("injected")

    if place == "registering the group":
        captured.tracer.groups.states.clear()
        monkeypatch.setattr(GroupRegistry, "register_known_groups", fail)
    elif place == "reading where training is":
        monkeypatch.delattr(captured.tracer, "_coordinates")
    else:
        monkeypatch.setattr(Tracer, "__setattr__", fail)

    for _ in range(3):
        dist.all_reduce(ones(8))
        work = dist.all_reduce(ones(8), async_op=True)
        assert work is not None
        assert work.wait()

    assert len(captured.warnings()) == 1
    assert caplog.text.count("capture of communication is switched off") == 1


class Unreadable(torch.Tensor):
    """A tensor that does not say how large it is."""

    nbytes = unreadable(NotImplementedError("unheard of"))

    def _indices(self) -> Any:
        raise NotImplementedError("unheard of")


def test_a_communication_whose_bytes_cannot_be_read_is_recorded_without_them(
    captured: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    strange = ones(8).as_subclass(Unreadable)
    issue: list[Callable[[], object]] = [
        lambda: dist.all_reduce(strange),
        lambda: dist.all_reduce(ones(8)),
        lambda: dist.all_reduce(strange),
        lambda: dist.send(strange, 2),
        lambda: dist.all_to_all_single(strange, strange, [2] * 4, [2] * 4),
    ]
    for call in issue:
        call()

    rows = captured.communications()
    assert [(row.name, row.seq, row.bytes, row.dtype) for row in rows] == [
        ("all_reduce", 0, -1, "float32"),
        ("all_reduce", 1, 32, "float32"),
        ("all_reduce", 2, -1, "float32"),
        ("send", 0, -1, "float32"),
        ("all_to_all", 3, -1, "float32"),
    ]
    assert len(captured.stalls()) == len(rows)
    messages = captured.warnings()
    assert [message.split(" cannot be read")[0] for message in messages] == [
        "the bytes of all_reduce", "the bytes of send", "the bytes of all_to_all",
    ]  # fmt: skip
    assert "switched off" not in caplog.text


def test_a_part_that_failed_takes_its_hooks_out(recording: Recording, world: None) -> None:
    original = dist.ProcessGroup.__dict__["allreduce"]
    with recording.capturing() as capture:
        recording.tracer.guard.on_failure("capture of communication", capture.uninstall)
        del recording.tracer._coordinates
        dist.all_reduce(ones(8), async_op=True)  # which is Python's with either engine

        assert dist.ProcessGroup.__dict__["allreduce"] is original


def class_dictionaries() -> dict[tuple[type, str], Any]:
    owners = [dist.ProcessGroup, dist.Work, *dist.Work.__subclasses__()]
    return {(owner, name): value for owner in owners for name, value in vars(owner).items()}


def assert_same_objects(first: dict[tuple[type, str], Any], second: dict[tuple[type, str], Any]) -> None:
    assert first.keys() == second.keys()
    assert [key for key in first if first[key] is not second[key]] == []


def test_uninstalling_restores_every_original_itself(recording: Recording) -> None:
    before = class_dictionaries()
    capture = ProcessGroupCapture(recording.tracer)
    assert_same_objects(before, class_dictionaries())  # nothing is patched by being there

    capture.install()
    capture.install()
    changed = class_dictionaries()
    assert {name for (_, name) in before if before[_, name] is not changed[_, name]} >= {"allreduce", "send", "wait"}
    capture.uninstall()
    capture.uninstall()

    assert_same_objects(before, class_dictionaries())


def test_a_method_that_somebody_else_has_replaced_since_is_left_alone(
    recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording.capturing():
        ours = dist.ProcessGroup.__dict__["allreduce"]

        def theirs(*arguments: Any, **keywords: Any) -> Any:
            return ours(*arguments, **keywords)

        monkeypatch.setattr(dist.ProcessGroup, "allreduce", theirs)
    recording.tracer.recording = False

    assert dist.ProcessGroup.__dict__["allreduce"] is theirs
    dist.all_reduce(ones(8))
    monkeypatch.undo()
    groups: Any = dist.ProcessGroup
    groups.allreduce = original_of(ours)


def test_replaced_methods_describe_themselves_as_the_originals(captured: Recording) -> None:
    replaced = dist.ProcessGroup.__dict__["allreduce"]

    assert replaced.__name__ == "allreduce"
    assert replaced.__doc__ == original_of(replaced).__doc__


@pytest.mark.parametrize("first", ["commtrace", "torch.distributed"])
def test_it_does_not_matter_who_starts_first(first: str) -> None:
    recording = Recording()
    if first == "commtrace":
        with recording.capturing(), fake_backend():
            dist.all_reduce(ones(8))
    else:
        with fake_backend(), recording.capturing():
            dist.all_reduce(ones(8))

    assert [(row.name, row.seq) for row in recording.communications()] == [("all_reduce", 0)]


def test_outside_the_window_numbers_go_on() -> None:
    recording = Recording(steps="1:2")
    with fake_backend(rank=1), recording.capturing():
        for step in range(3):
            recording.tracer.begin_step(step)
            dist.all_reduce(ones(8))
            dist.send(ones(8), 2)

    rows = recording.communications()
    assert [(row.name, row.step, row.seq) for row in rows] == [("all_reduce", 1, 1), ("send", 1, 1)]


def test_calls_of_several_threads_are_all_captured(captured: Recording) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(4)]

    def train(group: Any) -> None:
        for _ in range(100):
            dist.all_reduce(ones(8), group=group)
            work = dist.all_reduce(ones(8), group=group, async_op=True)
            assert work is not None
            work.wait()

    threads = [threading.Thread(target=train, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    rows = captured.communications()
    for group in {row.group for row in rows}:
        assert sorted(row.seq for row in rows if row.group == group) == list(range(200))
    assert len(rows) == 800
    assert len(captured.stalls()) == 800
    assert len({row.id for row in rows}) == 800
    assert captured.warnings() == []


def test_a_call_dropped_by_a_full_buffer_is_counted_with_its_stall() -> None:
    recording = Recording(capacity=3)
    with fake_backend(), recording.capturing():
        for _ in range(5):
            dist.all_reduce(ones(8))
        dist.send(ones(8), 2)

    assert len(recording.communications()) == 3
    assert recording.recorder.dropped == {"collective": 2, "p2p": 1, "stall": 3}


def test_every_method_of_the_class_is_known() -> None:
    assert process_groups.unknown_methods(dist.ProcessGroup) == []
    public = {name for name in vars(dist.ProcessGroup) if not name.startswith("_")}
    assert public - set(operations.OPERATIONS) - operations.NOT_COMMUNICATION - set(operations.ONE_SIDED) == set()


@pytest.mark.parametrize("name", ["gather_single", "gather_into_tensor"])
def test_a_gather_into_one_tensor_is_recorded(
    name: str, recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of torch 2.15, which the fake backend refuses."""
    monkeypatch.setattr(dist.ProcessGroup, name, lambda *_arguments: None, raising=False)
    options = dist.GatherOptions()
    options.rootRank = 3
    with recording.capturing():
        getattr(distributed_c10d._get_default_group(), name)(ones(32), ones(8), options)

    (row,) = recording.communications()
    assert (row.name, row.bytes, row.peer, row.seq) == ("gather", 32, 3, 0)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("new_window", "one-sided"), ("reconfigure", "members and numbers of before")],
)
def test_calls_that_cannot_be_followed_are_named(
    name: str, meaning: str, recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.ProcessGroup, name, lambda *_arguments: "done", raising=False)
    with recording.capturing():
        group: Any = distributed_c10d._get_default_group()
        assert recording.warnings() == []
        for _ in range(2):
            assert getattr(group, name)() == "done"

    (message,) = recording.warnings()
    assert message.startswith(f"ProcessGroup.{name} was called: ")
    assert meaning in message


def test_a_method_that_is_not_known_is_named_when_it_is_called(
    recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def teleport(_group: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _helper(_group: Any) -> str:
        return "no communication"

    monkeypatch.setattr(dist.ProcessGroup, "teleport", teleport, raising=False)
    monkeypatch.setattr(dist.ProcessGroup, "_helper", _helper, raising=False)
    with recording.capturing():
        group: Any = distributed_c10d._get_default_group()
        assert recording.warnings() == []
        group._helper()
        for _ in range(2):
            assert group.teleport(ones(3)).sum() == 3

    assert recording.tracer.untraced_paths == {"ProcessGroup.teleport"}
    (message,) = recording.warnings()
    assert "ProcessGroup.teleport was called" in message
    assert dist.ProcessGroup.__dict__["teleport"] is teleport


def test_a_communication_that_the_backend_refuses_has_no_row_and_its_number_is_used_again(
    recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusedError(Exception):
        pass

    def refuse(*_arguments: Any) -> None:
        raise RefusedError

    with monkeypatch.context() as patched:
        patched.setattr(dist.ProcessGroup, "allreduce", refuse)
        patched.setattr(dist.ProcessGroup, "send", refuse)
        with recording.capturing():
            dist.broadcast(ones(8), 0)
            for call in (lambda: dist.all_reduce(ones(8)), lambda: dist.send(ones(8), 2)):
                with pytest.raises(RefusedError):
                    call()
            dist.broadcast(ones(8), 0)
    with recording.capturing():
        dist.send(ones(8), 2)

    assert [(row.name, row.seq) for row in recording.communications()] == [
        ("broadcast", 0),
        ("broadcast", 1),
        ("send", 0),
    ]


def test_ranks_that_a_group_does_not_have_switch_nothing_off(
    recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise ValueError("invalid root")

    with monkeypatch.context() as patched:
        for method in ("broadcast", "send"):
            patched.setattr(dist.ProcessGroup, method, refuse)
        with recording.capturing():
            group: Any = distributed_c10d._get_default_group()
            for call in (
                lambda: group.broadcast(ones(8), 99),
                lambda: group.send([ones(8)], 99, 0),
            ):
                with pytest.raises(ValueError, match="invalid root"):
                    call()
            dist.barrier()

    assert recording.warnings() == []
    assert [(row.name, row.seq) for row in recording.communications()] == [("barrier", 0)]


def test_a_late_wait_gives_only_an_upper_bound_of_the_end(captured: Recording) -> None:
    """torch's pipelines wait for sends at the end of a step: the return of such a wait is no end of a transfer."""
    work = dist.isend(ones(8), 2)
    time.sleep(0.002)
    assert work is not None
    work.wait()
    dist.send(ones(8), 2)

    waited_late, synchronous = captured.communications()
    assert (waited_late.start_exact, waited_late.end_exact) == (True, False)
    assert (synchronous.start_exact, synchronous.end_exact) == (True, True)


def test_a_wait_that_blocks_shows_the_end(recording: Recording, world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_work: Any, *_arguments: Any) -> bool:
        time.sleep(0.002)
        return True

    for work_type in (dist.Work, *waits.subclasses(dist.Work)):
        if "wait" in work_type.__dict__:
            monkeypatch.setattr(work_type, "wait", as_method(wait))
    with recording.capturing():
        work = dist.isend(ones(8), 2)
        assert work is not None
        work.wait()

    (row,) = recording.communications()
    assert row.end_exact
