"""Steps that were asked for and never came."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from commtrace.analysis.steps.progress import find_progress, last_advance_ns, last_ended_step, unreached_steps
from commtrace.analysis.summary import summarise
from commtrace.trace.run import Run
from tests.factory import EPOCH_NS, make_run, span

MS = 1_000_000

Reports: TypeAlias = tuple[tuple[int, int], ...]


def steps(last: int, length: int = 100 * MS) -> list[dict[str, object]]:
    return [span("step", length * step, length * (step + 1), step=step) for step in range(last + 1)]


def test_the_foremost_rank_and_the_time_since_its_last_report_say_where_the_run_is() -> None:
    run = make_run({0: steps(9), 1: steps(11)}, closed=False)
    progress = find_progress(run, EPOCH_NS + 1_750 * MS)

    assert (progress.latest, progress.step_ns, progress.age_ns, progress.closed) == (12 + 5, 100 * MS, 550 * MS, False)


def test_a_run_that_stands_still_is_not_taken_to_go_on() -> None:
    run = make_run({0: steps(9)}, closed=False)
    progress = find_progress(run, EPOCH_NS + 3_600_000 * MS)

    assert progress.latest == 10 + 101
    assert progress.age_ns == 3_599_000 * MS


def test_a_rank_that_records_nothing_now_tells_where_it_is() -> None:
    run = make_run({0: []}, closed=False, progress=((100, 0), (150, 10_000 * MS)))
    progress = find_progress(run, EPOCH_NS + 11_000 * MS)

    assert (progress.latest, progress.step_ns) == (155, 200 * MS)


def test_a_rank_that_is_still_in_its_step_has_not_gone_on_since() -> None:
    run = make_run({0: []}, closed=False, progress=((100, 0), (150, 10_000 * MS), (150, 20_000 * MS)))
    progress = find_progress(run, EPOCH_NS + 21_000 * MS)

    assert (progress.latest, progress.age_ns) == (155, 1_000 * MS)


@pytest.mark.parametrize(
    ("reports", "step_ns"),
    [
        pytest.param(((5, 0), (6, 10), (7, 20)), 10_000 * MS, id="each in another step"),
        pytest.param(((5, 0), (5, 10), (5, 20), (6, 30), (6, 40), (6, 50), (7, 60)), 30_000 * MS, id="again and again"),
        pytest.param(((5, 0), (6, 10), (6, 20)), None, id="the first one may have begun long before"),
        pytest.param(((5, 0), (5, 10)), None, id="of one step"),
        pytest.param(((80, 0), (90, 10), (40, 20), (50, 30)), 1_000 * MS, id="a rollback"),
    ],
)
def test_reports_of_steps_say_how_long_these_are(reports: Reports, step_ns: int | None) -> None:
    run = make_run({0: []}, closed=False, progress=tuple((step, at * 1_000 * MS) for step, at in reports))

    assert find_progress(run, EPOCH_NS).step_ns == step_ns


@pytest.mark.parametrize(
    ("reports", "ended", "at"),
    [
        pytest.param((), 9, 1_000, id="recorded"),
        pytest.param(((9, 1_200), (9, 1_300)), 9, 1_000, id="between two steps"),
        pytest.param(((10, 1_200), (10, 1_300)), 9, 1_000, id="within the next one"),
        pytest.param(((12, 1_200), (12, 1_300)), 11, 1_200, id="steps that are not recorded"),
        pytest.param(((12, 1_200), (3, 1_300)), 2, 1_300, id="a rollback"),
    ],
)
def test_where_a_rank_is_and_since_when(reports: Reports, ended: int, at: int) -> None:
    trace = make_run({0: steps(9)}, closed=False, progress=tuple((step, at * MS) for step, at in reports)).ranks[0]

    assert (last_ended_step(trace), last_advance_ns(trace)) == (ended, EPOCH_NS + at * MS)


def test_of_a_rank_without_steps_nothing_is_known() -> None:
    trace = make_run({0: []}).ranks[0]

    assert (last_ended_step(trace), last_advance_ns(trace)) == (-1, None)


def test_without_any_step_nothing_is_known() -> None:
    progress = find_progress(make_run({0: []}), EPOCH_NS)

    assert (progress.latest, progress.step_ns, progress.closed) == (-1, None, True)


ASKED = {"recording": {"steps": "100:110"}}


def run_that_got_to(step: int, *, closed: bool = True, steps: int = 0) -> Run:
    rows = [span("step", 100 * number, 100 * number + 90, step=number) for number in range(steps)]
    reports = ((step, 5),) if step >= 0 else ()
    return make_run({0: rows, 1: rows}, topology=ASKED, progress=reports, closed=closed)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (run_that_got_to(30), "and the job got as far as step 30: no step was recorded."),
        (run_that_got_to(30, closed=False), "and the job has got as far as step 30 so far: no step was recorded."),
        (run_that_got_to(-1), "and the job has begun none: no step was recorded."),
    ],
)
def test_it_is_said_how_far_the_job_got(run: Run, sentence: str) -> None:
    whole = f"Only steps 100:110 were to be recorded (COMMTRACE_STEPS, --steps), {sentence}"
    assert unreached_steps(run) == whole
    problems = summarise(run).problems
    assert whole in problems
    assert not any("Mark steps" in problem for problem in problems)


def test_other_runs_are_not_spoken_of() -> None:
    assert unreached_steps(run_that_got_to(30, steps=2)) is None
    assert unreached_steps(run_that_got_to(105)) is None
    assert unreached_steps(make_run({0: []})) is None
