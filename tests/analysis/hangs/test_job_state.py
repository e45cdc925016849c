"""What a job does now, for the commands that read how fast it was."""

from __future__ import annotations

from dataclasses import replace

from commtrace.analysis.hangs.job_state import HANGING, state_of_job
from commtrace.analysis.summary import summarise
from commtrace.synth import Job, synthesize
from commtrace.trace.processes import RUNS
from tests.analysis.hangs.flight_calls import hung
from tests.analysis.hung_runs import END, NOW_NS, done, flight, stopped_run
from tests.factory import EPOCH_NS, group

TP = group("tp", 0, 1)
WAY = "See where each rank is: commtrace doctor "


def test_a_job_that_hangs_says_so_with_the_rank_and_the_way_to_more() -> None:
    job = state_of_job(hung(), now_ns=NOW_NS)

    assert (job.state, job.words) == ("cut_off", "hung, cut off: ranks 0–1")
    assert job.stop is not None
    assert (job.stop.kind, job.stop.ranks, job.stop.id) == ("hang", (1,), "hang/ranks/1")
    assert job.stop.line() == "The job hangs: 1 communication waits in the end for rank 1."
    assert job.stop.advice.startswith(WAY)


def test_a_job_that_goes_on_hangs() -> None:
    job = state_of_job(hung(), now_ns=EPOCH_NS + END, ask=lambda process: RUNS)

    assert (job.state, job.words) == (HANGING, "hangs")


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
