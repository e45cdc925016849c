"""Simulated jobs whose lost time is divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commtrace.analysis.matching.match import match
from commtrace.analysis.replay.observed_steps import ObservedProgram
from commtrace.analysis.replay.scenarios import Replay, ReplayedSteps
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.stragglers.lost_time import LostTime, lost_time, scenarios_of_lost_time
from commtrace.analysis.stragglers.search import Judgement, find_stragglers
from commtrace.findings.finding import Finding
from commtrace.synth import Job, synthesize


class Analysed(NamedTuple):
    statistics: StepStatistics
    replayed: ReplayedSteps
    judgement: Judgement

    @property
    def slow(self) -> tuple[Finding, ...]:
        return self.judgement.slow

    def lost(self, slow: Sequence[Finding]) -> LostTime:
        return lost_time(self.statistics, self.replayed, slow)


def analysed(job: Job) -> Analysed:
    run = synthesize(job).run
    matches = match(run)
    observed = ObservedProgram.of(run, matches)
    statistics = observed.statistics
    found = find_stragglers(run, matches, observed=observed)
    replayed = Replay.of(observed.steps, statistics).replay(scenarios_of_lost_time(statistics))
    return Analysed(statistics, replayed, found)
