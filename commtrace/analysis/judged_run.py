"""What every command says first of a run: the state of its job, and its findings ranked by cost.

>>> run = open_run("commtrace-runs/my-run")                                     # doctest: +SKIP
>>> judge_run(run, run.measure(measure_job).result).findings[0].line()          # doctest: +SKIP
'rank 1 on vm, slow forward: 224 ms per step (62.9% of it)'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.table import roles_of_one_rank
from commtrace.analysis.engines import on_gpu
from commtrace.analysis.hangs.job_state import JobState, state_of_job
from commtrace.analysis.largest_loss import ONLY_DUMPS, losses_of_states, time_outside_spans, with_largest_of_the_rest
from commtrace.analysis.matching.operations import ONLY_KERNELS
from commtrace.analysis.pipeline.bubble import BubbleCauses, replayed_bubbles
from commtrace.analysis.pipeline.observed import Pipeline
from commtrace.analysis.problems import find_step_numbers
from commtrace.analysis.replay.ideal import Ideal
from commtrace.analysis.replay.observed_steps import ObservedSteps, Places
from commtrace.analysis.replay.scenarios import ReplayedSteps, Scenario, check_steps, replay_steps
from commtrace.analysis.step_totals import StepTotals, step_totals
from commtrace.analysis.stragglers.awaited import AwaitedRank, awaited_totals
from commtrace.analysis.stragglers.baseline import HealthyRun
from commtrace.analysis.stragglers.list_of_findings import NO_STEPS, with_lost_time, with_reasons, with_roles
from commtrace.analysis.stragglers.lost_time import LostTime, lost_time, scenarios_of_lost_time
from commtrace.analysis.stragglers.mended import JudgedSteps
from commtrace.analysis.stragglers.search import Judgement, StragglerSums, judge_stragglers, measure_work
from commtrace.analysis.windows.run import OpenedRun
from commtrace.findings.causes import JOB
from commtrace.findings.finding import SLOW, STOPS, Finding, not_judged, ranked
from commtrace.findings.formatting import format_time
from commtrace.trace.processes import process_state
from commtrace.trace.run import Run

_BY_TIME_OUTSIDE_SPANS: Final = ("late_launch", "unknown")

_One = TypeVar("_One")
_Other = TypeVar("_Other")


@dataclass(frozen=True, slots=True)
class RunSums:
    """All that is needed of some steps to judge a run; those of several windows of a run add up."""

    totals: StepTotals
    stragglers: StragglerSums

    def __add__(self, later: RunSums) -> RunSums:
        return RunSums(self.totals + later.totals, self.stragglers + later.stragglers)

    def joined(self) -> RunSums:
        """Return the same with the work in one part."""
        return replace(self, stragglers=self.stragglers.joined())


def measure_job(analysis: Analysis) -> RunSums:
    """Measure the steps that count."""
    numbers = find_step_numbers(analysis.context)
    work, (totals, awaited) = _side_by_side(
        analysis,
        partial(measure_work, analysis, numbers),
        lambda: (step_totals(analysis, numbers), awaited_totals(analysis.context)),
    )
    return RunSums(totals, StragglerSums(work, awaited))


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


class RunTitle(NamedTuple):
    """What stands above everything that is shown of a run."""

    run: str
    attempt: int  # how often the job had been started before
    state: str  # JobState.words
    world_size: int
    ranks_recorded: int
    hosts: Sequence[str]
    path: str
    num_steps: int | None = None  # that count; None if no steps are shown
    step_ns: float | None = None  # the mean over these and the ranks

    @classmethod
    def of(cls, recorded: Run, state: JobState) -> RunTitle:
        """Return the title of a run without its steps."""
        metadata = recorded.any_metadata
        hosts = tuple(dict.fromkeys(trace.metadata.node for trace in recorded.ranks.values()))
        ranks = (recorded.world_size, len(recorded.ranks))
        return cls(metadata.run_id, metadata.attempt, state.words, *ranks, hosts, str(recorded.path))

    @property
    def words(self) -> str:
        """Return ``Run gpt · ended · 16 ranks on 2 hosts · 39 steps of 156 ms``."""
        attempt = f", attempt {self.attempt + 1}" if self.attempt else ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        if self.ranks_recorded != self.world_size:
            ranks += f" ({self.ranks_recorded} recorded)"
        where = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts"
        steps = [] if self.num_steps is None else ["no whole step"]
        if self.num_steps and self.step_ns is not None:
            steps = [f"{self.num_steps} step{'s' * (self.num_steps != 1)} of {format_time(self.step_ns)}"]
        return " · ".join([f"Run {self.run}{attempt}", self.state, f"{ranks} on {where}", *steps])


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The state of a job, and what its steps lose time to."""

    title: RunTitle
    job: JobState
    findings: tuple[Finding, ...]  # what stops the job, then by cost, then what could not be judged
    ranks: tuple[RankMean, ...]  # the mean step of each
    judgement: Judgement
    lost: LostTime | None  # beyond the ideal; None if the steps were not replayed
    pipeline: Pipeline | None
    awaited: tuple[AwaitedRank, ...]  # longest first

    @property
    def slow(self) -> tuple[Finding, ...]:
        """Return what slows the steps, costliest first."""
        return tuple(finding for finding in self.findings if finding.kind == SLOW)

    @property
    def stops(self) -> bool:
        """Return whether the job has failed or hangs."""
        return bool(self.findings) and self.findings[0].kind in STOPS


