"""What a job does now, for the commands that read how fast it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from commtrace.analysis.clocks.time_of_day import date_and_time, step_end_ns
from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.job_state import HANGING, JobState, state_of_job
from commtrace.analysis.summary import summarise
from commtrace.synth import Job, synthesize
from commtrace.trace.hang_report import Activity, OpenPhase
from commtrace.trace.metadata import ClockAnchor
from commtrace.trace.processes import RUNS
from commtrace.trace.run import Run
from tests.analysis.hangs.flight_calls import hung
from tests.analysis.hung_runs import END, NOW_NS, SECOND, done, flight, stopped_run
from tests.factory import EPOCH_NS, group, make_run, span

Reports: TypeAlias = tuple[tuple[int, int], ...]

TP = group("tp", 0, 1)
WAY = "See where each rank is: commtrace doctor "


def test_a_job_that_hangs_says_so_with_the_rank_and_the_way_to_more() -> None:
    job = state_of_job(hung(), now_ns=NOW_NS)

    assert (job.state, job.words) == ("cut_off", "hung, cut off: ranks 0–1")
    assert job.stop is not None
    assert (job.stop.kind, job.stop.ranks, job.stop.id) == ("hang", (1,), "hang/ranks/1")
    assert job.stop.line() == "The job hangs: 1 communication is held up by rank 1."
    assert job.stop.advice.startswith(WAY)


def test_a_job_that_goes_on_hangs() -> None:
    job = state_of_job(hung(), now_ns=EPOCH_NS + END, ask=lambda process: RUNS)

    assert (job.state, job.words) == (HANGING, "hangs")


def test_a_hang_in_a_step_that_is_not_recorded_is_dated_by_the_ranks_reports() -> None:
    run = hung()
    reports = ((7, 20 * SECOND), (8, 30 * SECOND), (8, 40 * SECOND))
    reporting = replace(run, ranks={rank: replace(trace, progress=reports) for rank, trace in run.ranks.items()})
    job = state_of_job(reporting, now_ns=EPOCH_NS + END, ask=lambda process: RUNS)

    assert job.words == f"hangs since {date_and_time(EPOCH_NS + 30 * SECOND)}"
    assert job.stop is not None
    assert (job.stop.id, job.stop.since_step) == ("hang/ranks/1", 7)


def test_the_rank_that_failed_first_stands_before_those_that_failed_because_of_it() -> None:
    rows = {0: done({TP: 5}), 1: done({TP: 5})}
    failed = stopped_run(rows, [TP], last={1: 98}, exceptions={1: "ValueError"}, in_flight={0: [flight(TP, 5)]})
    job = state_of_job(failed, now_ns=NOW_NS)

    assert (job.state, job.words) == ("failed", "hung, failed: ranks 0–1 cut off; ValueError on rank 1")
    assert [finding.kind for finding in job.findings][:1] == ["failed"]
    assert job.stop == job.findings[0]
    assert "rank 1" in job.findings[0].evidence.lower()


def test_a_job_that_ended_well_has_no_such_findings() -> None:
    job = state_of_job(synthesize(Job(dp=2, steps=6)).run, now_ns=NOW_NS)

    assert (job.state, job.words, job.findings, job.stop) == ("ended", "ended", (), None)


def six_steps(**changes: Any) -> Run:
    rows = [span("step", step * SECOND, (step + 1) * SECOND, step=step) for step in range(6)]
    return make_run({0: rows, 1: rows}, **{"closed": False, "last_written_ns": 100 * SECOND, **changes})


def in_second(run: Run, now: int) -> JobState:
    return state_of_job(run, now_ns=EPOCH_NS + now * SECOND, ask=lambda process: RUNS)


def test_a_job_of_which_no_step_ends_any_more_hangs_since_its_last_one() -> None:
    made = synthesize(Job(dp=2, steps=6)).run
    run = replace(made, ranks={rank: replace(trace, closed=False) for rank, trace in made.ranks.items()})
    ended_ns = step_end_ns(run, 5)
    assert ended_ns is not None
    goes_on = state_of_job(run, now_ns=ended_ns + 5 * SECOND, ask=lambda process: RUNS)
    hangs = state_of_job(run, now_ns=ended_ns + 60 * SECOND, ask=lambda process: RUNS)

    assert (goes_on.words, goes_on.stop) == ("running", None)
    assert (hangs.state, hangs.words) == (HANGING, f"hangs since {date_and_time(ended_ns)}")
    assert hangs.stop is not None
    assert hangs.stop.evidence.startswith("No step has ended for 60 s (a step takes ")
    assert (hangs.stop.since_step, hangs.stop.since_ns) == (5, ended_ns)


@pytest.mark.parametrize(
    ("progress", "now", "words"),
    [
        pytest.param((), 30, "hangs since 2023-11-14 22:13:26 UTC", id="none"),
        pytest.param(((50, 90 * SECOND), (60, 99 * SECOND)), 100, "running", id="a second ago"),
        pytest.param(
            ((50, 20 * SECOND), (60, 30 * SECOND)), 100, "hangs since 2023-11-14 22:13:50 UTC", id="a minute ago"
        ),
        pytest.param(
            ((50, 20 * SECOND), *((60, at * SECOND) for at in range(30, 100, 10))),
            100,
            "hangs since 2023-11-14 22:13:50 UTC",
            id="told of the same step again and again",
        ),
        pytest.param(
            ((6, 16 * SECOND), (6, 26 * SECOND)), 30, "hangs since 2023-11-14 22:13:26 UTC", id="in the first of them"
        ),
        pytest.param(((50, 20 * SECOND), (40, 99 * SECOND)), 100, "running", id="after a rollback"),
    ],
)
def test_steps_that_are_not_recorded_are_progress(progress: Reports, now: int, words: str) -> None:
    assert in_second(six_steps(progress=progress), now).words == words


def test_a_job_whose_recorded_steps_begin_again_goes_on() -> None:
    numbers = [*range(30), *range(10)]
    rows = [span("step", at * SECOND, (at + 1) * SECOND, step=step) for at, step in enumerate(numbers)]
    run = make_run({0: rows, 1: rows}, closed=False, last_written_ns=100 * SECOND)
    goes_on, hangs = in_second(run, 50), in_second(run, 60)

    assert goes_on.words == "running"
    assert hangs.words == f"hangs since {date_and_time(EPOCH_NS + 40 * SECOND)}"
    assert hangs.stop is not None
    assert (hangs.stop.since_step, hangs.stop.since_ns) == (9, EPOCH_NS + 40 * SECOND)


def test_a_job_of_which_no_step_is_recorded_hangs_as_well() -> None:
    reports = tuple((step, 10 * step * SECOND) for step in range(5))
    run = make_run({0: [], 1: []}, closed=False, last_written_ns=200 * SECOND, progress=reports)
    goes_on, hangs = in_second(run, 140), in_second(run, 141)

    assert goes_on.words == "running"
    assert hangs.words == f"hangs since {date_and_time(EPOCH_NS + 40 * SECOND)}"
    assert hangs.stop is not None
    assert hangs.stop.evidence == "No step has ended for 101 s (a step takes 10 s)."
    assert (hangs.stop.since_step, hangs.stop.since_ns) == (3, EPOCH_NS + 40 * SECOND)


def test_of_a_rank_whose_steps_are_not_known_nothing_is_said() -> None:
    rows = [span("step", step * SECOND, (step + 1) * SECOND, step=step) for step in range(6)]
    job = in_second(make_run({0: rows, 1: []}, closed=False, last_written_ns=100 * SECOND), 100)

    assert job.stop is not None
    assert (job.stop.ranks, job.stop.evidence) == ((), "No step has ended for 94 s (a step takes 1.0 s).")


def test_without_the_time_of_day_it_is_not_known_since_when_no_step_ends() -> None:
    rows = [span("step", step * SECOND, (step + 1) * SECOND, step=step) for step in range(6)]
    unknown = dict.fromkeys((0, 1), ClockAnchor(0, 0))
    job = in_second(make_run({0: rows, 1: rows}, anchors=unknown, closed=False, last_written_ns=100 * SECOND), 100)

    assert (job.state, job.stop) == ("running", None)


def test_a_first_step_that_takes_long_is_no_hang() -> None:
    reports = ((0, SECOND), (0, 11 * SECOND), (0, 91 * SECOND))
    run = make_run({0: [], 1: []}, closed=False, last_written_ns=100 * SECOND, progress=reports)

    assert in_second(run, 100).words == "running"


@pytest.mark.parametrize("kind", ["checkpoint", "evaluation"])
def test_a_job_that_saves_or_evaluates_does_not_hang(kind: str) -> None:
    run = six_steps()
    saves = Activity(open=(OpenPhase(kind, kind, 7 * SECOND),))
    busy = replace(run.ranks[1], activity=saves, activity_ns=100 * SECOND, again_within_ns=30 * SECOND)

    assert in_second(run, 100).words.startswith(HANGING)
    assert in_second(replace(run, ranks={**run.ranks, 1: busy}), 100).words == "running"


def test_nobody_advises_a_job_that_hangs_to_overlap_its_communication() -> None:
    made = synthesize(Job(dp=4, steps=12)).run
    trace = made.ranks[1]
    stopped = {**made.ranks, 1: replace(trace, closed=False, exception="ValueError")}
    summary = summarise(replace(made, ranks=stopped))

    assert summary.stops
    assert summary.findings[0].kind == "failed"
    assert summary.verdict.startswith("Rank 1 ")
    assert summary.verdict.partition(": commtrace doctor ")[0].endswith("See where each rank is")
    assert "Overlap" not in summary.verdict
    assert summary.state == "failed: rank 1 cut off; ValueError on rank 1"


def test_the_doctor_tells_of_ranks_that_stand_still_outside_of_any_communication() -> None:
    run = six_steps()
    diagnosis = examine(run, now_ns=EPOCH_NS + 100 * SECOND, ask=lambda process: RUNS)

    assert [finding.kind for finding in diagnosis.findings][:1] == ["hang"]
    assert diagnosis.findings[0].evidence.startswith("No step has ended for 94 s")
    assert diagnosis.findings[0].advice == ""  # the way there is this command
    assert [*diagnosis.hang.last_activities] == [0, 1]
    assert in_second(run, 100).stop is not None
    assert examine(run, now_ns=EPOCH_NS + 7 * SECOND, ask=lambda process: RUNS).findings == ()
