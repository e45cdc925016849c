"""Steps of simulated jobs, replayed some at a time as the monitor does: what it tells of stages and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.matched import match_run
from commtrace.analysis.steps.choice import ChosenSteps
from commtrace.analysis.stragglers.lost_time import lost_time, scenarios_of_lost_time
from commtrace.findings.causes import JOB, PART_OF_LOSS, STAGE_THAT_CHANGED, advice
from commtrace.findings.finding import Finding
from commtrace.live.monitoring import sampled_replay
from commtrace.live.monitoring.past import JobPast
from commtrace.live.monitoring.sampled_replay import (
    Priced,
    ReplayedSamples,
    SampledReplay,
    lost_in_samples,
    price,
)
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace.run import Run

MS = 1_000_000
STEPS = 8
PIPELINE: dict[str, Any] = {"pp": 4, "dp": 2, "jitter": 0.02}
TWO_HOSTS: dict[str, Any] = {
    "pp": 2, "dp": 4, "gpus_per_host": 4, "layers": 2, "microbatches": 8, "sequence": 2048, "jitter": 0.02,
    "forward_ns": 15 * MS, "backward_ns": 30 * MS,
}  # fmt: skip
SLOW_NETWORK = "slow-network=1:50@{}:{}"


def replayed(job: dict[str, Any], faults: Sequence[str], windows: int, slow: Sequence[int] = ()) -> list[Priced]:
    """What the steps of each window tell, if these ranks were found to be slow."""
    run = synthesize(Job(**job, steps=windows * STEPS, faults=tuple(map(Fault.parse, faults)))).run
    normal = np.array([rank for rank in run.ranks if rank not in slow], np.int64)
    past, sets = JobPast(), [frozenset(slow)] if slow else []
    return [price(samples(run, first), sets, normal, past) for first in range(0, windows * STEPS, STEPS)]


def samples(run: Run, first: int) -> ReplayedSamples:
    window = steps_of(run, range(first, first + STEPS))
    matched = match_run(ChosenSteps(window, window), f"{first}:{first + STEPS}")
    return ReplayedSamples.of(matched.run, matched.matches)


def steps_of(run: Run, steps: range) -> Run:
    ranks = {
        rank: replace(trace, spans=trace.spans.take(np.isin(trace.spans.step, steps)))
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def test_what_steps_lose_beside_what_is_slow_adds_up_to_all_that_is_beyond_the_ideal() -> None:
    steps = samples(synthesize(Job(**PIPELINE, steps=STEPS)).run, 0)
    lost = lost_in_samples(steps, ())
    whole = lost_time(steps.statistics, steps.replay.replay(scenarios_of_lost_time(steps.statistics)), ())

    assert [finding.cause for finding in lost] == [*PART_OF_LOSS]
    assert sum(finding.cost_ns or 0 for finding in lost) == pytest.approx((whole.steps_ns - whole.ideal_ns) / STEPS)
    assert {finding.cause: finding.advice for finding in lost} == {
        cause: advice(cause, 0, JOB) for cause in PART_OF_LOSS
    }


class Clock:
    """The time that a thread has run, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> SampledReplay:
    """One that has steps whenever it may replay, which takes a second."""
    steps = samples(synthesize(Job(**PIPELINE, steps=STEPS)).run, 0)

    def replayed_steps(*_: object) -> ReplayedSamples:
        clock.seconds += 1.0
        return steps

    monkeypatch.setattr(sampled_replay, "_replayed", replayed_steps)
    return SampledReplay(8, thread_seconds=clock)


@pytest.mark.parametrize(("seconds", "next_at"), [(0.0, 50), (2.0, 150)])
def test_dividing_lost_time_is_part_of_what_a_replay_may_take_of_a_core(
    replay: SampledReplay, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, next_at: int
) -> None:
    lost = Finding(id="lost/job/transfer", kind="lost")

    def divide(*_: object) -> tuple[Finding, ...]:
        clock.seconds += seconds
        return (lost,)

    monkeypatch.setattr(sampled_replay, "lost_in_samples", divide)
    steps = replay.newest([], now=0.0)
    assert steps is not None
    assert replay.lost(steps, ()) == (lost,)
    assert replay.newest([], now=next_at - 1) is None
    assert replay.newest([], now=next_at) is steps


