"""Planned memory beside recorded peaks: each difference has a sentence."""

from __future__ import annotations

import pytest

from commtrace.analysis.memory import RankMemory
from commtrace.planning.memory import Activations, Memory
from commtrace.planning.memory_against import MemoryRow, memory_beside

PLANNED = Memory(100, 200, 300, (Activations("attention", 250), Activations("mlp", 150)))  # 1000 in all


def peak(rank: int, allocated_bytes: int) -> RankMemory:
    return RankMemory(rank, 0, allocated_bytes, 2 * allocated_bytes, 3)


@pytest.mark.parametrize(
    ("measured", "beginning"),
    [
        (950, ""),
        (1050, ""),
        (1051, "More than planned: the plan has no workspaces"),
        (949, "Parameters, gradients and optimizer states fit in it; fewer activations"),
        (600, "Parameters, gradients and optimizer states fit in it; fewer activations"),
        (599, "Less than parameters, gradients and optimizer states would take"),
    ],
)
def test_a_difference_beyond_a_twentieth_has_a_sentence(measured: int, beginning: str) -> None:
    (row,) = memory_beside([((0,), PLANNED)], [peak(0, measured)])

    assert row.reason.startswith(beginning)
    assert bool(row.reason) == bool(beginning)


def test_the_fullest_rank_of_a_stage_is_compared_and_ranks_without_a_peak_are_left_out() -> None:
    peaks = [peak(0, 980), peak(2, 1000), peak(5, 990)]

    rows = list(memory_beside([(range(4), PLANNED), ((4, 5), None), ((6, 7), PLANNED)], peaks))

    assert rows == [
        MemoryRow((0, 2), PLANNED, 2, 1000, 980, 2000, ""),
        MemoryRow((5,), None, 5, 990, 990, 1980, ""),
    ]
