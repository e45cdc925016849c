"""Compute everything that ``commtrace summary`` prints.

>>> summarise("commtrace-runs/my-run", steps="10:20").ranks[0].part("compute")  # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from commtrace.analysis.breakdown.critical_path import CriticalPath
from commtrace.analysis.breakdown.modules import ModuleTime
from commtrace.analysis.breakdown.rank_means import RankMean, launch_bound_sentence
from commtrace.analysis.breakdown.run_budget import RunBudget, run_budget
from commtrace.analysis.breakdown.run_steps import LaunchTimes, RunSteps, run_steps
from commtrace.analysis.breakdown.states import COMPUTE, REPLAY
from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.communication.table import Communication, roles_of_one_rank
from commtrace.analysis.engines import EngineUse, engines_used, on_gpu
from commtrace.analysis.hangs.job_end import EarlierAttempt, earlier_attempts
from commtrace.analysis.hangs.job_state import state_of_job
from commtrace.analysis.largest_loss import ONLY_DUMPS, verdict
from commtrace.analysis.matching.coverage import Coverage, missing_numbers
from commtrace.analysis.matching.operations import ONLY_KERNELS
from commtrace.analysis.memory import RankMemory, peak_memory
from commtrace.analysis.pipeline.bubble import BubbleCauses, replayed_bubbles
from commtrace.analysis.pipeline.observed import Pipeline
from commtrace.analysis.problems import find_problems, find_step_numbers
from commtrace.analysis.replay.ideal import Ideal
from commtrace.analysis.replay.observed_steps import ObservedSteps, Places
from commtrace.analysis.replay.scenarios import ReplayedSteps, Scenario, check_steps, replay_steps
from commtrace.analysis.step_totals import StepTotals, step_totals
from commtrace.analysis.steps.attempts import RepeatedStep, repeated_steps
from commtrace.analysis.steps.choice import ChosenSteps, StepChoice, recorded_steps
from commtrace.analysis.steps.detail import RecordedDetail, find_detail
from commtrace.analysis.steps.iterations import iterations_in_steps
from commtrace.analysis.stragglers.awaited import AwaitedRank, awaited_totals
from commtrace.analysis.stragglers.list_of_findings import with_lost_time, with_reasons, with_roles
from commtrace.analysis.stragglers.lost_time import LostTime, lost_time, scenarios_of_lost_time
from commtrace.analysis.stragglers.search import Judgement, StragglerSums, judge_stragglers, measure_work
from commtrace.analysis.timeline import step_durations
from commtrace.analysis.windows.run import (
    ALONE,
    MeasuredRun,
    OpenedRun,
    Workers,
    open_run,
)
from commtrace.findings.causes import JOB
from commtrace.findings.finding import LOST, SLOW, STOPS, Finding, ranked
from commtrace.trace.files.reader import load_earlier_attempts
from commtrace.trace.json_values import JsonObject, fields_to_json, to_json
from commtrace.trace.processes import process_state
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


NOT_IN_JSON: Final = ("totals", "all_steps")


@dataclass(frozen=True, slots=True)
class Summary:
    """The time of a run by cause. All but ``run_budget`` and ``repeated_steps`` is of the steps that count."""

    run: RunIdentity
    detail: RecordedDetail
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
    # The next two are for pages that show more, and not part of the JSON (NOT_IN_JSON).
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
        return summarise_analysis(analyse(source, steps), is_whole=steps is None)
    return summarise_steps(open_run(source, steps, workers), is_whole=steps is None)


def summarise_analysis(analysis: Analysis, *, is_whole: bool = False) -> Summary:
    """Summarise a run that was analysed already; see :func:`summarise_steps`."""
    return summarise_steps(OpenedRun.of(analysis), is_whole=is_whole)


def summarise_steps(run: OpenedRun, *, is_whole: bool = False) -> Summary:
    """Summarise steps. If they are all that was recorded (``is_whole``), gaps in communication numbers are losses."""
    return summarise_measured(run, run.measure(measure_summary), is_whole=is_whole)


def summarise_measured(run: OpenedRun, measured: MeasuredRun[SummarySums], *, is_whole: bool = False) -> Summary:
    """Summarise steps that were measured with :func:`measure_summary`, maybe together with other measurements."""
    measured = replace(measured, result=measured.result.joined())
    alignment, ranks_of_run = run.alignment, run.aligned
    recorded, steps, totals = measured.recorded, measured.steps, measured.result.totals
    ranks = totals.means(ranks_of_run)
    communication = totals.communication.table(ranks_of_run)
    unmatched = totals.unmatched.find(recorded)
    budget, launches = _launches(recorded, is_whole)
    replayed = _replay(run, measured.result)
    judgement = replayed.judgement or Judgement.without(ONLY_KERNELS + _most_waited_for(ranks), place=JOB)
    job = state_of_job(recorded, now_ns=time.time_ns(), ask=process_state)
    roles = sorted({role for rank in ranks for role in rank.exposed})
    transfer_ns = {role: sum(rank.exposed_in(role).transfer_ns for rank in ranks) / len(ranks) for role in roles}
    listed = ranked([*job.findings, *with_roles(with_lost_time(judgement, replayed.lost), transfer_ns)])
    longest = measured.result.stragglers.awaited.longest(names_ranks=not judgement.are_too_few_steps)
    awaited = with_reasons(longest, listed)
    summed = totals.steps
    return Summary(
        run=_identity(recorded, steps),
        detail=find_detail(recorded),
        alignment=alignment,
        run_budget=budget,
        repeated_steps=tuple(repeated_steps([launch.steps for launch in launches])),
        ranks=tuple(ranks),
        critical_path=totals.critical_path,
        lost_time=replayed.lost,
        launch_bound=launch_bound_sentence(ranks),
        awaited=awaited,
        communication=tuple(communication),
        modules=totals.modules,
        pipeline=replayed.pipeline,
        peak_memory=peak_memory(recorded),
        together_ns=judgement.together_ns,
        coverage=totals.captured.coverage(ranks_of_run),
        missing=missing_numbers(recorded, measured.counts) if is_whole else None,
        state=job.words,
        findings=listed,
        verdict=ONLY_DUMPS
        if recorded.any_metadata.is_dump
        else verdict(
            ranks,
            judgement.slow,
            unmatched.roles | roles_of_one_rank(communication),
            awaited=awaited,
            steps=summed,
            captured=totals.captured.rows,
            stop=job.stop,
            lost=[finding for finding in listed if finding.kind == LOST],
        ),
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
        totals=totals,
        all_steps=run_steps(launches, steps, step_durations(ranks_of_run, steps.used)),
    )


@dataclass(frozen=True, slots=True)
class SummarySums:
    """All that a summary needs of some steps; those of several windows of a run add up."""

    totals: StepTotals
    stragglers: StragglerSums

    def __add__(self, later: SummarySums) -> SummarySums:
        return SummarySums(self.totals + later.totals, self.stragglers + later.stragglers)

    def joined(self) -> SummarySums:
        """Return the same with the work in one part."""
        return replace(self, stragglers=self.stragglers.joined())


def measure_summary(analysis: Analysis) -> SummarySums:
    """Measure the steps that count."""
    numbers = find_step_numbers(analysis.context)
    work, (totals, awaited) = _side_by_side(
        analysis,
        partial(measure_work, analysis, numbers),
        lambda: (step_totals(analysis, numbers), awaited_totals(analysis.context)),
    )
    return SummarySums(totals, StragglerSums(work, awaited))


def _side_by_side(analysis: Analysis, one: Callable[[], _One], other: Callable[[], _Other]) -> tuple[_One, _Other]:
    """Return the results of both calls: of a run that is a single window in two threads, else one after the other.

    The windows of a longer run are measured by processes, which keep all cores busy.
    """
    if analysis.steps_of_run is not None:
        return one(), other()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(one)
        result = other()
        return future.result(), result


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


class _Replayed(NamedTuple):
    """Results of the replay; no judgement if only kernels were recorded."""

    pipeline: Pipeline | None
    judgement: Judgement | None
    lost: LostTime | None = None


def _replay(run: OpenedRun, measured: SummarySums) -> _Replayed:
    work, pipeline = measured.stragglers.work, measured.totals.pipeline
    if not run.steps.used:
        return _Replayed(None, Judgement())
    if work.why_not == ONLY_KERNELS:
        return _Replayed(None, None)
    if work.steps is None:
        return _Replayed(pipeline.pipeline(), judge_stragglers(run.aligned, work, None))
    judgement = judge_stragglers(run.aligned, work, run.replay(work.steps))
    # If clocks do not agree, a replay would show nothing of transfers.
    scenarios = scenarios_of_lost_time(work.steps) if work.clocks_agree else ()
    ideal = Ideal.of(work.steps) if pipeline.is_pipeline else None
    if not scenarios and ideal is None:
        return _Replayed(pipeline.pipeline(), judgement)
    # Everything with ideal durations at once: a window whose model was not kept is read once for it.
    replayed = run.read(partial(_replay_ideal, places=Places.of(work.steps), scenarios=scenarios, ideal=ideal))
    check_steps(work.steps, replayed.steps)
    lost = None
    if scenarios:
        gpus = run.recorded.world_size if on_gpu(run.recorded) else None
        lost = lost_time(work.steps, replayed.steps, judgement.slow, gpus)
    return _Replayed(pipeline.pipeline(replayed.causes), judgement, lost)


@dataclass(frozen=True, slots=True)
class _ReplayedIdeal:
    """Steps in the scenarios of lost time, and the causes of bubbles of a pipeline."""

    steps: ReplayedSteps
    causes: BubbleCauses | None

    def __add__(self, later: _ReplayedIdeal) -> _ReplayedIdeal:
        causes = None if self.causes is None or later.causes is None else self.causes + later.causes
        return _ReplayedIdeal(self.steps + later.steps, causes)


def _replay_ideal(
    observed: ObservedSteps, places: Places, scenarios: Sequence[Scenario], ideal: Ideal | None
) -> _ReplayedIdeal:
    causes = None if ideal is None else replayed_bubbles(observed, ideal)
    return _ReplayedIdeal(replay_steps(observed, places, scenarios), causes)


def _most_waited_for(ranks: Sequence[RankMean]) -> str:
    """Name the rank that others waited for longest; only its late arrival is known."""
    last = max(ranks, key=lambda rank: rank.blame_ns, default=None)
    if last is None or not last.blame_ns:
        return ""
    share = last.blame_ns / sum(rank.blame_ns for rank in ranks)
    return f" Others waited longest for rank {last.rank}: {share:.0%} of all waiting."


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
