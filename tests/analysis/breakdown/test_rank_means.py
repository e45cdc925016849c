from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.breakdown.partition import partition
from commtrace.analysis.breakdown.rank_means import apportion, rank_means
from commtrace.analysis.matching.match import match
from tests.factory import make_run, span
from tests.json_reading import read_back

PARTS = ("compute", "exposed_total", "exposed_memory", "bubble", "idle", "data", "checkpoint", "gc", "other")


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=20), st.integers(1, 1000))
def test_shares_are_whole_and_add_up(totals: list[int], count: int) -> None:
    shares = apportion(np.array(totals), count)
    assert sum(shares) == sum(totals) // count
    assert all(abs(share - total / count) < 1 + 1e-3 for share, total in zip(shares, totals, strict=True))


def test_the_largest_remainders_are_rounded_up() -> None:
    assert apportion(np.array([10, 11, 12]), 3) == [3, 4, 4]


def test_a_mean_step_adds_up() -> None:
    rows = [
        *(span("step", 100 * step, 100 * step + 100, step=step) for step in range(3)),
        span("forward", 0, 40),
        span("forward", 101, 132),
        span("data", 200, 207),
        span("gc", 250, 251),
    ]
    run = make_run({0: rows}, coordinates={"dp": 0})
    matches = match(run)
    (mean,) = rank_means(run, partition(run, matches), matches)
    written = read_back(mean.to_json())
    assert written["wall_ns"] == 100
    assert sum(written[f"{part}_ns"] for part in PARTS) == 100
    assert (written["rank"], written["host"], written["coordinates"]) == (0, "node0", {"dp": 0})
    assert written["compute_ns"] == sum(written["compute_phases_ns"].values()) == 24  # 71 / 3 = 23.67
    assert (written["data_ns"], written["gc_ns"], written["other_ns"]) == (2, 0, 74)  # 2.33, 0.33 and 73.67
