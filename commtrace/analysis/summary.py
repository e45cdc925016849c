"""Compute everything that ``commtrace summary`` prints.

>>> summarise("commtrace-runs/my-run", steps="10:20").ranks[0].part("compute")  # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, TypeVar

from commtrace.analysis.breakdown.critical_path import CriticalPath
from commtrace.analysis.breakdown.modules import ModuleTime
from commtrace.analysis.breakdown.rank_means import RankMean, launch_bound_sentence
from commtrace.analysis.breakdown.run_budget import RunBudget, run_budget
from commtrace.analysis.breakdown.run_steps import LaunchTimes, RunSteps, run_steps
from commtrace.analysis.breakdown.states import COMPUTE, REPLAY
from commtrace.analysis.chain import analyse
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.comparison.own_cost import own_cost
from commtrace.analysis.engines import EngineUse, engines_used
from commtrace.analysis.hangs.job_end import EarlierAttempt, earlier_attempts
from commtrace.analysis.judged_run import RunSums, RunTitle, judge_run, measure_job
from commtrace.analysis.matching.coverage import Coverage, missing_numbers
from commtrace.analysis.memory import RankMemory, peak_memory
from commtrace.analysis.pipeline.observed import Pipeline
from commtrace.analysis.problems import find_problems
from commtrace.analysis.step_totals import StepTotals
from commtrace.analysis.steps.attempts import RepeatedStep, repeated_steps
from commtrace.analysis.steps.choice import ChosenSteps, StepChoice, recorded_steps
from commtrace.analysis.steps.detail import RecordedDetail, find_detail
from commtrace.analysis.steps.iterations import iterations_in_steps
from commtrace.analysis.stragglers.awaited import AwaitedRank
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.analysis.timeline import step_durations
from commtrace.analysis.windows.run import (
    ALONE,
    MeasuredRun,
    OpenedRun,
    Workers,
    open_run,
)
from commtrace.findings.finding import SLOW, STOPS, Finding, verdict
from commtrace.findings.own_cost import OwnCost
from commtrace.trace.files.reader import load_earlier_attempts
from commtrace.trace.json_values import JsonObject, fields_to_json, to_json
from commtrace.trace.run import Run
from commtrace.trace.topology import Topology

_One = TypeVar("_One")
_Other = TypeVar("_Other")


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run, and the steps that a summary is of."""

    id: str
    attempt: int  # how often the job had been started before
    path: str
    world_size: int
    ranks_recorded: int
    hosts: tuple[str, ...]
    steps: StepChoice
    steps_inferred: bool  # nothing marked the steps
    backend: str  # of the first rank, as are device and versions
    device: str
    versions: Mapping[str, str]
    step_numbers: str | None  # the source of step numbers; None if unknown
    iterations: str | None  # a sentence if some of the steps hold more than one iteration
    framework: Mapping[str, str] | None  # name and version; None if unknown
    parallel: Mapping[str, int]  # size of each parallel dimension
    engines: tuple[EngineUse, ...]  # that recorded; none if imported
    earlier_attempts: tuple[EarlierAttempt, ...]  # of the same job, oldest first


NOT_IN_JSON: Final = ("title", "totals", "all_steps")


@dataclass(frozen=True, slots=True)
class Summary:
    """The time of a run by cause. All but ``run_budget`` and ``repeated_steps`` is of the steps that count."""

    run: RunIdentity
    detail: RecordedDetail
    own_cost: OwnCost | None  # of recording, from its own steps; None with too few that were not recorded
    alignment: Alignment
    run_budget: RunBudget | None  # wall time of the whole run; None if only some steps were asked for
    repeated_steps: tuple[RepeatedStep, ...]
    ranks: tuple[RankMean, ...]
    critical_path: CriticalPath | None  # None without steps or common clocks
    lost_time: LostTime | None  # beyond the ideal; None if the steps were not replayed
    launch_bound: str  # a sentence on devices that wait for their hosts; empty if it is little, or not known
    awaited: tuple[AwaitedRank, ...]  # longest first
    communication: tuple[Communication, ...]  # by role, operation, group size and reach, the most exposed first
    modules: tuple[ModuleTime, ...]  # longest first
    pipeline: Pipeline | None
    peak_memory: tuple[RankMemory, ...]  # of the whole recording; without ranks that train on no device
    together_ns: float  # what a step would save without everything that is slow
    coverage: Coverage
    missing: int | None  # communications without a trace, by their numbers; None if only some steps were asked for
    state: str  # of the job: running, hangs since …, ended, failed: …
    findings: tuple[Finding, ...]  # what stops the job, what is slow, lost time, what could not be judged
    verdict: str  # one sentence on what to look at
    problems: tuple[str, ...]  # of the recording, in sentences
    # The rest is for pages that show more, and not part of the JSON (NOT_IN_JSON).
    title: RunTitle = field(compare=False)
    totals: StepTotals = field(repr=False, compare=False)
    all_steps: RunSteps = field(repr=False, compare=False)  # also those that do not count, of all launches

    @property
    def stops(self) -> bool:
        """Return whether the job has failed or hangs."""
        return bool(self.findings) and self.findings[0].kind in STOPS

    @property
    def slow(self) -> tuple[Finding, ...]:
        """Return what slows the steps, costliest first."""
        return tuple(finding for finding in self.findings if finding.kind == SLOW)

    def to_json(self) -> JsonObject:
        """Return the output of ``commtrace summary --json`` (docs/json/summary.schema.json)."""
        parts = {one.name: to_json(getattr(self, one.name)) for one in fields(self) if one.name not in NOT_IN_JSON}
        missing = parts.pop("missing")
        return {**parts, "coverage": {**fields_to_json(self.coverage), "missing": missing}}


