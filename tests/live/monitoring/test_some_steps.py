"""Faults of some steps in jobs that run: named as a recording of them names them, once, and for some time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.stragglers import windows_of
from commtrace.findings.finding import SLOW, Finding, Occurrence, Stretch
from commtrace.findings.status import CLEARED, FOUND, LiveEvent
from commtrace.live.monitoring import sampled_replay, some_steps
from commtrace.live.monitoring.sampled_steps import SampledSteps, StepDurations
from commtrace.live.monitoring.some_steps import FaultsOfSomeSteps, ToldFaults
from commtrace.live.monitoring.watch import Watch
from commtrace.trace.run import Run
from tests.analysis.stragglers.judged_jobs import found, made_with

SECONDS = 2.0
TWO_HOSTS: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 4, "steps": 40}
"""Steps of 150 ms, of 16 ranks."""

DP4: dict[str, Any] = {"dp": 4, "steps": 60}


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


@pytest.mark.parametrize("job", [{}, {"outliers": 0.01}, {"jitter": 0.05}, {"outliers": 0.05, "seed": 1}])
def test_jobs_without_a_fault_name_nobody(job: dict[str, Any]) -> None:
    watch, events = watched(made_with([], **DP4, **job).run)
    assert (slow(watch.findings), events) == ([], [])


def test_steps_that_are_longer_on_all_ranks_name_nobody() -> None:
    assert watched(made_with(["slow-rank=0,1,2,3:2@10:13"], **DP4).run)[1] == []


def test_single_steps_of_several_ranks_name_nobody() -> None:
    faults = [f"slow-rank={rank}:2@{step}:{step + 1}" for rank, step in ((1, 12), (2, 20), (0, 33))]
    assert watched(made_with(faults, **DP4).run)[1] == []


def test_a_rank_that_becomes_slow_for_good_is_named_once() -> None:
    """As it goes on, it is no fault of some steps."""
    _, events = watched(made_with(["slow-rank=3:1.8@24:60"], **DP4).run)
    assert [(event.kind, event.finding.ranks) for event in events] == [(FOUND, (3,))]
    assert events[0].finding.occurrence is None


def test_a_rank_that_was_slow_for_long_is_not_named_once_more_when_it_is_over() -> None:
    _, events = watched(made_with(["slow-rank=3:1.5@20:45"], **DP4 | {"steps": 100}).run)
    assert [(event.kind, event.finding.ranks) for event in events] == [(FOUND, (3,)), (CLEARED, (3,))]
    assert events[0].finding.occurrence is None


def test_what_is_over_is_known_for_a_minute() -> None:
    run = made_with(["slow-rank=1:2@10:13"], **DP4 | {"steps": 120}).run
    seconds = max(int(trace.spans.end.max()) for trace in run.ranks.values()) / 1e9 / 24
    _, events = watched(run, seconds)
    assert [(event.kind, event.finding.ranks) for event in events] == [(FOUND, (1,)), (CLEARED, (1,))]
    assert 14 * seconds < (events[1].time_ns - events[0].time_ns) / 1e9 < 17 * seconds
    assert events[1].sentence.startswith("Rank 1 on node0 goes on as its peers do (compute) at ")
    assert ": in 3 of " in events[1].sentence


class Kept(SampledSteps):
    """Steps of two ranks that the monitor keeps, and their durations in ms; which of them were judged is counted."""

    def __init__(self, *ms: float) -> None:
        super().__init__(world_size=2)
        self.ms = [*ms]
        self.judged: list[int] = []

    def durations(self) -> StepDurations:
        ns = np.array([self.ms, self.ms], np.float64) * 1e6
        return StepDurations(np.arange(len(self.ms)), ns.astype(np.int64), first_step=0)

    def run_of(self, steps: Any) -> Run:
        self.judged.append(len(steps))
        return Run(Path(), {}, [])


def struck(first: int, last: int, ranks: Sequence[int] = (1,), cause: str = "compute") -> Finding:
    steps = tuple(range(first, last + 1))
    return Finding(
        id=f"slow/ranks/{cause}/{ranks[0]}",
        kind=SLOW,
        place="ranks",
        cause=cause,
        who=f"rank {ranks[0]} on node0",
        ranks=tuple(ranks),
        since_step=first,
        stretches=(Stretch(first, last, 50e6),),
        occurrence=Occurrence(steps, len(steps) * 50_000_000, 40),
    )


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What judging the steps gives."""
    given: list[Finding] = []
    monkeypatch.setattr(some_steps, "_judged", lambda *_: iter(given))
    return given


