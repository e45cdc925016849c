"""The order of schedules, written out."""

from __future__ import annotations

import pytest

from commtrace.analysis.pipeline.schedule import recognise
from commtrace.analysis.prediction.orders import orders_of
from commtrace.errors import ConfigurationError
from tests.pipeline_factory import one_forward_one_backward


def words(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[str]:
    return [" ".join(map(str, order)) for order in orders_of(schedule, stages, microbatches, chunks)]


def test_the_schedules_of_two_stages() -> None:
    assert words("gpipe", 2, 2) == ["F0 F1 B0 B1"] * 2
    assert words("1f1b", 2, 3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert words("interleaved", 2, 2, 2) == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]
    # the warm-up of the last stage is two chunks long
    assert words("interleaved", 2, 4, 2)[1] == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    assert words("zero-bubble", 2, 2) == ["F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"]


def test_1f1b_is_that_of_the_simulated_jobs() -> None:
    for stage, order in enumerate(orders_of("1f1b", 4, 6)):
        expected = [(kind[0].upper(), microbatch) for kind, microbatch in one_forward_one_backward(stage, 4, 6)]
        assert [(action.letter, action.microbatch) for action in order] == expected


@pytest.mark.parametrize(
    ("schedule", "chunks", "name"),
    [
        ("gpipe", 1, "gpipe"),
        ("gpipe", 2, "looped_bfs"),
        ("1f1b", 1, "1f1b"),
        ("interleaved", 2, "interleaved_1f1b"),
        ("zero-bubble", 1, "zb1p"),
        ("zero-bubble", 2, "interleaved_zero_bubble"),
    ],
)
def test_each_order_is_recognised_as_its_schedule(schedule: str, chunks: int, name: str) -> None:
    orders = orders_of(schedule, 4, 8, chunks)
    words = [[f"{letter}{microbatch}.{chunk}" for letter, microbatch, chunk in order] for order in orders]

    assert recognise(words, chunks).name == name


def test_sizes_that_a_schedule_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="take interleaved"):
        orders_of("1f1b", 4, 8, 2)
    with pytest.raises(ConfigurationError, match="--chunks 2"):
        orders_of("interleaved", 4, 8)
    with pytest.raises(ConfigurationError, match="no multiple"):
        orders_of("interleaved", 4, 6, 2)
