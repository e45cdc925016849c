"""Faults of some steps in jobs that run: named as a recording of them names them, once, and for some time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from bench.stragglers import windows_of
from commtrace.findings.finding import SLOW, Finding
from commtrace.findings.status import CLEARED, FOUND, LiveEvent
from commtrace.live.monitoring import sampled_replay
from commtrace.live.monitoring.watch import Watch
from commtrace.trace.run import Run
from tests.analysis.stragglers.judged_jobs import found, made_with

SECONDS = 2.0
TWO_HOSTS: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 4, "steps": 40}
"""Steps of 150 ms, of 16 ranks."""


@pytest.fixture(autouse=True)
def _every_window_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_replay, "_MOST_OF_A_CORE", 1e9)


def watched(run: Run, seconds: float = SECONDS) -> tuple[Watch, list[LiveEvent]]:
    watch, events = Watch(run.world_size, seconds), list[LiveEvent]()
    for reports, at in windows_of(run, seconds):
        events += watch.join(reports, at)
    return watch, events


def stretches(finding: Finding) -> list[tuple[int, int]]:
    return [(stretch.first, stretch.last) for stretch in finding.stretches]


def slow(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.kind == SLOW]


@pytest.mark.parametrize("last", [11, 14])
@pytest.mark.parametrize(
    "fault", ["slow-rank=5:1.8", "slow-host=1:1.5", "slow-link=2:3", "gc=3:80", "data=6:80"]
)  # fmt: skip
def test_a_fault_of_some_steps_is_named_as_in_a_recording(fault: str, last: int) -> None:
    faults = [f"{fault}@10:{last + 1}"]
    (recorded,) = found(faults, **TWO_HOSTS).slow
    watch, events = watched(made_with(faults, **TWO_HOSTS).run)

    (finding,) = slow(watch.findings)
    assert [(event.kind, event.finding.id) for event in events] == [(FOUND, finding.id)]
    assert (finding.id, finding.who, finding.cause) == (recorded.id, recorded.who, recorded.cause)
    assert stretches(finding) == stretches(recorded) == [(10, last)]
    assert (finding.since_step, finding.since_ns) == (recorded.since_step, recorded.since_ns)
    assert finding.occurrence is not None
    assert recorded.occurrence is not None
    assert finding.occurrence.steps == recorded.occurrence.steps
    assert finding.occurrence.total_ns == pytest.approx(recorded.occurrence.total_ns, rel=0.1)
    assert finding.cost_ns == pytest.approx(finding.occurrence.total_ns / finding.occurrence.num_steps, rel=0.2)
    assert finding.occurrence.describe() in events[0].sentence


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("job", [{}, {"outliers": 0.01}, {"jitter": 0.05}])
def test_jobs_without_a_fault_name_nobody(job: dict[str, Any], seed: int) -> None:
    watch, events = watched(made_with([], **TWO_HOSTS, **job, seed=seed).run)
    assert (slow(watch.findings), events) == ([], [])


def test_steps_that_are_longer_on_all_ranks_name_nobody() -> None:
    every_rank = ",".join(map(str, range(16)))
    assert watched(made_with([f"slow-rank={every_rank}:2@10:13"], **TWO_HOSTS).run)[1] == []


def test_a_rank_that_becomes_slow_for_good_is_named_once() -> None:
    """As it goes on, it is no fault of some steps."""
    _, events = watched(made_with(["slow-rank=5:1.8@24:80"], **TWO_HOSTS | {"steps": 80}).run)
    assert [(event.kind, event.finding.ranks) for event in events] == [(FOUND, (5,))]
    assert events[0].finding.occurrence is None


def test_a_rank_that_was_slow_for_long_is_not_named_once_more_when_it_is_over() -> None:
    _, events = watched(made_with(["slow-rank=5:1.5@24:70"], **TWO_HOSTS | {"steps": 140}).run)
    assert [(event.kind, event.finding.ranks) for event in events] == [(FOUND, (5,)), (CLEARED, (5,))]
    assert events[0].finding.occurrence is None


def test_what_is_over_is_known_for_a_minute() -> None:
    job: dict[str, Any] = {"dp": 4, "steps": 120}
    run = made_with(["slow-rank=1:2@10:13"], **job).run
    seconds = max(int(trace.spans.end.max()) for trace in run.ranks.values()) / 1e9 / 24
    _, events = watched(run, seconds)
    assert [(event.kind, event.finding.ranks) for event in events] == [(FOUND, (1,)), (CLEARED, (1,))]
    assert 14 * seconds < (events[1].time_ns - events[0].time_ns) / 1e9 < 17 * seconds
    assert events[1].sentence.startswith("Rank 1 on node0 goes on as its peers do (compute) at ")
    assert ": in 3 of " in events[1].sentence
