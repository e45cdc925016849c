"""The time of a pipeline: known bubbles, uneven stages worked out by hand, and a bound that holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.planning.pipeline_time import ChunkTimes, pipeline_ns, shortest_pipeline_ns

EVEN = ChunkTimes(10, 20)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 2), (4, 4), (4, 16), (8, 3)])
def test_equal_stages_have_the_bubble_of_the_formula(stages: int, microbatches: int) -> None:
    assert pipeline_ns([[EVEN]] * stages, microbatches) == 30 * (microbatches + stages - 1)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 2), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, chunks: int, microbatches: int) -> None:
    found = pipeline_ns([[EVEN] * chunks] * stages, microbatches)

    assert found == 30 * (chunks * microbatches + stages - 1)


def test_uneven_stages_are_replayed() -> None:
    # stage 0: F0 0–10 F1 10–20 B0 50–70 F2 70–80 B1 90–110 B2 130–150
    # stage 1: F0 10–25 B0 25–50 F1 50–65 B1 65–90 F2 90–105 B2 105–130
    assert pipeline_ns([[ChunkTimes(10, 20)], [ChunkTimes(15, 25)]], microbatches=3) == 150


def test_messages_delay_what_waits_for_them() -> None:
    # F0 of stage 1 starts 3 later, B0 of stage 0 another 3
    assert pipeline_ns([[EVEN]] * 2, microbatches=1, message_ns=[3, 0]) == 60 + 2 * 3


TIMES = st.builds(ChunkTimes, st.integers(1, 50), st.integers(1, 50))


@given(st.lists(TIMES, min_size=1, max_size=6), st.integers(1, 8))
def test_no_schedule_is_below_the_bound(times: list[ChunkTimes], microbatches: int) -> None:
    stages = [[one] for one in times]

    assert shortest_pipeline_ns(stages, microbatches) <= pipeline_ns(stages, microbatches)


@given(st.lists(st.lists(TIMES, min_size=2, max_size=2), min_size=1, max_size=4), st.integers(1, 3))
def test_nor_is_an_interleaved_one(stages: list[list[ChunkTimes]], rounds: int) -> None:
    microbatches = rounds * len(stages)

    assert shortest_pipeline_ns(stages, microbatches) <= pipeline_ns(stages, microbatches)
