"""Numbers of what a backend refuses are free again, so that those of all ranks stay equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.collectives.ddp_reducer import CppCalls, ReducerCapture
from commtrace.capture.collectives.functional import FunctionalCapture, FunctionalWaits
from commtrace.capture.collectives.groups import GroupState
from tests.capture.recording import Recording, of_all_reduce
from tests.process_groups import world_group
from tests.unreadable import unreadable

OPERATIONS: Any = torch.ops._c10d_functional


class Unreadable(torch.Tensor):
    """A tensor that does not say how large it is."""

    nbytes = unreadable(NotImplementedError("unheard of"))


@pytest.fixture
def state(recording: Recording) -> Iterator[GroupState]:
    """Of the group of one rank that is alone under gloo, which sends nothing to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    functional = FunctionalCapture(recording.tracer, FunctionalWaits(recording.tracer))
    reducer = ReducerCapture(recording.tracer, CppCalls(recording.tracer))
    functional.install()
    reducer.install()
    reducer._watch()
    try:
        yield recording.tracer.groups.state(world_group())
    finally:
        functional.uninstall()
        reducer.uninstall()
        dist.destroy_process_group()
    assert recording.warnings() == []


def numbers(state: GroupState) -> dict[tuple[bool, int, int], int]:
    """What each direction to each peer will have next, the tag taken off."""
    return {(is_send, peer, tag): count for is_send, peer, tag, count in state.collective_seq.messages()}


@pytest.mark.skipif(not hasattr(OPERATIONS, "batch_p2p_ops"), reason="this torch has no functional point-to-point")
def test_a_message_that_is_refused_takes_no_number(state: GroupState) -> None:
    tensors, group = [torch.ones(2), torch.ones(2)], _name_of_world()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            OPERATIONS.isend(tensors[0], 0, 3, group)
        with pytest.raises(RuntimeError):
            OPERATIONS.batch_p2p_ops(["isend", "irecv"], [0, 0], [0, 0], tensors, group)

    assert numbers(state) == {(True, 0, 3): 0, (True, 0, 0): 0, (False, 0, 0): 0}


def test_a_collective_of_cpp_that_is_refused_takes_no_number(state: GroupState) -> None:
    with pytest.raises(RuntimeError):
        dist._broadcast_coalesced(world_group(), [torch.ones(2)], 100, 7)

    assert next(state.collective_seq) == 0


def test_bytes_that_cannot_be_read_cost_a_communication_of_cpp_nothing_else(
    state: GroupState, recording: Recording
) -> None:
    strange = torch.ones(2).as_subclass(Unreadable)

    OPERATIONS.wait_tensor(OPERATIONS.all_reduce(strange, "sum", _name_of_world()))
    torch.ops.c10d.allreduce_([strange], world_group().boxed(), *of_all_reduce())
    recording.tracer.completions.wait(10)

    rows = sorted(recording.communications(), key=lambda row: row.seq)
    assert [(row.name, row.seq, row.bytes, row.dtype) for row in rows] == [
        ("all_reduce", 0, -1, "float32"), ("all_reduce", 1, -1, "float32"),
    ]  # fmt: skip
    assert len(recording.warnings()) == 1


def _name_of_world() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)
