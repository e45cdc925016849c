"""Simulated jobs with faults, and what is found of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commtrace.analysis.chain import analyse
from commtrace.analysis.stragglers.search import Judgement, find_stragglers
from commtrace.synth import Fault, Job, Synthetic, synthesize


def judged(faults: Sequence[str], **job: Any) -> tuple[Judgement, float]:
    """The findings on a job with these faults, and what they truly cost, ms per step."""
    made = made_with(faults, **job)
    return findings_on(made), cost_ms_of(made)


def found(faults: Sequence[str], **job: Any) -> Judgement:
    """The findings alone: the job is not simulated without its faults."""
    return findings_on(made_with(faults, **job))


def made_with(faults: Sequence[str], **job: Any) -> Synthetic:
    return synthesize(Job(**{"dp": 8, "steps": 30, "jitter": 0.02, **job}, faults=tuple(map(Fault.parse, faults))))


def cost_ms_of(made: Synthetic) -> float:
    return (made.mean_step_ns - made.step_without_faults_ns) / 1e6


def findings_on(made: Synthetic) -> Judgement:
    analysis = analyse(made.run)
    return find_stragglers(analysis.run, analysis.matches)
