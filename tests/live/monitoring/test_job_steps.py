"""The job's steps from the steps of its ranks."""

from __future__ import annotations

from commtrace.live.monitoring.job_steps import JobStep, JobSteps, RankStep, RepetitionCounter


def test_a_step_begins_with_its_first_rank_and_ends_with_its_last() -> None:
    steps = JobSteps()
    steps.add([RankStep(0, 0, 100, 200), RankStep(1, 0, 200, 300)])
    steps.add([RankStep(0, 0, 110, 239), RankStep(1, 0, 190, 290)])
    assert steps.newest == (JobStep(0, 0, 100, 239, 2), JobStep(1, 0, 190, 300, 2))


def test_a_repeated_step_is_another_one() -> None:
    steps = JobSteps()
    steps.add([RankStep(5, 0, 100, 200), RankStep(5, 1, 900, 1_000)])
    assert steps.newest == (JobStep(5, 0, 100, 200, 1), JobStep(5, 1, 900, 1_000, 1))


def test_repetitions_of_a_number_are_counted() -> None:
    repetitions = RepetitionCounter()
    assert [repetitions.begin(step) for step in (4, 5, 4, 4)] == [0, 0, 1, 2]
    assert [repetitions.of(step) for step in (4, 5, 6)] == [2, 0, 0]
