"""Traces of devices that are not CUDA's, made by hand in the shape that their profilers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.summary import summarise
from commtrace.interchange.traces.kineto import import_kineto
from tests.interchange.traces.kineto_files import Event, annotation, copy, kernel, write_trace

CALL = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Description": "default_pg",
    "Process Group Ranks": "[0, 1]",
    "In msg nelems": 1_000,
    "Out msg nelems": 1_000,
    "dtype": "Float",
}


def xpu_kernel(name: str, start: float, duration: float, link: int = 5, queue: int = 64) -> Event:
    """A kernel as PTI gives it: no stream, no description of a collective."""
    arguments = {
        "External id": link, "kernel_id": 1, "l0 queue": "0x000055d08b8fc138", "sycl queue": queue, "device": 0,
        "correlation": 4131, "appended": "8.1", "submitted": "8.2",
    }  # fmt: skip
    return {**kernel(start, duration, name, queue), "args": arguments}


def host(name: str, start: float, duration: float, link: int, **arguments: Any) -> Event:
    return {**annotation(name, start, duration), "cat": "cpu_op", "args": {"External id": link, **arguments}}


def xpu_rank(path: Path, rank: int, name: str, *, is_open: bool) -> Path:
    """Compute for 10 or 14 µs and reduce until 20 µs, twice. The description is still open at the launch, or not."""
    events = [{**annotation("urEnqueueKernelLaunch", 0, 1), "cat": "xpu_runtime"}]
    for number in (0, 1):
        begin, works, link = 20 * number, 14 if rank else 10, 10 + 10 * number
        events += [
            host("c10d::allreduce_", begin, 4, link),
            host("record_param_comms", begin + 1, 2 if is_open else 1, link + 1, **CALL, Seq=number),
            host("xccl:all_reduce", begin + 2, 1, link + 2),
            xpu_kernel("gemm_kernel", begin, works, 3),
            xpu_kernel(name, begin + works, 20 - works, link + 1 if is_open else link),
        ]
    return write_trace(path / f"{rank}.json", events, rank=rank, world_size=2, distributed={"backend": "xccl"})


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", ["oneccl_reduce_base<float, 2, 16, 1, 1, 2>", "Rt64_128_PCIE"])
def test_collectives_of_xpu_are_those_that_their_calls_describe(tmp_path: Path, name: str, *, is_open: bool) -> None:
    import_kineto([xpu_rank(tmp_path, rank, name, is_open=is_open) for rank in (0, 1)], tmp_path / "run")

    summary = summarise(tmp_path / "run")
    (row,) = summary.communication
    assert (row.operation, row.role, row.group_size, row.count, row.num_bytes) == ("all_reduce", "world", 2, 4, 16_000)
    assert [(rank.part("compute"), rank.wait_ns) for rank in summary.ranks] == [(20_000, 8_000), (28_000, 0)]


def test_a_kernel_of_oneccl_without_a_call_communicates(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "0.json", [xpu_kernel("oneccl_allreduce_pcie", 0, 5), xpu_kernel("gemm", 5, 5)])
    import_kineto([trace], tmp_path / "run")

    (row,) = summarise(tmp_path / "run").communication
    assert (row.operation, row.exposed_ns) == ("all_reduce", 5_000)


def test_an_operation_around_several_calls_describes_none(tmp_path: Path) -> None:
    events = [
        host("c10d::allreduce_coalesced_", 0, 9, 1),
        host("record_param_comms", 1, 1, 2, **CALL),
        host("record_param_comms", 3, 1, 3, **CALL),
        xpu_kernel("oneccl_allreduce", 10, 5, 1),
    ]
    import_kineto([write_trace(tmp_path / "0.json", events)], tmp_path / "run")

    (row,) = summarise(tmp_path / "run").communication
    assert (row.operation, row.num_bytes) == ("all_reduce", None)


@pytest.mark.parametrize("kind", ["kernel", "Kernel"])
def test_kernels_of_gaudi_compute_and_what_its_nic_does_is_not_known(tmp_path: Path, kind: str) -> None:
    """Its bridge writes MME and TPC as kernels, and all other engines, as the NIC, beside the host's calls."""
    recipe = {"recipeId": 3, "recipeName": ".graph_dumps/recipe_3", "streamHandle": "0x1", "dataType": "bf16"}
    events = [
        {**kernel(0, 6, "GEMM"), "cat": kind, "args": {"device": 6, **recipe}},
        {**kernel(6, 2, "fused_kernel_0x123_f32"), "cat": kind, "args": {"device": 6, **recipe}},
        copy(8, 1, "memcpy_d2h", "gpu_memcpy" if kind == "kernel" else "Memcpy"),
        {**annotation("Launch", 0, 1), "cat": "privateuse1_runtime" if kind == "kernel" else "Runtime"},
    ]
    import_kineto([write_trace(tmp_path / "0.json", events)], tmp_path / "run")

    summary = summarise(tmp_path / "run")
    assert (summary.ranks[0].part("compute"), summary.ranks[0].part("memory")) == (8_000, 1_000)
    assert any("as Gaudi does" in problem for problem in summary.problems)