def judge_slow(run: OpenedRun) -> JudgedSteps | None:
    """Return what slows the steps of a run, with the scenarios without it; None if they cannot be replayed."""
    work = run.measure(measure_work).result.joined() if run.steps.used else None
    if work is None or work.steps is None:
        return None
    judgement = judge_stragglers(run.aligned, work, run.replay(work.steps))
    return JudgedSteps(judgement.mended, Places.of(work.steps))


def mean_step_ns(ranks: Sequence[RankMean]) -> float | None:
    """Return the length of a step from the mean step of each rank; None without ranks."""
    return sum(rank.wall_ns for rank in ranks) / len(ranks) if ranks else None


def judge_run(run: OpenedRun, sums: RunSums, baseline: HealthyRun | None = None) -> JudgedRun:
    """Judge the steps that were measured with :func:`measure_job`.

    Args:
        baseline: a healthy run of the same job, for causes that no comparison of ranks shows.
    """
    sums = sums.joined()
    totals = sums.totals
    ranks = totals.means(run.aligned)
    replayed = _replay(run, sums, baseline)
    judgement = replayed.judgement or Judgement.without(ONLY_KERNELS + _most_waited_for(ranks), place=JOB)
    job = state_of_job(run.recorded, now_ns=time.time_ns(), ask=process_state)
    awaited = sums.stragglers.awaited.longest(names_ranks=not judgement.are_too_few_steps)
    awaited_here = with_reasons(awaited, judgement.slow)
    unmatched = totals.unmatched.find(run.recorded).roles | roles_of_one_rank(totals.communication.table(run.aligned))
    of_steps: tuple[Finding, ...]
    if run.recorded.any_metadata.is_dump:
        of_steps = (not_judged(JOB, ONLY_DUMPS),)
    elif replayed.lost is None:
        losses = losses_of_states(
            ranks, unmatched, awaited=awaited_here, steps=totals.steps, captured=totals.captured.rows
        )
        of_steps = (*judgement.findings, *losses)
    else:
        parts = with_roles(with_lost_time(judgement, replayed.lost), _transfer_ns(ranks), unmatched)
        of_steps = (
            *with_largest_of_the_rest(parts, ranks, totals.steps),
            *(() if _is_named(judgement) else time_outside_spans(ranks, totals.steps, totals.captured.rows)),
        )
    listed = ranked([*job.findings, *of_steps])
    title = RunTitle.of(run.recorded, job)._replace(num_steps=len(run.steps.used), step_ns=mean_step_ns(ranks))
    return JudgedRun(
        title=title,
        job=job,
        findings=listed,
        ranks=tuple(ranks),
        judgement=judgement,
        lost=replayed.lost,
        pipeline=replayed.pipeline,
        awaited=with_reasons(awaited, listed),
    )


def _is_named(judgement: Judgement) -> bool:
    """Return whether time outside all spans is what something slow is found by: then it is no loss besides."""
    return any(finding.cause in _BY_TIME_OUTSIDE_SPANS for finding in judgement.slow)


def _transfer_ns(ranks: Sequence[RankMean]) -> dict[str, float]:
    """Return by role how long the mean rank is stalled on transfers in a step."""
    roles = sorted({role for rank in ranks for role in rank.exposed})
    return {role: sum(rank.exposed_in(role).transfer_ns for rank in ranks) / len(ranks) for role in roles}


class _Replayed(NamedTuple):
    """Results of the replay; no judgement if only kernels were recorded."""

    pipeline: Pipeline | None
    judgement: Judgement | None
    lost: LostTime | None = None


def _replay(run: OpenedRun, sums: RunSums, baseline: HealthyRun | None) -> _Replayed:
    work, pipeline = sums.stragglers.work, sums.totals.pipeline
    if not run.steps.used:
        return _Replayed(None, Judgement.without(NO_STEPS, place=JOB))
    if work.why_not == ONLY_KERNELS:
        return _Replayed(None, None)
    if work.steps is None:
        return _Replayed(pipeline.pipeline(), judge_stragglers(run.aligned, work, None, baseline=baseline))
    judgement = judge_stragglers(run.aligned, work, run.replay(work.steps), baseline=baseline)
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
