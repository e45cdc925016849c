"""Which scalars steps become."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from commtrace.exporters.scalars.series import RankSeries, StepSums
from commtrace.findings.finding import LOST, Finding
from commtrace.findings.status import JobMeans, JobView, LiveEvent
from commtrace.live.summary import DeviceMemory, StepSummary
from commtrace.trace.metadata import ClockAnchor
from tests.exporters.prometheus.steps import SECOND, rank, summary
from tests.live.findings import silent_finding, slow_finding


def sums(*steps: StepSummary) -> StepSums:
    added = StepSums()
    for step in steps:
        added.add(step)
    return added


def test_a_point_is_the_mean_of_the_steps_at_the_last_one_and_its_parts_add_up() -> None:
    later = summary(8, start_ns=20 * SECOND, duration_ns=4 * SECOND, exposed_ns={"dp": SECOND}, bubble_ns=0,
                    data_ns=SECOND, compute_ns={"forward": 2 * SECOND}, other_ns=0)  # fmt: skip
    live = rank(anchor=ClockAnchor(0, 1_000 * SECOND))

    (point,) = RankSeries(live).points(sums(summary(7), later))

    assert (point.scope, point.step, point.time) == ("rank_3", 8, 1024.0)
    assert point.values == {
        "step_seconds": 3.0,
        "compute_seconds/forward": 1.5,
        "exposed_seconds/dp": 0.625,
        "bubble_seconds": 0.25,
        "data_seconds": 0.5,
        "other_seconds": 0.125,
    }
    assert sum(value for name, value in point.values.items() if name != "step_seconds") == 3.0
    assert point.tagged["commtrace/rank_3/exposed_seconds/dp"] == 0.625


def test_a_part_that_was_there_once_is_zero_where_it_is_not() -> None:
    series = RankSeries(rank())
    assert "checkpoint_seconds" not in series.points(sums(summary(1)))[0].values
    series.points(sums(summary(2, checkpoint_ns=SECOND, counts={"tokens": 10})))
    values = series.points(sums(summary(3)))[0].values
    assert values["checkpoint_seconds"] == 0
    assert "tokens_per_second" not in values


def test_no_steps_are_no_point() -> None:
    assert RankSeries(rank()).points(StepSums()) == []


def test_rates_are_over_all_steps_of_a_point() -> None:
    h100 = DeviceMemory("NVIDIA H100 80GB HBM3", 0, 0, 0, 0)
    counted = {"tokens": 300.0, "samples": 3.0, "model_flops": 989e12}
    steps = [summary(step, counts=counted, device=h100) for step in (1, 2)]
    (point,) = RankSeries(rank()).points(sums(*steps, summary(3, duration_ns=SECOND, device=h100)))
    assert point.values["tokens_per_second"] == 120
    assert point.values["samples_per_second"] == 1.2
    assert point.values["mfu_ratio"] == pytest.approx(0.4)


MEANS = JobMeans(
    step=40,
    ranks=8,
    step_ns=2 * SECOND,
    work_ns={"compute": SECOND, "data": SECOND // 4, "gc": 0, "checkpoint": 0, "evaluation": 0, "unknown": SECOND // 4},
    exposed_ns={"dp": SECOND // 4, "pp": SECOND // 4},
)


def test_findings_about_the_job_are_written_once_per_window() -> None:
    live = rank(number=0)
    live.score = 1.25
    stragglers = (slow_finding(2, cost_ns=80e6), slow_finding(5, cost_ns=20e6))
    lost = Finding(id="lost/job/transfer", kind=LOST, place="job", cause="transfer", cost_ns=0.25e9)
    live.job = JobView((*stragglers, lost), (), MEANS)
    series = RankSeries(live)
    own, job = series.points(sums(summary(44)))
    assert own.values["straggler_score_ratio"] == 1.25
    assert (job.scope, job.step, job.time) == ("job", 40, own.time)
    assert job.values == {
        "step_seconds": 2.0,
        "compute_seconds": 1.0,
        "data_seconds": 0.25,
        "gc_seconds": 0,
        "checkpoint_seconds": 0,
        "evaluation_seconds": 0,
        "other_seconds": 0.25,
        "exposed_seconds/dp": 0.25,
        "exposed_seconds/pp": 0.25,
        "lost_seconds/transfer": 0.25,
        "stragglers": 2,
        "straggler_cost_seconds": 0.08,
    }
    assert [point.scope for point in series.points(sums(summary(45)))] == ["rank_0"]
    live.job = JobView((), (), replace(MEANS, step=50))
    job = series.points(sums(summary(52)))[1]
    assert (job.step, job.values["stragglers"], job.values["straggler_cost_seconds"]) == (50, 0, 0)


def test_before_the_monitor_has_compared_ranks_there_is_no_point_of_the_job() -> None:
    live = rank(number=0)
    live.job = JobView((), (), None)
    assert len(RankSeries(live).points(sums(summary(1)))) == 1


def test_every_finding_is_written_once_with_the_newest_step() -> None:
    live = rank()
    series = RankSeries(live)
    silent = LiveEvent("found", 5 * SECOND, silent_finding(2), "Rank 2 is silent.")
    back = LiveEvent("recovered", 9 * SECOND, silent_finding(2), "Rank 2 reports again.")
    assert series.findings() == []
    live.job = JobView((), (silent,), None)
    assert series.findings() == [(-1, silent)]
    series.points(sums(summary(7)))
    live.job = JobView((), (silent, back), None)
    assert series.findings() == [(7, back)]
    assert series.findings() == []
