"""Sums of parts add up to those of the whole."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.communication.calls import CallSums, CallTable, Moved, sum_calls, sum_stalls

ALL_TO_ALL = 2
FLAGS = ("finished", "complete", "mismatched", "duration_exact", "transfer_exact")
EXACT = {name: np.ones(3, np.bool_) for name in ("duration_exact", "transfer_exact")} | {
    "replayed": np.zeros(3, np.bool_)
}


def made(count: int, seed: int) -> CallTable:
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {column.name: random.integers(0, 1_000, count) for column in fields(CallTable)}
    columns["calls"] = np.ones(count, np.int64)
    columns["name"] = random.integers(0, 4, count)
    columns["self_bytes"] = random.integers(-1, 3, count)
    flags = {name: random.random(count) < 0.7 for name in FLAGS}
    flags["replayed"] = ~flags["finished"] & (random.random(count) < 0.5)
    return CallTable(**{**columns, **flags})


def summed(calls: CallTable) -> CallSums:
    (sums,) = sum_calls(calls, ALL_TO_ALL, np.arange(len(calls)), np.zeros(1, np.int64))
    return sums


def found(sums: CallSums) -> list[object]:
    return [
        sorted(np.concatenate(value.parts).tolist()) if name.endswith("_durations") else value
        for name in CallSums.__slots__
        for value in (getattr(sums, name),)
    ]


@given(st.integers(2, 40), st.integers(0, 2**20), st.randoms(use_true_random=False))
def test_sums_of_two_parts_are_those_of_the_whole(count: int, seed: int, random: Random) -> None:
    calls = made(count, seed)
    cut = random.randint(1, count - 1)

    parts = [summed(calls.take(rows)) for rows in (np.arange(cut), np.arange(cut, count))]

    assert found(parts[0] + parts[1]) == found(summed(calls))


def test_an_uneven_all_to_all_moves_only_what_goes_to_other_ranks() -> None:
    calls = made(3, 0)
    columns = {
        "name": np.array([ALL_TO_ALL, ALL_TO_ALL, 0]),
        "num_bytes": np.array([100, 10, 1]),
        "self_bytes": np.array([40, -1, 0]),
        "duration": np.array([7, 8, 9]),
        "finished": np.array([True, True, False]),
        "complete": np.array([False, True, True]),
        "transfer": np.array([1, 2, 3]),
        **EXACT,
    }
    sums = summed(
        CallTable(
            **{column.name: columns.get(column.name, getattr(calls, column.name)) for column in fields(CallTable)}
        )
    )

    assert sums.all == Moved(calls=3, num_bytes=111, even=11, uneven=60, time_ns=0)
    assert sums.finished == Moved(calls=2, num_bytes=110, even=10, uneven=60, time_ns=15)
    assert sums.matched == Moved(calls=1, num_bytes=10, even=10, uneven=0, time_ns=2)
    assert (sums.count, sums.unfinished, sums.complete) == (3, 1, 2)


def test_stalls_add_nothing_but_the_time_that_the_lane_stood_still() -> None:
    stalls = CallTable.empty(3, exposed=np.array([5, 6, 7]))

    sums = sum_stalls(stalls, np.array([2, 0, 1]), np.array([0, 1]))

    assert [one.exposed_ns for one in sums] == [7, 11]
    assert all(one.count == one.unsized == one.unfinished == 0 and one.num_bytes is None for one in sums)


def test_calls_of_unknown_size_count_and_move_nothing() -> None:
    """Their time would make the bandwidth of the others too small."""
    calls = made(3, 0)
    columns = {
        "name": np.zeros(3, np.int64),
        "num_bytes": np.array([-1, 10, 0]),
        "self_bytes": np.full(3, -1),
        "duration": np.array([7, 8, 9]),
        "finished": np.ones(3, np.bool_),
        "complete": np.ones(3, np.bool_),
        "transfer": np.array([1, 2, 3]),
        **EXACT,
    }
    sums = summed(
        CallTable(
            **{column.name: columns.get(column.name, getattr(calls, column.name)) for column in fields(CallTable)}
        )
    )

    assert (sums.count, sums.unsized, sums.unfinished, sums.num_bytes) == (3, 1, 0, 10)
    assert sums.matched == Moved(calls=2, num_bytes=10, even=10, uneven=0, time_ns=5)
