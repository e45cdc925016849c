"""What is normal among ranks that do the same work: small tables, judged by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.stragglers.limits import Limits
from commtrace.analysis.stragglers.normal import FASTEST, MAJORITY, PAST, UNKNOWN, Judged, Work, judge

MS = 1e6
LIMITS = Limits(share=0.03, least_ns=0.5 * MS, sigmas=2.5)


def judged(
    work_ms: Sequence[float],
    *,
    error_ms: float = 0.1,
    peers: Sequence[int] | None = None,
    host: Sequence[int] | None = None,
    before_ms: Sequence[float] | None = None,
) -> Judged:
    ranks = len(work_ms)
    return judge(
        Work(
            rank=np.arange(ranks),
            peers=np.array(peers or [0] * ranks),
            host=np.array(host or [0] * ranks),
            total_ns=np.array(work_ms) * MS,
            error_ns=np.full(ranks, error_ms * MS),
            scale_ns=np.full(ranks, 100 * MS),
            before_ns=None if before_ms is None else np.array(before_ms) * MS,
        ),
        LIMITS,
    )


@pytest.mark.parametrize(
    ("work_ms", "slow", "norm_source"),
    [
        ((100, 101, 100, 99), [], MAJORITY),
        ((100, 101, 100, 150), [3], MAJORITY),
        ((100, 101, 100, 150, 120, 99, 100), [3, 4], MAJORITY),
        ((100, 150, 100, 150), [1, 3], FASTEST),
        ((100, 104), [], FASTEST),  # 4 % would do among many, of two ranks it takes 5 %
        ((100, 106), [1], FASTEST),
        ((100, 100, 130, 150, 170), [2, 3, 4], FASTEST),
    ],
)
def test_slow_ranks_are_found_with_the_norm_that_shows_them(
    work_ms: Sequence[float], slow: Sequence[int], norm_source: str
) -> None:
    found = judged(work_ms)

    assert found.slow_ranks == slow
    assert set(found.norm_source) == {norm_source}
    assert found.undecided == ()


def test_one_fast_rank_of_four_is_not_the_norm_and_it_is_told_what_would_tell() -> None:
    found = judged((100, 150, 150, 150))

    assert (found.slow_ranks, set(found.norm_source)) == ([], {MAJORITY})
    assert found.undecided == (
        "Rank 0 works 100.0 ms per step, and most ranks that do the same work 150.0 ms: either these are slow, or the "
        "former have less to do. A healthy run (--baseline RUN) decides.",
    )


def test_excess_is_counted_from_the_median_of_the_normal_cluster() -> None:
    found = judged((100, 101, 99, 150, 120))

    assert found.normal_ns.tolist() == [100 * MS] * 5
    assert found.excess_ns.tolist() == [0, 1 * MS, -1 * MS, 50 * MS, 20 * MS]
    assert found.normal_ranks.tolist() == [0, 1, 2]


def test_three_ranks_that_all_differ_tell_nothing() -> None:
    found = judged((60, 80, 90))

    assert (found.slow_ranks, set(found.norm_source)) == ([], {UNKNOWN})
    (sentence,) = found.undecided
    assert "rank 0 works 60.0 ms per step, rank 1 works 80.0 ms per step" in sentence
    assert "(--baseline RUN)" in sentence


def test_the_past_tells_what_the_present_cannot() -> None:
    assert judged((60, 80, 90), before_ms=(60, 60, 60)).slow_ranks == [1, 2]
    most = judged((100, 150, 150, 150), before_ms=(100,) * 4)
    assert (most.slow_ranks, set(most.norm_source)) == ([1, 2, 3], {PAST})
    # Two ranks have become faster, and nobody slow.
    assert judged((100, 100, 150, 150, 150), before_ms=(150,) * 5).slow_ranks == []


def test_whole_hosts_that_are_slow_are_compared_with_those_that_are_not_however_many() -> None:
    work = (100, 100, 150, 150, 150, 150)
    assert judged(work, host=(0, 0, 1, 1, 2, 2)).slow_ranks == [2, 3, 4, 5]
    assert judged(work, host=(0, 1, 0, 1, 2, 2)).slow_ranks == []


def test_noise_over_time_widens_what_is_alike() -> None:
    assert judged((100, 100, 100, 112), error_ms=1.0).slow_ranks == [3]
    assert judged((100, 100, 100, 112), error_ms=4.0).slow_ranks == []


def test_ranks_that_differ_for_good_widen_it_too() -> None:
    # 7.2 ms are a gap, but no more than 2.5 times the scatter of the others: 1.4826 times a median deviation of 2 ms.
    assert judged((96, 98, 100, 102, 104, 107.2)).slow_ranks == []
    assert judged((96, 98, 100, 102, 104, 108.1)).slow_ranks == [5]
    assert judged((99.8, 100, 100, 100.2, 104)).slow_ranks == [4]


def test_classes_are_judged_apart_and_a_rank_alone_is_not() -> None:
    found = judged((100, 100, 100, 200, 200, 260, 500), peers=(0, 0, 0, 1, 1, 1, 2))

    assert found.slow_ranks == [5]
    assert np.isnan(found.excess_ns[6])
    assert not found.is_slow[6]


HALF = [0] * 4 + [1] * 4
WELL = [100.0] * 8


@pytest.mark.parametrize(
    ("work_ms", "others", "slow", "norm_source", "abstains"),
    [
        ([100] * 7 + [130], {}, [7], MAJORITY, False),
        ([100] * 3 + [120] * 5, {"before_ms": WELL}, [3, 4, 5, 6, 7], PAST, False),
        ([100] * 3 + [120] * 5, {}, [], MAJORITY, True),
        ([100] * 4 + [120] * 4, {}, [4, 5, 6, 7], FASTEST, False),
        ([100] * 4 + [130] * 4, {"host": HALF}, [4, 5, 6, 7], FASTEST, False),
        ([100, 106, 112, 118, 124, 130, 136, 142], {}, [], UNKNOWN, True),
        ([130] * 8, {}, [], MAJORITY, False),
    ],
)
def test_the_cases_that_the_documentation_draws(
    work_ms: Sequence[float], others: dict[str, Any], slow: list[int], norm_source: str, abstains: bool
) -> None:
    found = judged(work_ms, **others)

    assert (found.slow_ranks, found.norm_source[0], bool(found.undecided)) == (slow, norm_source, abstains)
