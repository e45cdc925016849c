"""The comparison itself, on traces made by hand: needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.engines import recorded_rows
from tests.gpu.kernels import (
    Interval,
    Kernel,
    all_kernels,
    compared,
    distances,
    exposed_ns,
    nccl_kernels,
    nccl_of,
    read_kernels,
    recorded_operations,
    synchronisations,
    without_replays,
    write_kernels,
)
from tests.reference import reference_data


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


def test_inexact_times_are_not_judged(trace: Path) -> None:
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


def exact_row(number: int, start: int, end: int, *, start_exact: bool = True, end_exact: bool = True) -> Any:
    return {**row(number, start, end), "start_exact": start_exact, "end_exact": end_exact}


def test_exact_times_are_told_from_bounds_by_their_columns(trace: Path) -> None:
    operations = [exact_row(0, 1_060_000, 1_351_500, start_exact=False), exact_row(1, 1_503_000, 1_550_000)]

    found = distances(nccl_kernels(trace), operations)

    assert found.exact_starts.tolist() == [2_500]
    assert found.lower_bounds.tolist() == [-40_500]
    assert found.exact_ends.tolist() == [500, -500]
    assert found.upper_bounds.tolist() == []
    assert found.misses(3_000) == []
    assert found.misses(1_000) == ["95 % of the exact starts are within 2.5 µs only"]


def test_a_bound_on_the_wrong_side_is_a_miss(trace: Path) -> None:
    operations = [
        exact_row(0, 1_160_000, 1_300_000, start_exact=False, end_exact=False),
        exact_row(1, 1_500_000, 1_550_000),
    ]

    assert distances(nccl_kernels(trace), operations).misses(20_000) == [
        "a bound of starts lies on the wrong side of its kernel by 60.0 µs",
        "a bound of ends lies on the wrong side of its kernel by 50.5 µs",
    ]


def test_a_row_from_before_the_columns_says_by_its_timing_what_is_a_bound(trace: Path) -> None:
    operations = [row(0, 100_000, 900_000, timing="unknown"), row(1, 500_000, 550_000)]

    found = distances(nccl_kernels(trace), operations)

    assert (found.exact_starts.tolist(), found.exact_ends.tolist()) == ([0, 0], [0])
    assert found.upper_bounds.tolist() == [549_500]


def test_a_table_of_kernels_is_read_as_it_was_written(trace: Path, tmp_path: Path) -> None:
    kernels = all_kernels(trace)
    write_kernels(kernels, tmp_path / "kernels.csv.gz")

    assert read_kernels(tmp_path / "kernels.csv.gz") == kernels
    assert [kernel.is_nccl for kernel in kernels] == [False, True, True]


def test_communication_is_exposed_where_no_kernel_computes() -> None:
    def kernel(start: int, end: int) -> Kernel:
        return Kernel("gemm", 7, 0, start, end, False)

    computing = [kernel(0, 10), kernel(5, 20), kernel(30, 40), kernel(70, 90)]

    assert exposed_ns(computing, [Interval("nccl", 10, 50), Interval("nccl", 60, 80)]) == (40 - 10 - 10) + (20 - 10)
    assert exposed_ns([], [Interval("nccl", 10, 50)]) == 40


def test_the_recorded_operations_of_an_h100_show_which_starts_are_early() -> None:
    """The recording is of a version that called every start exact: of three in flight at once the last one's is not."""
    folder = reference_data("gpu_h100", "operations")
    steps = range(100, 108)
    for rank in range(2):
        rows = [row for row in recorded_rows(folder / "run", rank) if row["step"] in steps]
        operations = recorded_operations([row for row in rows if row["kind"] in ("collective", "p2p")])
        launched = nccl_of(without_replays(read_kernels(folder / f"kernels-{rank}.csv.gz")))

        found = distances(launched, operations)

        assert np.percentile(np.abs(found.exact_ends), 95) < 5_000
        assert int((found.exact_starts < -1_000_000).sum()) == len(steps)
        assert found.exact_starts.min() > -4_500_000
        assert found.misses(20_000) != []
