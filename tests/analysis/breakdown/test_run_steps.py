"""The steps of whole runs, with what happened between them."""

from __future__ import annotations

from dataclasses import replace

from commtrace.analysis.breakdown.run_steps import EARLIER_LAUNCH, NOT_CHOSEN, REPEATED, Event, LaunchTimes, run_steps
from commtrace.analysis.steps.choice import WARM_UP, StepChoice
from commtrace.analysis.summary import summarise
from commtrace.trace.run import Run
from tests.factory import EPOCH_NS, Row, make_run, span

MS = 1_000_000
NUMBERED = {"step_numbers": "the program's"}


def launch(rows: list[Row], number: int = 0, *, is_numbered: bool = True) -> Run:
    run = make_run({0: rows}, topology=NUMBERED if is_numbered else {})
    ranks = {
        rank: replace(trace, metadata=replace(trace.metadata, attempt=number)) for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def steps(durations_ms: list[int], first: int = 0, start_ms: int = 0) -> list[Row]:
    rows, now = [], start_ms * MS
    for step, duration in enumerate(durations_ms, first):
        rows.append(span("step", now, now + duration * MS, step=step))
        now += duration * MS
    return rows


def test_each_step_has_its_time_and_why_it_does_not_count() -> None:
    found = summarise(launch(steps([500, 100, 102, 99]))).all_steps

    assert found.step.tolist() == [0, 1, 2, 3]
    assert found.duration_ns.tolist() == [500 * MS, 100 * MS, 102 * MS, 99 * MS]
    assert (found.start_ns - EPOCH_NS).tolist() == [0, 500 * MS, 600 * MS, 702 * MS]
    assert [found.reasons[reason] if reason >= 0 else "" for reason in found.reason] == [WARM_UP, "", "", ""]
    assert found.median_ns == 100 * MS


def test_a_step_far_from_the_median_is_an_outlier_and_the_warm_up_is_none() -> None:
    found = summarise(launch(steps([500, 100, 101, 99, 100, 102, 150, 98, 105]))).all_steps

    assert found.step[found.is_outlier].tolist() == [6]


def test_steps_that_vary_a_lot_have_no_outliers() -> None:
    found = summarise(launch(steps([500, 100, 160, 80, 140, 90, 190, 120]))).all_steps

    assert not found.is_outlier.any()


def test_equal_steps_have_no_outliers() -> None:
    assert not summarise(launch(steps([100] * 6))).all_steps.is_outlier.any()


def test_a_restart_leaves_the_steps_of_the_earlier_launch_that_were_kept() -> None:
    earlier, later = launch(steps([100, 110, 120])), launch(steps([130, 140], first=2, start_ms=900), number=1)
    found = run_steps(
        [LaunchTimes.of(earlier), LaunchTimes.of(later)], StepChoice((2, 3), {}, (0,)), {2: 131 * MS, 3: 140 * MS}
    )

    assert found.step.tolist() == [0, 1, 2, 2, 3]
    assert found.launch.tolist() == [0, 0, 0, 1, 1]
    assert [found.reasons[reason] if reason >= 0 else "" for reason in found.reason] == [
        EARLIER_LAUNCH,
        EARLIER_LAUNCH,
        REPEATED,
        "",
        "",
    ]
    assert found.duration_ns.tolist() == [100 * MS, 110 * MS, 120 * MS, 131 * MS, 140 * MS]
    assert found.events == (Event("restart", EPOCH_NS + 330 * MS, EPOCH_NS + 900 * MS),)
    assert found.is_usual.tolist() == [True, True, False, True, True]


def test_without_numbers_of_the_programs_own_no_launch_repeats_another() -> None:
    launches = [launch(steps([100, 110]), is_numbered=False), launch(steps([120], start_ms=500), 1, is_numbered=False)]
    found = run_steps([LaunchTimes.of(one) for one in launches], StepChoice((0,), {}, (0,)), {0: 120 * MS})

    assert [found.reasons[reason] if reason >= 0 else "" for reason in found.reason] == [EARLIER_LAUNCH] * 2 + [""]


def test_evaluations_and_checkpoints_of_all_ranks_are_one_each() -> None:
    rows = steps([100, 100, 100])
    run = make_run(
        {
            0: [*rows, span("evaluation", 300 * MS, 320 * MS), span("checkpoint", 320 * MS, 330 * MS)],
            1: [*rows, span("evaluation", 305 * MS, 325 * MS)],
        }
    )

    assert LaunchTimes.of(run).events == (
        Event("evaluation", EPOCH_NS + 300 * MS, EPOCH_NS + 325 * MS),
        Event("checkpoint", EPOCH_NS + 320 * MS, EPOCH_NS + 330 * MS),
    )


def test_steps_that_were_not_asked_for_have_no_part_in_it() -> None:
    found = summarise(launch(steps([500, 100, 102, 99])), "1:3").all_steps
    kept = run_steps([LaunchTimes.of(launch(steps([100, 100])))], StepChoice((1,), {}, (0,)), {})

    assert found.step.tolist() == [1, 2]
    assert kept.reasons == (NOT_CHOSEN,)
