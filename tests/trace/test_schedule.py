"""Names, orders, warm-up and bubble of pipeline schedules, written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.errors import ConfigurationError
from commtrace.trace.schedule import (
    NAMES,
    WRITTEN,
    bubble,
    idle_ns,
    known_name,
    most_in_flight,
    orders,
    recognise,
    schedule_named,
    with_chunks,
)
from tests.pipeline_factory import one_forward_one_backward


def words(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[str]:
    return [" ".join(map(str, order)) for order in orders(schedule, stages, microbatches, chunks)]


def test_the_schedules_of_two_stages() -> None:
    assert words("gpipe", 2, 2) == ["F0 F1 B0 B1"] * 2
    assert words("looped_bfs", 2, 2, 2) == ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"] * 2
    assert words("1f1b", 2, 3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert words("interleaved_1f1b", 2, 2, 2) == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]
    # the warm-up of the last stage is two chunks long
    assert words("interleaved_1f1b", 2, 4, 2)[1] == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    assert words("zb1p", 2, 2) == ["F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"]
    assert words("interleaved_zero_bubble", 2, 2, 2)[1] == "F0 F1 F0.1 I0.1 F1.1 I1.1 W0.1 I0 W1.1 I1 W0 W1"


def test_1f1b_is_that_of_the_simulated_jobs() -> None:
    for stage, order in enumerate(orders("1f1b", 4, 6)):
        expected = [(kind[0].upper(), microbatch) for kind, microbatch in one_forward_one_backward(stage, 4, 6)]
        assert [(action.letter, action.microbatch) for action in order] == expected


@pytest.mark.parametrize("schedule", WRITTEN)
def test_each_order_is_recognised_as_its_schedule_and_does_all_work_once(schedule: str) -> None:
    chunks = 1 if schedule in ("gpipe", "1f1b", "zb1p") else 2
    by_stage = orders(schedule, 4, 8, chunks)
    words = [[f"{letter}{microbatch}.{chunk}" for letter, microbatch, chunk in order] for order in by_stage]

    assert recognise(words, chunks).name == schedule
    letters = "FIW" if "z" in schedule else "FB"
    everything = {(letter, number, chunk) for letter in letters for number in range(8) for chunk in range(chunks)}
    assert [sorted(order) for order in by_stage] == [sorted(everything)] * 4


@pytest.mark.parametrize(("name", "with_two"), [("gpipe", "looped_bfs"), ("zb1p", "interleaved_zero_bubble")])
def test_a_schedule_of_several_chunks_has_a_name_of_its_own(name: str, with_two: str) -> None:
    assert (with_chunks(name, 1), with_chunks(name, 2)) == (name, with_two)
    assert orders(name, 4, 8, 2) == orders(with_two, 4, 8, 2)


def test_sizes_that_a_schedule_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="take interleaved_1f1b"):
        orders("1f1b", 4, 8, 2)
    for name in ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"):
        with pytest.raises(ConfigurationError, match="needs several chunks per stage: give 2"):
            orders(name, 4, 8)
    for name in ("interleaved_1f1b", "zb1p"):
        with pytest.raises(ConfigurationError, match="6 is no multiple"):
            orders(name, 4, 6, 2)


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("no_pipelining", ["no pipelining", "forward_backward_no_pipelining"]),
        ("gpipe", ["GPipe", "ScheduleGPipe", "gpipe"]),
        (
            "1f1b",
            [
                "1F1B", "Schedule1F1B", "1f1b schedule", "PipeDream-Flush", "pipedream_flush", "TrainSchedule",
                "forward_backward_pipelining_without_interleaving",
            ],
        ),
        (
            "interleaved_1f1b",
            [
                "interleaved", "interleaved 1f1b", "interleaved-1f1b", "Interleaved1F1B", "ScheduleInterleaved1F1B",
                "forward_backward_pipelining_with_interleaving",
            ],
        ),
        ("looped_bfs", ["looped bfs", "LoopedBFS", "ScheduleLoopedBFS", "Breadth-First"]),
        ("zb1p", ["zero-bubble", "zero_bubble", "ZB-H1", "ZB1P", "zbh1"]),
        ("interleaved_zero_bubble", ["interleaved zero bubble", "ScheduleInterleavedZeroBubble"]),
        ("zbv", ["ZB-V", "ScheduleZBVZeroBubble", "ZBVZeroBubble"]),
        ("dualpipev", ["DualPipeV", "ScheduleDualPipeV", "DualPipeVSchedule"]),
    ],
)  # fmt: skip
def test_every_spelling_means_its_schedule(name: str, spellings: list[str]) -> None:
    assert {known_name(text) for text in (name, *spellings)} == {name}


def test_the_spellings_are_of_all_schedules_of_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    abstract = {"PipelineScheduleSingle", "PipelineScheduleMulti"}
    classes = {name for name in vars(schedules) if name.startswith("Schedule")} - abstract

    assert {known_name(name) for name in classes} <= set(NAMES)


def test_a_name_that_means_no_schedule_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigurationError, match="'2f2b': choose one of no_pipelining, gpipe, 1f1b, interleaved_1f1b,"):
        schedule_named("2f2b")
    with pytest.raises(ConfigurationError, match="zbv can only be recognised: choose one of gpipe, 1f1b, "):
        schedule_named("ZB-V", WRITTEN)


def test_the_page_offers_the_schedules_that_can_be_written() -> None:
    panel = Path(__file__).resolve().parents[2] / "viewer/web/src/panels/what_if.ts"

    assert f"const SCHEDULES = [{', '.join(f'{name!r}' for name in WRITTEN)}];".replace("'", '"') in panel.read_text()


@pytest.mark.parametrize(
    ("sizes", "fraction", "ratio"),
    [(("1f1b", 1, 8), 0, 0), (("gpipe", 4, 8), 3 / 11, 3 / 8), (("interleaved_1f1b", 4, 8, 2), 3 / 19, 3 / 16)],
)
def test_both_fractions_of_the_bubble(sizes: tuple[str, int, int], fraction: float, ratio: float) -> None:
    assert bubble(*sizes) == (fraction, ratio)


def test_a_bubble_without_a_formula_is_not_known() -> None:
    assert bubble("zb1p", 4, 8) is None  # it depends on F, B and W
    assert bubble("interleaved_zero_bubble", 4, 8, 2) is None
    assert bubble("1f1b", 4, 0) is None
    assert (idle_ns("1f1b", 4, 10, 20), idle_ns("zb1p", 4, 10, 20, 10), idle_ns("zb1p", 4, 10, 20)) == (90, 30, None)


@pytest.mark.parametrize(
    ("name", "microbatches", "chunks", "in_flight"),
    [
        ("1f1b", 8, 1, [4, 3, 2, 1]),
        ("1f1b", 2, 1, [2, 2, 2, 1]),
        ("interleaved_1f1b", 8, 2, [11, 9, 7, 5]),
        ("gpipe", 8, 1, [8, 8, 8, 8]),
    ],
)
def test_forwards_that_wait_for_their_backward(name: str, microbatches: int, chunks: int, in_flight: list[int]) -> None:
    assert [most_in_flight(name, stage, 4, microbatches, chunks) for stage in range(4)] == in_flight
