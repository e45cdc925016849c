"""Starts and ends of two recordings of an H100, beside the kernels that torch.profiler saw in the same runs.

Both were written before rows said whether their start and end are exact: the reader tells it. What rows cannot tell is
left: where the device waits for the host, a start is early by what the launch takes (under the profiler up to 0.15 ms),
and where four processes take turns on the GPU, a kernel may start milliseconds behind the last event of its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from commtrace.analysis.breakdown.partition import partition
from commtrace.analysis.communication.table import communication_table
from commtrace.analysis.matching.match import match
from commtrace.analysis.matching.operations import communication_rows
from commtrace.analysis.matching.roles import find_roles
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64, Spans
from tests.gpu.kernels import nccl_of, read_kernels, without_replays
from tests.reference import reference_data

PROFILED = {"operations": range(100, 108), "megatron_tp2_pp2": range(3, 7)}
CLOSE_NS = 50_000
LAUNCH_NS = 150_000
ENDS_NS = 40_000


class Pairs(NamedTuple):
    """The communications of a rank under the profiler, a row per kernel, in the order of their launches."""

    spans: Spans
    kernel_start: Int64  # on the clock of the spans
    kernel_end: Int64
    is_behind: Bool  # launched before the kernel of the operation before it on its communicator had ended


@pytest.fixture(scope="module", params=PROFILED)
def recorded(request: pytest.FixtureRequest) -> tuple[str, Run]:
    name: str = request.param
    return name, load_run(reference_data("gpu_h100", name, "run"))


def pairs_of(name: str, run: Run) -> Iterator[Pairs]:
    for rank, trace in run.ranks.items():
        start, end = kernels(name, rank)
        spans = trace.spans
        sends = [number for number, group in trace.groups.items() if group.size > 1]
        chosen = communication_rows(spans) & (spans.timing != schema.HOST_TIMING) & (spans.op_in_seq == 0)
        chosen &= np.isin(spans.step, PROFILED[name]) & np.isin(spans.group, sends)
        spans = spans.take(np.flatnonzero(chosen))
        spans = spans.take(np.argsort(spans.id))
        assert len(spans) == len(start)
        offset = int(np.median((spans.end - end)[spans.end_exact]))
        start, end = start + offset, end + offset
        yield Pairs(spans, start, end, launched_behind(spans, end))


def kernels(name: str, rank: int) -> tuple[Int64, Int64]:
    """Start and end of the kernels of a rank, in the order of their launches, without those of replayed graphs."""
    launched = nccl_of(without_replays(read_kernels(reference_data("gpu_h100", name, f"kernels-{rank}.csv.gz"))))
    return np.array([kernel.start for kernel in launched]), np.array([kernel.end for kernel in launched])


def launched_behind(spans: Spans, kernel_end: Int64) -> Bool:
    behind = np.zeros(len(spans), np.bool_)
    for group in np.unique(spans.group):
        rows = np.flatnonzero(spans.group == group)
        behind[rows[1:]] = spans.start[rows[1:]] + CLOSE_NS < kernel_end[rows[:-1]]
    return behind


def test_the_starts_of_operations_behind_one_in_flight_are_bounds_and_no_others(recorded: tuple[str, Run]) -> None:
    name, _ = recorded
    for pairs in pairs_of(*recorded):
        assert np.array_equal(~pairs.spans.start_exact, pairs.is_behind)
        assert pairs.is_behind.sum() == {"operations": 8, "megatron_tp2_pp2": 0}[name]


def test_bounds_of_starts_are_bounds() -> None:
    for pairs in pairs_of("operations", load_run(reference_data("gpu_h100", "operations", "run"))):
        early = (pairs.kernel_start - pairs.spans.start)[~pairs.spans.start_exact]
        assert (early > 3_000_000).all()  # so much would the transfer of a kernel of 4.4 ms be too long


def test_exact_starts_are_those_of_the_kernels(recorded: tuple[str, Run]) -> None:
    name, _ = recorded
    for pairs in pairs_of(*recorded):
        error = np.abs(pairs.kernel_start - pairs.spans.start)[pairs.spans.start_exact]
        if name == "operations":
            assert error.max() < LAUNCH_NS
        else:  # four processes take turns on the GPU
            assert np.percentile(error, 95) < CLOSE_NS


def test_ends_that_differ_from_their_kernels_are_bounds_and_no_others(recorded: tuple[str, Run]) -> None:
    for pairs in pairs_of(*recorded):
        late = pairs.spans.end - pairs.kernel_end
        assert np.abs(late[pairs.spans.end_exact]).max() < ENDS_NS
        assert (late[~pairs.spans.end_exact] > ENDS_NS).all()


def test_the_bandwidth_is_that_of_the_kernels_of_exact_calls() -> None:
    """Of six all_reduces in a step two ended unseen, and one began behind one of them."""
    run = load_run(reference_data("gpu_h100", "operations", "run"))
    matches, roles = match(run), find_roles(run)
    steps = PROFILED["operations"]
    rows = communication_table(run, matches, partition(run, matches, roles), roles, steps)

    (row,) = [row for row in rows if row.operation == "all_reduce"]

    pairs = [*pairs_of("operations", run)]
    is_reduce = pairs[0].spans.name == run.name_code("all_reduce")
    exact = is_reduce & np.logical_and.reduce([own.spans.start_exact & own.spans.end_exact for own in pairs])
    by_kernels = busbw(pairs, exact)
    assert (row.count, row.upper_bounds) == (2 * 6 * 8, 2 * 3 * 8)
    assert (row.bandwidth_time, row.bandwidth_is_bound) == ("transfer", False)
    assert row.busbw_gbps == pytest.approx(by_kernels, rel=0.01)
    late = is_reduce & ~pairs[0].spans.start_exact
    time = sum(int((own.spans.end - last_start(pairs, of_spans=True))[late].sum()) for own in pairs)
    assert sum_of(pairs, late, "bytes") / time < 0.6 * busbw(pairs, late)  # what a bound would give


def busbw(pairs: list[Pairs], chosen: Bool) -> float:
    """The busbw of these calls of two ranks (factor 1) by their kernels, GB/s."""
    time = sum(int((own.kernel_end - last_start(pairs))[chosen].sum()) for own in pairs)
    return sum_of(pairs, chosen, "bytes") / time


def last_start(pairs: list[Pairs], *, of_spans: bool = False) -> Int64:
    starts = [own.spans.start if of_spans else own.kernel_start for own in pairs]
    return np.asarray(np.maximum.reduce(starts))


def sum_of(pairs: list[Pairs], chosen: Bool, column: str) -> int:
    return sum(int(getattr(own.spans, column)[chosen].sum()) for own in pairs)


def test_links_and_large_calls_are_of_exact_transfers() -> None:
    run = load_run(reference_data("gpu_h100", "operations", "run"))
    matches = match(run)
    for rank, trace in run.ranks.items():
        own = matches.ranks[rank]
        bounds = communication_rows(trace.spans) & ~trace.spans.start_exact
        assert bounds.any()
        assert not own.transfer_exact(trace.spans)[bounds].any()
        assert not own.wait_ns(trace.spans)[bounds].any()
