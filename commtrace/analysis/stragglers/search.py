"""Find stragglers, with cause, cost and next step (docs/stragglers.md).

A rank that waits for a slow one is never named: waiting is no duration in a replay.

>>> find_stragglers(run, matches).slow[0].evidence  # doctest: +SKIP
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from commtrace.analysis.breakdown.states import REPLAY
from commtrace.analysis.chain import Analysis
from commtrace.analysis.clocks.time_of_day import step_begin_ns, step_end_ns
from commtrace.analysis.matching.match import Matches, blame_ns
from commtrace.analysis.matching.operations import ONLY_KERNELS, is_kernel_trace
from commtrace.analysis.matching.stages import are_told, not_told
from commtrace.analysis.problems import StepNumbers, find_step_numbers
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.observed_steps import ObservedProgram
from commtrace.analysis.replay.program import Program
from commtrace.analysis.replay.scenarios import Replay, Scenario
from commtrace.analysis.replay.step_bounds import NOT_IN_ORDER
from commtrace.analysis.replay.step_statistics import StatisticsParts, StepStatistics
from commtrace.analysis.stragglers.awaited import AwaitedTotals, most_waited_for
from commtrace.analysis.stragglers.baseline import HealthyRun
from commtrace.analysis.stragglers.late_hosts import launch_bound_job
from commtrace.analysis.stragglers.limits import RECORDED, Limits, Thresholds
from commtrace.analysis.stragglers.mended import MendedFinding, costliest_first
from commtrace.analysis.stragglers.microbatches import uneven_sequences
from commtrace.analysis.stragglers.normal import Usual
from commtrace.analysis.stragglers.slow_links import slow_links
from commtrace.analysis.stragglers.slow_ranks import common_change, judge_stretches
from commtrace.analysis.stragglers.slow_sets import SlowSets, judge_sets
from commtrace.analysis.stragglers.uneven_stages import UnevenStages, uneven_stages
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import JOB, RANKS
from commtrace.findings.finding import Finding, not_judged, ranked
from commtrace.findings.formatting import format_ranks
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

NO_PEERS = (
    "Ranks were not compared: no two ranks do the same work (data- and tensor-parallel size are 1), so a slow rank "
    "looks the same as a larger share of the model. Run with at least two data-parallel replicas to compare."
)


NONE_COMPARED: Final = StepNumbers()

NOT_THE_SAME_STEPS: Final = (
    "Ranks were not compared: what they do in a step of the same number is not the same iteration. Mark the steps with "
    "`with commtrace.step(i):`, with the same number on all ranks."
)


_MUCH_REPLAYED: Final = 0.05
"""Share of the step in replays that is mentioned."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What slows the steps of a run, and what could not be judged."""

    mended: tuple[MendedFinding, ...] = ()  # costliest first
    not_judged: tuple[Finding, ...] = ()  # with the missing signal as evidence
    replay_error: float = float("nan")  # median difference of replayed and measured steps, as a share
    together_ns: float = 0.0  # saved in a step without everything that is slow
    waited_for: str = ""  # if nothing is slow: the rank that others waited for most, and why it is no straggler
    are_too_few_steps: bool = False  # of the steps to name anybody, in whatever sentence

    @property
    def slow(self) -> tuple[Finding, ...]:
        """Return what slows the steps, costliest first."""
        return tuple(each.finding for each in self.mended)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what slows the steps and what could not be judged in one list."""
        return ranked([*self.slow, *self.not_judged])

    @classmethod
    def without(cls, why: str, replay_error: float = float("nan"), place: str = RANKS) -> Judgement:
        """Return that nothing could be judged; ``why`` is a sentence."""
        return cls(not_judged=(not_judged(place, why),), replay_error=replay_error)


class ReplayedShare(NamedTuple):
    """Time of ranks in replays of CUDA graphs that communicate, and in steps, ns."""

    replayed_ns: int
    wall_ns: int

    def plus(self, other: ReplayedShare) -> ReplayedShare:
        return ReplayedShare(self.replayed_ns + other.replayed_ns, self.wall_ns + other.wall_ns)

    def sentences(self) -> tuple[str, ...]:
        """Return what is not judged, if the time is much."""
        share = self.replayed_ns / self.wall_ns if self.wall_ns else 0.0
        if share < _MUCH_REPLAYED:
            return ()
        return (
            f"{share:.0%} of the step is replayed from CUDA graphs that communicate. Ranks that wait inside of a "
            "replay are not told from ranks that work: who holds them up there is not found, and lost time counts it "
            "as ideal.",
        )


NONE_REPLAYED: Final = ReplayedShare(0, 0)


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """Input of the search for stragglers from some steps. That of several windows adds up to that of the run."""

    parts: StatisticsParts | None  # None if they cannot be replayed
    why_not: str  # why they cannot
    num_steps: int  # with those that were not drawn into the statistics
    begins_ns: Int64  # begin of the first and the last step of each rank, shape (2, ranks)
    blame_ns: Mapping[int, int]  # by rank, the time that others waited for it
    clocks_agree: bool
    numbers: StepNumbers = NONE_COMPARED
    replayed_share: ReplayedShare = NONE_REPLAYED

    @classmethod
    def of(cls, run: Run, matches: Matches, program: Program, parts: StatisticsParts) -> MeasuredWork:
        """Measure the steps of a program with these statistics."""
        begins_ns = program.start_ns[:, [0, -1]].T
        return cls(parts, "", len(program.steps), begins_ns, blame_ns(run, matches), matches.clocks_agree)

    @classmethod
    def not_replayed(cls, why: str, matches: Matches) -> MeasuredWork:
        return cls(None, why, 0, np.zeros((2, 0), np.int64), {}, matches.clocks_agree)

    @property
    def steps(self) -> StepStatistics | None:
        """Return the statistics of the steps; None if they cannot be replayed. Parts are joined anew each time."""
        return None if self.parts is None else self.parts.joined()

    def joined(self) -> MeasuredWork:
        """Return the same in one part."""
        return self if self.parts is None else replace(self, parts=StatisticsParts((self.parts.joined(),)))

    def __add__(self, later: MeasuredWork) -> MeasuredWork:
        parts, why_not = None, self.why_not or later.why_not
        begins_ns = np.stack([self.begins_ns[0], later.begins_ns[1]]) if not why_not else self.begins_ns
        if not why_not and (later.begins_ns[0] < self.begins_ns[1]).any():
            why_not = NOT_IN_ORDER
        if self.parts is not None and later.parts is not None and not why_not:
            parts = self.parts + later.parts
        return MeasuredWork(
            parts,
            why_not,
            self.num_steps + later.num_steps,
            begins_ns,
            Counter(self.blame_ns) + Counter(later.blame_ns),
            self.clocks_agree,
            self.numbers + later.numbers,
            self.replayed_share.plus(later.replayed_share),
        )


def find_stragglers(
    run: Run,
    matches: Matches,
    thresholds: Thresholds | None = None,
    observed: ObservedProgram | None = None,
    baseline: HealthyRun | None = None,
    around: Run | None = None,
) -> Judgement:
    """Find stragglers in steps that are in memory, with aligned clocks; ``around`` also has the rows between them."""
    try:
        program, steps, statistics = observed or ObservedProgram.of(run, matches, around)
    except ReplayError as error:
        return judge_stragglers(run, MeasuredWork.not_replayed(str(error), matches), None)
    measured = MeasuredWork.of(run, matches, program, StatisticsParts((statistics,)))
    replay = Replay.of(steps, statistics)
    return judge_stragglers(run, measured, replay, thresholds, baseline)


def measure_work(analysis: Analysis, numbers: StepNumbers | None = None) -> MeasuredWork:
    """Measure the steps that count, unless only kernels were recorded: a replay would show nothing of them.

    ``numbers`` are theirs, if they were compared before.
    """
    if any(is_kernel_trace(trace.spans) for trace in analysis.run.ranks.values()):
        return MeasuredWork.not_replayed(ONLY_KERNELS, analysis.matches)
    try:
        program, replayed_ns = analysis.program, analysis.observed.step_ns()
    except ReplayError as error:
        return MeasuredWork.not_replayed(str(error), analysis.matches)
    around = analysis.context.run
    parts = StatisticsParts.of(analysis.replayed.run, program, analysis.work, analysis.transfers, around, replayed_ns)
    measured = MeasuredWork.of(analysis.run, analysis.matches, program, parts)
    times = analysis.partition
    replayed = ReplayedShare(int(times.total(REPLAY).sum()), int(times.wall_ns.sum()))
    return replace(measured, numbers=numbers or find_step_numbers(analysis.context), replayed_share=replayed)


@dataclass(frozen=True, slots=True)
class StragglerSums:
    """All that is said of stragglers comes from these; those of several windows of a run add up."""

    work: MeasuredWork
    awaited: AwaitedTotals

    def __add__(self, later: StragglerSums) -> StragglerSums:
        return StragglerSums(self.work + later.work, self.awaited + later.awaited)

    def joined(self) -> StragglerSums:
        """Return the same with the work in one part."""
        return replace(self, work=self.work.joined())


def judge_stragglers(
    run: Run,
    measured: MeasuredWork,
    replay: Replay | None,
    thresholds: Thresholds | None = None,
    baseline: HealthyRun | None = None,
) -> Judgement:
    """Find stragglers in measured steps.

    Of ``run``, on one clock, only the rows of steps are used. ``replay`` is None if the steps cannot be replayed.
    """
    judgement = _judge(run, measured, replay, thresholds or Thresholds(), baseline)
    replayed = (not_judged(RANKS, sentence) for sentence in measured.replayed_share.sentences())
    return replace(judgement, not_judged=(*judgement.not_judged, *replayed))


def _judge(
    run: Run, measured: MeasuredWork, replay: Replay | None, thresholds: Thresholds, baseline: HealthyRun | None
) -> Judgement:
    if len(run.ranks) < 2:
        return Judgement.without(NO_PEERS)
    if measured.steps is None or replay is None:
        return Judgement.without(f"Stragglers were not looked for: {measured.why_not}", place=JOB)
    if measured.numbers.are_apart:
        return Judgement.without(NOT_THE_SAME_STEPS)
    work = WorkStatistics.of(run, measured.steps, thresholds)
    why_not = _why_not_judged(measured, work)
    if why_not:
        return Judgement.without(why_not, work.replay_error, JOB)
    has_peers = bool(np.isfinite(work.peers.peer_ns).any())
    if not work.noise_is_known:
        too_few = _too_few_steps(work) if has_peers or not are_told(run) else NO_PEERS
        return replace(Judgement.without(too_few, work.replay_error), are_too_few_steps=True)
    stretches = judge_stretches(work, baseline.of_ranks(work) if baseline else {})
    sets = judge_sets(work, replay, stretches)
    undecided = tuple(not_judged(RANKS, sentence) for stretch in stretches for sentence in stretch.undecided)
    usual = baseline.usual if baseline else None
    of_no_rank = of_no_single_rank(work, replay, _ranks(sets), sets.normal, is_cut=True, usual=usual)
    mended = sets.mended
    if of_no_rank.mended and any(stretch.slow for stretch in stretches):
        # The cost of a rank is hidden where others wait for something else as well, and vice versa.
        beside = judge_sets(work, replay, stretches, of_no_rank.normal)
        mended = beside.mended
        if _ranks(beside) != _ranks(sets):
            of_no_rank = of_no_single_rank(work, replay, _ranks(beside), beside.normal, is_cut=True, usual=usual)
        if _ranks(beside) < _ranks(sets):
            sets = beside  # the others are why ranks seemed slow: their cost counts once
    together_ns = sets.together_ns + sum(
        finding.cost_ns or 0.0 for finding in of_no_rank.findings if not finding.cost_is_bound
    )
    undecided += of_no_rank.undecided
    abstentions = tuple(dict.fromkeys(undecided))
    if not are_told(run):
        classes = dict(zip(work.ranks.tolist(), work.stages.tolist(), strict=True))
        abstentions = (not_judged(RANKS, not_told(classes)), *abstentions)
    elif not has_peers and not mended and not of_no_rank.mended:
        abstentions = (not_judged(RANKS, NO_PEERS), *undecided)
    abstentions = (*_on_missing_ranks(run), *abstentions)
    ordered = costliest_first([*mended, *of_no_rank.mended])
    if not ordered:
        changes = common_change(work), baseline.difference(work) if baseline else ""
        abstentions += tuple(not_judged(JOB, sentence) for sentence in changes if sentence)
    # If normal is not known, a comparison with others would be one with the slow.
    waited_for = ""
    if not ordered and not undecided and are_told(run):
        waited_for = most_waited_for(stretches[0], measured.blame_ns, measured.num_steps, replay)
    dated = tuple(MendedFinding(_dated(finding, work), normal) for finding, normal in ordered)
    return Judgement(dated, abstentions, work.replay_error, together_ns, waited_for)


def _on_missing_ranks(run: Run) -> Iterator[Finding]:
    missing = set(range(run.world_size)) - set(run.ranks)
    if missing:
        ranks, were = format_ranks(missing), "was" if len(missing) == 1 else "were"
        yield not_judged(
            RANKS,
            f"{ranks.capitalize()} {were} not compared: no complete step was recorded there. Costs are lower bounds, "
            f"as waiting for {ranks} counts as transfer.",
        )


def _dated(finding: Finding, work: WorkStatistics) -> Finding:
    first = int(work.steps[0])
    step = finding.since_step if finding.since_step >= 0 else first
    stretches = tuple(
        structs.replace(
            stretch, since_ns=step_begin_ns(work.run, stretch.first), until_ns=step_end_ns(work.run, stretch.last)
        )
        for stretch in finding.stretches
    )
    return structs.replace(
        finding,
        since_step=step,
        share=(finding.cost_ns or 0.0) / work.mean_step_ns,
        since_first_compared=step == first,
        since_ns=step_begin_ns(work.run, step),
        stretches=stretches,
    )


class OfNoSingleRank(NamedTuple):
    """Findings on stages, sequences and links, and the scenario without them."""

    mended: list[MendedFinding]
    normal: Scenario
    undecided: tuple[Finding, ...]
    healthy: Usual  # of the stages and links that are not slow

    @property
    def findings(self) -> list[Finding]:
        return [each.finding for each in self.mended]


def _ranks(sets: SlowSets) -> set[int]:
    return {rank for finding in sets.findings for rank in finding.ranks}


def of_no_single_rank(
    work: WorkStatistics,
    replay: Replay,
    slow_ranks: Collection[int],
    normal_ranks: Scenario,
    limits: Limits = RECORDED,
    *,
    is_cut: bool = False,
    usual: Usual | None = None,
) -> OfNoSingleRank:
    """Find slow stages, sequences and links.

    ``normal_ranks`` is the scenario in which ``slow_ranks`` work normally, ``usual`` is the job when it is healthy.
    ``is_cut`` cuts the run where stages or links change.
    """
    stages = UnevenStages()
    if are_told(work.run):  # else the last one, which holds the output layer, would be
        stages = uneven_stages(work, replay, normal_ranks, limits, is_cut=is_cut, usual=usual)
    slow = {*slow_ranks, *stages.ranks}
    # Ranks that are slow now and then have long microbatches, too.
    sequences = None if slow else uneven_sequences(work, replay)
    links = slow_links(work, replay, normal_ranks + stages.normal, slow, is_cut=is_cut, usual=usual)
    normal = normal_ranks + stages.normal + links.normal
    of_job = filter(None, (sequences, launch_bound_job(work, replay, normal)))
    mended = [*stages.mended, *(MendedFinding(finding, None) for finding in of_job), *links.mended]
    healthy = Usual(stages.healthy_ns, links.healthy_ns)
    return OfNoSingleRank(mended, stages.normal + links.normal, stages.undecided + links.undecided, healthy)


def _too_few_steps(work: WorkStatistics) -> str:
    return (
        f"Slow ranks were not looked for: too few steps: {work.num_steps}, at least {work.thresholds.fewest_steps} "
        "are needed to separate a slow rank from noise"
        + ("" if work.steady.all() else "; the first step, in which everything warms up, does not count")
        + "."
    )


def _why_not_judged(measured: MeasuredWork, work: WorkStatistics) -> str:
    if not measured.clocks_agree:
        return (
            "Stragglers were not looked for: the clocks of the hosts could not be aligned, so waiting between hosts is "
            "unknown."
        )
    if work.replay_error > work.thresholds.replay_error:
        return (
            f"Stragglers were not looked for: the replayed steps differ from the measured ones by "
            f"{work.replay_error:.0%}; spans are missing or the clocks disagree."
        )
    return ""
