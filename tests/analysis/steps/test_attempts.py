"""Steps that were done more than once: both attempts are told, and the tables are of the last one."""

from __future__ import annotations

from dataclasses import replace

from commtrace.analysis.breakdown.run_budget import WallTimeParts, run_budget
from commtrace.analysis.steps.attempts import Attempt, LaunchSteps, RepeatedStep, repeated_steps, separate_attempts
from commtrace.analysis.summary import summarise
from commtrace.cli.views import step_attempts_lines
from commtrace.trace.run import Run
from tests.factory import EPOCH_NS, Row, make_run, span

MS = 1_000_000


def launch(durations: list[tuple[int, int]], number: int = 0, start: int = 0) -> Run:
    """Steps of these numbers and lengths in ms one after the other, on two ranks that do the same."""
    rows: list[Row] = []
    now = start * MS
    for step, length in durations:
        end = now + length * MS
        rows += [span("step", now, end, step=step), span("forward", now, end - 10 * MS, step=step)]
        now = end
    run = make_run({0: rows, 1: rows}, topology={"step_numbers": "the program's"})
    ranks = {
        rank: replace(trace, metadata=replace(trace.metadata, attempt=number)) for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def test_a_rollback_leaves_both_attempts_of_its_steps_in_order() -> None:
    run = launch([(3, 100), (4, 100), (5, 150), (4, 90), (5, 80), (6, 100)])

    assert repeated_steps([LaunchSteps.of(run)]) == [
        RepeatedStep(4, (Attempt(1, 0, EPOCH_NS + 100 * MS, 100 * MS), Attempt(2, 0, EPOCH_NS + 350 * MS, 90 * MS))),
        RepeatedStep(5, (Attempt(1, 0, EPOCH_NS + 200 * MS, 150 * MS), Attempt(2, 0, EPOCH_NS + 440 * MS, 80 * MS))),
    ]


def test_a_restart_does_too() -> None:
    launches = [launch([(0, 100), (1, 110)]), launch([(1, 120), (2, 100)], number=1, start=900)]

    assert repeated_steps([LaunchSteps.of(one) for one in launches]) == [
        RepeatedStep(1, (Attempt(1, 0, EPOCH_NS + 100 * MS, 110 * MS), Attempt(2, 1, EPOCH_NS + 900 * MS, 120 * MS))),
    ]


def test_numbers_that_are_not_the_programs_own_do_not_compare_launches() -> None:
    def unnumbered(run: Run) -> LaunchSteps:
        return LaunchSteps.of(
            replace(run, ranks={rank: replace(trace, topology={}) for rank, trace in run.ranks.items()})
        )

    assert repeated_steps([unnumbered(launch([(0, 100)])), unnumbered(launch([(0, 100)], number=1))]) == []


def test_the_numbers_of_a_summary_are_of_the_last_attempt() -> None:
    result = summarise(launch([(0, 500), (1, 100), (2, 900), (3, 700), (2, 100), (3, 100), (4, 100)]))

    assert len(result.run.steps.used) == 4
    assert result.ranks[0].wall_ns == 100 * MS
    assert result.critical_path
    assert result.critical_path.ns == 4 * 100 * MS
    lengths = {one.step: [attempt.duration_ns for attempt in one.attempts] for one in result.repeated_steps}
    assert lengths == {2: [900 * MS, 100 * MS], 3: [700 * MS, 100 * MS]}
    assert result.run_budget
    assert result.run_budget.job.repeated_ns == (900 + 700) * MS


def test_time_before_a_rollback_is_no_goodput() -> None:
    budget = run_budget(separate_attempts(launch([(1, 100), (2, 50), (1, 100), (2, 50)])))

    assert budget.job == WallTimeParts(training_ns=150 * MS, repeated_ns=150 * MS)
    assert budget.repeated_steps == 2


def test_a_run_that_repeats_nothing_is_left_as_it_is() -> None:
    run = launch([(0, 100), (1, 100)])

    assert separate_attempts(run) is run
    assert separate_attempts(separate_attempts(launch([(0, 1), (0, 1)]))).ranks[0].spans.step.tolist() == [-2, -2, 0, 0]


def test_ranges_of_steps_are_a_line_each() -> None:
    launches = [launch([(step, 100) for step in range(9)]), launch([(5, 80), (6, 80), (7, 80)], number=1, start=5_000)]
    result = repeated_steps([LaunchSteps.of(one) for one in launches])
    (line,) = step_attempts_lines(result, launch=1)

    assert line.startswith("Steps 5–7 were done twice: attempt 1 from ")
    assert ", 100 ms a step; attempt 2 from " in line
    assert line.endswith(", 80.0 ms a step, shown here")
    (line,) = step_attempts_lines(result, launch=2)
    assert not line.endswith("shown here")