def test_steps_are_judged_once_some_are_long_and_once_more_with_the_next_ones(verdicts: list[Finding]) -> None:
    faults, kept = FaultsOfSomeSteps(2, SECONDS), Kept(300, *[100] * 19)
    faults.look(kept, now=0.0)
    assert kept.judged == []  # the first step warms up
    kept.ms += [120, 120, *[100] * 8]
    faults.look(kept, now=2.0)
    faults.look(kept, now=2.5)
    assert kept.judged == [30]  # without new steps there is nothing to look at
    for now in (4.0, 6.0):
        kept.ms += [100] * 10
        faults.look(kept, now)
    assert kept.judged == [30, 40]


def test_what_goes_on_in_the_newest_step_is_judged_again_and_not_named(verdicts: list[Finding]) -> None:
    faults, kept = FaultsOfSomeSteps(2, SECONDS), Kept(*[100] * 28, 150, 150)
    verdicts[:] = [struck(28, 29)]
    faults.look(kept, now=0.0)
    assert faults.known(now=0.0) == ()
    kept.ms += [100] * 10
    faults.look(kept, now=2.0)
    assert faults.known(now=2.0) == (struck(28, 29),)
    assert faults.known(now=31.0) == (struck(28, 29),)
    assert faults.known(now=33.0) == ()


@pytest.mark.parametrize(("long_before", "ms", "is_named"), [(0, 150, True), (200, 150, False), (200, 108, True)])
def test_two_steps_say_little_in_a_job_that_has_had_many_as_long(
    verdicts: list[Finding], long_before: int, ms: float, is_named: bool
) -> None:
    """All steps of the job so far count, not only those that are kept."""
    faults, kept = FaultsOfSomeSteps(2, SECONDS), Kept(*[100] * 20, *[100, 100, ms, 100] * long_before)
    faults.look(kept, now=0.0)
    first = len(kept.ms)
    kept.ms += [150, 150, *[100] * 40]
    verdicts[:] = [struck(first, first + 1)]
    faults.look(kept, now=2.0)
    assert (faults.known(now=2.0) != ()) is is_named


def test_what_stood_while_it_went_on_and_what_is_a_pause_is_not_named_once_more() -> None:
    told, fault = ToldFaults(), struck(28, 33)
    assert told.new([fault], pauses=[]) == [fault]
    assert told.new([fault], pauses=[struck(28, 60, cause="gc")]) == [fault]
    assert told.new([fault], pauses=[struck(28, 60)]) == []
    told.tell([struck(30, 40)], last_step=40)
    assert told.new([fault], pauses=[]) == [fault]  # it began earlier
    told.tell([struck(27, 40, ranks=(0,))], last_step=40)
    assert told.new([fault], pauses=[]) == [fault]
    told.tell([struck(27, 40)], last_step=40)
    assert told.new([fault], pauses=[]) == []
    assert told.new([struck(50, 52)], pauses=[]) == [struck(50, 52)]


def test_a_failure_leaves_all_else_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(some_steps, "_judged", fail)
    _, events = watched(made_with(["slow-rank=1:2@10:13", "slow-rank=3:1.8@24:60"], **DP4).run)
    assert [event.finding.ranks for event in events] == [(3,)]
    assert caplog.text.count("the monitor no longer looks for faults of some steps; all else goes on") == 1
