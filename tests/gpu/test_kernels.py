"""The comparison itself, on traces made by hand: needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.kernels import compared, nccl_kernels, recorded_operations, synchronisations


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    def kernel(name: str, correlation: int, start_us: float, duration_us: float) -> dict[str, Any]:
        return {
            "cat": "kernel", "name": name, "ts": start_us, "dur": duration_us, "args": {"correlation": correlation},
        }  # fmt: skip

    events = [
        kernel("ncclDevKernel_SendRecv", 9, 500.0, 50.0),
        kernel("gemm", 5, 0.0, 100.0),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7, 100.0, 250.5),
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0.0, "dur": 1.0, "args": {}},
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def row(
    number: int, start: int, end: int, op_in_seq: int = 0, timing: str = "cuda_event", name: str = "all_reduce"
) -> Any:
    return {"id": number, "start": start, "end": end, "op_in_seq": op_in_seq, "timing": timing, "name": name}


def test_kernels_come_in_the_order_of_their_launches(trace: Path) -> None:
    assert [(kernel.name[:16], kernel.start, kernel.end) for kernel in nccl_kernels(trace)] == [
        ("ncclDevKernel_Al", 100_000, 350_500),
        ("ncclDevKernel_Se", 500_000, 550_000),
    ]
    assert synchronisations(trace) == 1


def test_a_bracket_is_one_kernel() -> None:
    rows = [row(5, 0, 1, op_in_seq=1), row(4, 0, 1), row(3, 0, 1)]

    assert [kept["id"] for kept in recorded_operations(rows)] == [3, 4]


def test_errors_are_what_the_constant_difference_of_the_clocks_leaves(trace: Path) -> None:
    operations = [row(0, 1_098_000, 1_350_500), row(1, 1_500_000, 1_550_000)]

    errors = compared(nccl_kernels(trace), operations)

    assert errors.start.tolist() == [-2_000, 0]
    assert errors.end.tolist() == [0, 0]


def test_what_is_not_known_exactly_is_not_judged(trace: Path) -> None:
    operations = [row(0, 100_000, 900_000, timing="unknown"), row(1, 500_000, 550_000)]

    assert compared(nccl_kernels(trace), operations).end.tolist() == [0]


def test_spans_of_another_timing_are_compared_by_the_same_clocks(trace: Path) -> None:
    operations = [row(0, 1_100_000, 1_353_500, timing="nccl_timing"), row(1, 1_500_000, 1_550_000)]

    errors = compared(nccl_kernels(trace), operations, "nccl_timing")

    assert (errors.start.tolist(), errors.end.tolist()) == ([0], [3_000])


def test_barriers_are_compared_apart(trace: Path) -> None:
    operations = [row(0, 100_000, 350_500), row(1, 499_000, 550_500, name="barrier")]

    others = compared(nccl_kernels(trace), operations)
    barriers = compared(nccl_kernels(trace), operations, barriers=True)

    assert (others.start.tolist(), others.end.tolist()) == ([-250], [-250])
    assert (barriers.start.tolist(), barriers.end.tolist()) == ([-1_250], [250])


def test_barriers_are_compared_also_where_their_ends_are_bounds(trace: Path) -> None:
    operations = [row(0, 100_000, 350_500), row(1, 499_000, 550_500, timing="unknown", name="barrier")]

    barriers = compared(nccl_kernels(trace), operations, barriers=True)

    assert (barriers.start.tolist(), barriers.end.tolist()) == ([-1_000], [500])


def test_a_missing_span_is_an_error(trace: Path) -> None:
    with pytest.raises(AssertionError):
        compared(nccl_kernels(trace), [row(0, 0, 1)])
