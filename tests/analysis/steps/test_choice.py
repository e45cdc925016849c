"""Steps asked for and chosen: the numbers of a step do not depend on which others are shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.communication.table import communication_table
from commtrace.analysis.matching.match import match
from commtrace.analysis.steps.choice import (
    AFTER_QUIET,
    QUIET,
    TORN,
    StepChoice,
    choose_steps,
    load_window,
    rows_of_steps,
    select,
    whole_recording_as_step,
    without_torn_steps,
)
from commtrace.analysis.timeline import Timeline
from commtrace.errors import ConfigurationError
from commtrace.trace.quiet import QuietChange
from commtrace.trace.run import Run
from tests.analysis.steps.crossing_runs import LATE_NS, STEPS, TRANSFER_NS, crossing_run
from tests.factory import Row, make_run, span
from tests.pipeline_factory import PipelineJob

RUNS = {
    "crossing": crossing_run(),
    "pipeline": PipelineJob(2, 3, data_parallel=2, transfer_ns=7_000, all_reduce_ns=90_000, steps=STEPS).run(),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("steps", [None, "0:7", "2:4", "3:4", "3", "1:6:2", "3:"])
def test_a_step_is_told_alike_in_every_window(name: str, steps: str | None) -> None:
    run = RUNS[name]
    alone, shown = (_of_step(analyse(run, text), 3) for text in ("3", steps))
    assert shown == alone


def _of_step(analysis: Analysis, step: int) -> list[Any]:
    table = analysis.partition
    rows = table.step == step
    drawn = Timeline.of_analysis(analysis).step(step)["ranks"]
    stalls = [[rank["stalls"][name] for name in ("state", "start", "duration")] for rank in drawn]
    return [table.states, table.ns[rows].tolist(), table.hidden_ns[rows].tolist(), stalls]


@pytest.mark.parametrize("name", RUNS)
def test_the_tables_of_single_steps_add_up_to_that_of_all(name: str) -> None:
    run = RUNS[name]
    of_each = [_totals(analyse(run, str(step))) for step in range(STEPS)]
    assert np.sum(of_each, axis=0).tolist() == _totals(analyse(run, f"0:{STEPS}")).tolist()


def _totals(analysis: Analysis) -> Any:
    context = analysis.context
    table = communication_table(context.run, context.matches, analysis.partition, context.roles, context.steps)
    columns = ("count", "num_bytes", "exposed_ns", "hidden_ns", "unmatched")
    return np.array([sum(getattr(row, column) for row in table) for column in columns])


def test_waiting_for_what_was_launched_in_the_warm_up_is_waiting() -> None:
    analysis = analyse(crossing_run())

    first = (analysis.partition.rank == 0) & (analysis.partition.step == 1)
    assert analysis.steps.used[0] == 1
    assert analysis.partition.total("exposed wait")[first].tolist() == [LATE_NS - 10]
    assert analysis.partition.total("exposed transfer")[first].tolist() == [TRANSFER_NS]


def test_an_exported_step_is_matched_with_its_neighbours() -> None:
    window = load_window(crossing_run(), "4:5")
    timeline = Timeline.of_recording(window.context, window.wanted)

    assert timeline.steps == [4]
    (of_rank_0, _) = timeline.step(4)["ranks"]
    assert of_rank_0["stalls"]["duration"] == [LATE_NS - 10, TRANSFER_NS]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (crossing_run(), "no step in 90:95; recorded are 0–6"),
        (make_run({0: [span("step", 0, 9, step=4)]}), "no step in 90:95; recorded is only 4"),
        (make_run({0: [span("forward", 0, 9)]}), "no step in 90:95; the run has no steps at all"),
    ],
)
def test_steps_that_were_not_recorded_are_refused(run: Run, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_window(run, "90:95")


def run_with_steps(*steps_of_rank: list[int]) -> Run:
    return make_run(
        {
            rank: [span("forward", -5, -1), *(span("step", 10 * step, 10 * step + 10, step=step) for step in steps)]
            for rank, steps in enumerate(steps_of_rank)
        }
    )


@pytest.mark.parametrize(
    ("steps", "used", "left_out"),
    [
        ([[0, 1, 2]], (1, 2), {0: "warm-up"}),
        ([[0, 1]], (0, 1), {}),
        ([[7]], (7,), {}),
        ([[0, 1, 2, 3], [0, 1, 2]], (1, 2), {0: "warm-up", 3: "not recorded in full by every rank"}),
        ([[5, 6, 7, 8], []], (6, 7, 8), {5: "warm-up"}),
        ([[0, 1], [2, 3]], (), dict.fromkeys(range(4), "not recorded in full by every rank")),
        ([[], []], (), {}),
    ],
)
def test_steps_that_every_rank_recorded_count_but_not_the_first(
    steps: list[list[int]], used: tuple[int, ...], left_out: dict[int, str]
) -> None:
    choice = choose_steps(run_with_steps(*steps), keep_warm_up=False)
    assert (choice.used, dict(choice.left_out)) == (used, left_out)


def test_the_first_step_counts_when_the_user_asked_for_it() -> None:
    assert choose_steps(run_with_steps([0, 1, 2]), keep_warm_up=True).used == (0, 1, 2)


def test_a_rank_without_any_step_does_not_decide() -> None:
    choice = choose_steps(run_with_steps([0, 1, 2], []), keep_warm_up=True)
    assert (choice.used, choice.ranks) == ((0, 1, 2), (0,))


def test_a_step_behind_quiet_ones_does_not_count() -> None:
    run = make_run({rank: [span("step", 10 * step, 10 * step + 10, step=step) for step in range(9)] for rank in (0, 1)})
    quiet = (QuietChange(4, True), QuietChange(5, True), QuietChange(6, False))
    choice = choose_steps(
        replace(run, ranks={rank: replace(trace, quiet=quiet) for rank, trace in run.ranks.items()}), keep_warm_up=False
    )

    assert choice.used == (1, 2, 3, 7, 8)
    assert {step: choice.left_out[step] for step in (4, 5, 6)} == {4: QUIET, 5: QUIET, 6: AFTER_QUIET}
    assert [(part.first, part.last) for part in choice.ranges_left_out()] == [(0, 0)]


def test_the_choice_is_shown_in_ranges() -> None:
    choice = choose_steps(run_with_steps([0, 1, 2, 3, 4, 5], [0, 1, 2, 3]), keep_warm_up=False)
    reason = "not recorded in full by every rank"
    assert choice.to_json() == {
        "first": 1,
        "last": 3,
        "count": 3,
        "left_out": [
            {"first": 0, "last": 0, "count": 1, "reason": "warm-up"},
            {"first": 4, "last": 5, "count": 2, "reason": reason},
        ],
    }


def test_only_rows_of_the_chosen_steps_are_kept_with_their_matches() -> None:
    run = PipelineJob(2, 3, steps=4).run()
    matches = match(run)
    choice = choose_steps(run, keep_warm_up=False)
    kept, kept_matches = select(run, matches, rows_of_steps(run, choice))
    for rank, trace in kept.ranks.items():
        assert set(trace.spans.step.tolist()) == {1, 2, 3}
        rows = run.ranks[rank].spans.step > 0
        assert (kept_matches.ranks[rank].bucket == matches.ranks[rank].bucket[rows]).all()


def test_without_steps_the_whole_recording_is_one() -> None:
    rows: list[Row] = [span("forward", 5, 20), span("backward", 20, 70)]
    spans = whole_recording_as_step(make_run({0: rows, 1: []})).ranks[0].spans
    assert (spans.start[0], spans.end[0], spans.step.tolist()) == (5, 70, [-1, -1, -1])


def test_steps_that_a_clock_stepped_back_has_torn_do_not_count() -> None:
    """Step 2 of rank 0 ends before it begins; of rank 1, steps 5 and 6 overlap."""
    whole = [(10 * number, 10 * number + 10) for number in range(8)]
    torn = {0: {2: (29, 24)}, 1: {6: (58, 70)}}
    rows = {
        rank: [span("step", *own.get(number, times), step=number) for number, times in enumerate(whole)]
        for rank, own in torn.items()
    }
    choice = StepChoice(tuple(range(8)), {9: "warm-up"}, (0, 1))
    left = without_torn_steps(choice, make_run(rows))
    assert left.used == (0, 1, 3, 4, 7)
    assert left.left_out == {2: TORN, 5: TORN, 6: TORN, 9: "warm-up"}


def test_steps_that_only_follow_each_other_are_not_torn() -> None:
    choice = StepChoice((0, 1), {}, (0,))
    assert (
        without_torn_steps(choice, make_run({0: [span("step", 0, 10, step=0), span("step", 10, 20, step=1)]})) is choice
    )
