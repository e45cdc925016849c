"""The NCCL backend of a group is recognised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from commtrace.capture.collectives.operations import LAZY, LEGACY, NCCL2, OPERATIONS, NcclBackend, nccl_backend


def group(name: str) -> Any:
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: name))


@pytest.mark.parametrize(
    ("name", "backend"), [("nccl", LEGACY), ("nccl2", NCCL2), ("nccl-lazy", LAZY), ("gloo", LEGACY)]
)
def test_the_backend_says_its_name(name: str, backend: NcclBackend) -> None:
    assert nccl_backend(group(name)) is backend


@pytest.mark.usefixtures("world")
def test_a_real_group_without_cuda_has_none_of_the_new_ones() -> None:
    assert nccl_backend(distributed_c10d._get_default_group()) is LEGACY


def test_only_nccl2_runs_on_the_current_stream_what_it_returns_a_work_of() -> None:
    all_reduce, barrier, send = OPERATIONS["allreduce"], OPERATIONS["barrier"], OPERATIONS["send"]

    for asynchronous in (True, False):
        for operation in (all_reduce, barrier, send):
            assert not LEGACY.runs_on_current_stream(operation, asynchronous)
    assert [NCCL2.runs_on_current_stream(all_reduce, is_async) for is_async in (True, False)] == [False, True]
    assert [NCCL2.runs_on_current_stream(barrier, is_async) for is_async in (True, False)] == [True, True]
    assert [LAZY.runs_on_current_stream(send, is_async) for is_async in (True, False)] == [False, False]
