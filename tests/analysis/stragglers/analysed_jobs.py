"""Simulated jobs whose lost time is divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commtrace.analysis.matching.match import match
from commtrace.analysis.replay.program import build_program
from commtrace.analysis.replay.scenarios import ReplayedSteps, replay_of
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
    program = build_program(run, matches)
    statistics = StepStatistics.of(run, program)
    found = find_stragglers(run, matches, program=program)
    replayed = replay_of(run, program, statistics).replay(scenarios_of_lost_time(statistics))
    return Analysed(statistics, replayed, found)
