"""Runs whose transfers are known beside baselines that are known."""

from __future__ import annotations

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.analysis.communication.baseline_share import BaselineShare, baseline_shares, measure_sizes, whole_share
from commtrace.trace.run import Run
from tests.factory import collective, group, make_run, span

MS = 1_000_000
MIB = 1 << 20
DP = group("dp", 0, 1)


def two_ranks() -> Run:
    """Two ranks whose collective of 1 MiB is in flight for 2 ms, and whose one of 4 MiB for 8 ms."""
    rows = [
        span("step", 0, 40 * MS, step=1),
        collective("all_reduce", DP, 0, 2 * MS, 4 * MS, bytes=MIB, step=1),
        collective("all_reduce", DP, 1, 10 * MS, 18 * MS, bytes=4 * MIB, step=1),
    ]
    return make_run({0: rows, 1: rows}, [DP])


def shares(*measured: tuple[int, int]) -> tuple[BaselineShare, ...]:
    times = [
        Measurement("all_reduce", (0, 1), ("node0",), num_bytes, "float32", 20, MeasuredSpread(ns, ns, ns))
        for num_bytes, ns in measured
    ]
    return baseline_shares(measure_sizes(analyse(two_ranks(), "1")), NetworkBaseline({}, tuple(times)))


def test_each_size_is_compared_with_its_own_and_all_together_by_time() -> None:
    large, small = shares((MIB, 1 * MS), (4 * MIB, 6 * MS))

    assert (large.size, large.calls) == ((4 * MIB, 8 * MIB), 2)
    assert (small.size, small.calls) == ((MIB, 2 * MIB), 2)
    assert (large.share, small.share) == pytest.approx((0.75, 0.5))
    assert large.busbw_gbps == pytest.approx(4 * MIB / (8 * MS))
    assert large.baseline_busbw_gbps == pytest.approx(4 * MIB / (6 * MS))
    assert whole_share([large, small]) == pytest.approx((2 * 6 + 2 * 1) / (2 * 8 + 2 * 2))


def test_a_size_that_was_not_measured_has_no_share_and_does_not_count() -> None:
    large, small = shares((MIB, 1 * MS))

    assert (large.share, large.baseline_busbw_gbps) == (None, None)
    assert whole_share([large, small]) == small.share == pytest.approx(0.5)
    assert whole_share([large]) is None