def summarise(source: str | Path | Run | ChosenSteps, steps: str | None = None, workers: Workers = ALONE) -> Summary:
    """Summarise the steps of a run that count.

    Args:
        source: a run directory, a loaded run, or some steps of one.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``; by default all complete steps but the first (the warm-up).

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
    """
    if isinstance(source, (Run, ChosenSteps)):
        return summarise_steps(OpenedRun.of(analyse(source, steps)), is_whole=steps is None)
    return summarise_steps(open_run(source, steps, workers), is_whole=steps is None)


def summarise_steps(run: OpenedRun, measured: MeasuredRun[RunSums] | None = None, *, is_whole: bool = False) -> Summary:
    """Summarise steps.

    Args:
        measured: what :func:`measure_job` has measured of them already.
        is_whole: they are all that was recorded, so that gaps in communication numbers are losses.
    """
    measured = run.measure(measure_job) if measured is None else measured
    measured = replace(measured, result=measured.result.joined())
    alignment, ranks_of_run = run.alignment, run.aligned
    recorded, steps, totals = measured.recorded, measured.steps, measured.result.totals
    judged = judge_run(run, measured.result)
    communication = totals.communication.table(ranks_of_run)
    budget, launches = _launches(recorded, is_whole)
    summed = totals.steps
    all_steps = run_steps(launches, steps, step_durations(ranks_of_run, steps.used))
    return Summary(
        run=_identity(recorded, steps),
        detail=find_detail(recorded),
        own_cost=own_cost(all_steps.step, all_steps.duration_ns, all_steps.is_quiet, all_steps.is_usual),
        alignment=alignment,
        run_budget=budget,
        repeated_steps=tuple(repeated_steps([launch.steps for launch in launches])),
        ranks=judged.ranks,
        critical_path=totals.critical_path,
        lost_time=judged.lost,
        launch_bound=launch_bound_sentence(judged.ranks),
        awaited=judged.awaited,
        communication=tuple(communication),
        modules=totals.modules,
        pipeline=judged.pipeline,
        peak_memory=peak_memory(recorded),
        together_ns=judged.judgement.together_ns,
        coverage=totals.captured.coverage(ranks_of_run),
        missing=missing_numbers(recorded, measured.counts) if is_whole else None,
        state=judged.job.words,
        findings=judged.findings,
        verdict=verdict(judged.findings),
        problems=tuple(
            find_problems(
                recorded,
                alignment,
                steps,
                measured.counts,
                totals.numbers,
                communication,
                computes=bool(summed.total(COMPUTE).any() or summed.total(REPLAY).any()),
            )
        ),
        title=judged.title,
        totals=totals,
        all_steps=all_steps,
    )


def _launches(recorded: Run, is_whole: bool) -> tuple[RunBudget | None, list[LaunchTimes]]:
    """Return the budget, and all launches of the job, oldest first, which are loaded one after the other.

    If only some steps were asked for, there is no budget, and earlier launches are without their other steps.
    """
    earlier: list[LaunchTimes] = []

    def loaded() -> Iterator[Run]:
        for run in load_earlier_attempts(recorded):
            earlier.append(LaunchTimes.of(run))
            yield run

    if is_whole:
        return run_budget(recorded, loaded()), [*earlier, LaunchTimes.of(recorded)]
    own = set(recorded_steps(recorded))
    earlier += [LaunchTimes.of(run).only(own) for run in load_earlier_attempts(recorded)]
    return None, [*earlier, LaunchTimes.of(recorded)]


def _identity(run: Run, steps: StepChoice) -> RunIdentity:
    metadata = run.any_metadata
    parallel: dict[str, int] = {}
    topology: Topology = {}
    for trace in run.ranks.values():
        parallel.update(trace.parallel)
        topology.update(trace.topology)
    return RunIdentity(
        id=metadata.run_id,
        attempt=metadata.attempt,
        path=str(run.path),
        world_size=run.world_size,
        ranks_recorded=len(run.ranks),
        hosts=tuple(dict.fromkeys(trace.metadata.node for trace in run.ranks.values())),
        steps=steps,
        steps_inferred=run.steps_inferred,
        backend=metadata.backend,
        device=metadata.device,
        versions=metadata.versions,
        step_numbers=topology.get("step_numbers"),
        iterations=iterations_in_steps(run),
        framework=topology.get("framework"),
        parallel=parallel,
        engines=engines_used(run),
        earlier_attempts=earlier_attempts(run, now_ns=time.time_ns()),
    )