def test_lost_time_that_cannot_be_divided_is_left_out_and_nothing_else(
    replay: SampledReplay, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[float] = []

    def fail(*_: object) -> tuple[Finding, ...]:
        tries.append(clock.seconds)
        clock.seconds += 2.0
        raise ZeroDivisionError

    monkeypatch.setattr(sampled_replay, "lost_in_samples", fail)
    steps = replay.newest([], now=0.0)
    assert steps is not None
    assert [replay.lost(steps, ()), replay.lost(steps, ())] == [(), ()]
    assert len(tries) == caplog.text.count("the monitor no longer divides lost time") == 1
    assert replay.newest([], now=149) is None
    assert replay.newest([], now=150) is steps


def test_a_stage_that_was_slow_from_the_first_step_on_has_too_many_layers() -> None:
    for priced in replayed(PIPELINE, ["uneven-stage=1:1.3"], 3):
        (finding,) = priced.of_no_rank
        assert (finding.who, finding.advice) == ("stage 1 (ranks 2–3)", advice("stage_imbalance", 2))


def test_a_stage_that_becomes_slow_has_the_layers_that_it_had() -> None:
    *before, after = replayed(PIPELINE, ["uneven-stage=1:1.3@16:24"], 3)
    assert [priced.of_no_rank for priced in before] == [(), ()]
    (finding,) = after.of_no_rank
    assert (finding.who, finding.advice) == ("stage 1 (ranks 2–3)", STAGE_THAT_CHANGED)


def test_a_stage_that_becomes_slow_is_named_apart_from_one_that_always_was() -> None:
    *_, after = replayed(PIPELINE, ["uneven-stage=1:1.3", "uneven-stage=2:1.4@16:24"], 3)
    assert {finding.who: finding.advice for finding in after.of_no_rank} == {
        "stage 1 (ranks 2–3)": advice("stage_imbalance", 2),
        "stage 2 (ranks 4–5)": STAGE_THAT_CHANGED,
    }


def test_most_stages_that_become_slow_are_recognised_by_what_they_did_before() -> None:
    *_, after = replayed(PIPELINE, ["uneven-stage=0,1,3:1.25@16:24"], 3)
    (finding,) = after.of_no_rank
    assert finding.who == "stages 0–1, 3 (ranks 0–3, 6–7)"
    assert "25% more than before, compared with the other stages" in finding.evidence


def test_stages_that_differ_by_design_are_compared_with_what_they_did_before() -> None:
    design = ["uneven-stage=1:1.1", "uneven-stage=2:1.2", "uneven-stage=3:1.3"]
    *before, after = replayed(PIPELINE, [*design, "uneven-stage=2:1.5@16:24"], 3)
    assert [(priced.of_no_rank, len(priced.undecided)) for priced in before] == [((), 1), ((), 1)]
    (finding,) = after.of_no_rank
    assert (finding.who, finding.advice) == ("stage 2 (ranks 4–5)", STAGE_THAT_CHANGED)
    assert "50% more than before, compared with the other stages" in finding.evidence


def test_a_network_that_becomes_slow_is_compared_with_what_it_was() -> None:
    *before, after, later = replayed(TWO_HOSTS, [SLOW_NETWORK.format(16, 32)], 4)
    assert [priced.of_no_rank for priced in before] == [(), ()]
    for priced in (after, later):
        (finding,) = priced.of_no_rank
        assert (finding.who, finding.cause) == ("network between hosts node0, node1 (ranks 0–7)", "communication")
        assert "as in the steps in which they were fast" in finding.evidence


def test_a_network_that_is_slow_from_the_first_step_on_has_no_past() -> None:
    assert [priced.of_no_rank for priced in replayed(TWO_HOSTS, [SLOW_NETWORK.format(0, 24)], 3)] == [(), (), ()]


SLOW_REPLICA: dict[str, Any] = {**PIPELINE, "microbatches": 8}


def test_one_long_microbatch_of_a_replica_is_its_input_and_costs_what_the_others_wait_for() -> None:
    (priced,) = replayed(SLOW_REPLICA, ["long-microbatch=3-1:2"], 1, (1, 3, 5, 7))
    assert priced.longer_inputs == (((1, 3, 5, 7), "microbatch 3 takes 2.0 times as long"),)
    assert priced.of_rank[1].set_ns == pytest.approx(42.7 * MS, rel=0.02)  # what the simulated step is longer


def test_longer_microbatches_with_a_usual_optimizer_step_are_blamed_on_the_input() -> None:
    (priced,) = replayed(SLOW_REPLICA, [f"long-microbatch={number}-1:1.3" for number in range(8)], 1, (1, 3, 5, 7))
    assert priced.longer_inputs == (((1, 3, 5, 7), ""),)


def test_a_replica_that_is_slow_in_all_that_it_does_has_no_longer_input() -> None:
    (priced,) = replayed(SLOW_REPLICA, ["slow-rank=1,3,5,7:1.3"], 1, (1, 3, 5, 7))
    assert priced.longer_inputs == ()


@pytest.mark.parametrize(("fault", "is_late"), [("late-host=1:1.4", True), ("slow-rank=1:1.4", False)])
def test_a_late_host_is_told_from_a_slow_device(fault: str, is_late: bool) -> None:
    (priced,) = replayed({"dp": 4}, [fault], 1, slow=[1])

    launches = priced.launches[1]
    assert launches is not None
    assert launches.are_late is is_late
    assert priced.of_no_rank == ()


def test_a_job_whose_hosts_are_all_late_is_launch_bound() -> None:
    (priced,) = replayed({"dp": 4}, ["late-launch=0,1,2,3:20"], 1)

    (finding,) = priced.of_no_rank
    assert (finding.place, finding.cause) == ("job", "host")
    assert finding.cost_ns == pytest.approx(20 * MS, rel=0.05)
