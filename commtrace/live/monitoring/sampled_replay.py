"""Replay sampled steps while the job runs: the cost of slow ranks, uneven stages, slow links, long microbatches.

>>> steps = SampledReplay(world_size=8).newest(reports, now)    # doctest: +SKIP
>>> priced = price(steps, [frozenset({3})], normal_ranks)       # doctest: +SKIP
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.matched import match_run
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.observed_steps import ObservedProgram
from commtrace.analysis.replay.scenarios import MEASURED, Replay, Scenario
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.steps.choice import ChosenSteps
from commtrace.analysis.stragglers.costs import cost_of
from commtrace.analysis.stragglers.evidence import format_phases, slow_phase
from commtrace.analysis.stragglers.late_hosts import LaunchLateness, launches_of
from commtrace.analysis.stragglers.limits import LIVE, Thresholds
from commtrace.analysis.stragglers.lost_time import lost_findings, lost_time, scenarios_of_lost_time
from commtrace.analysis.stragglers.microbatches import (
    LongerInput,
    compare_microbatches,
    longer_inputs,
    replica_of_ranks,
)
from commtrace.analysis.stragglers.search import of_no_single_rank
from commtrace.analysis.stragglers.slow_ranks import (
    MICROBATCHES,
    WORK,
    SlowRanks,
    find_slow_ranks,
    launches_late,
    normal_speed,
)
from commtrace.analysis.stragglers.slow_sets import MOST_SHARES
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import CHECKPOINT, PAUSES
from commtrace.findings.finding import Finding, ranked
from commtrace.live.gil import GilYield
from commtrace.live.monitoring.past import JobPast
from commtrace.live.monitoring.sampled_steps import SampledSteps, SampleError
from commtrace.live.monitoring.some_steps import FaultsOfSomeSteps
from commtrace.live.monitoring.window import WindowReport
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

_logger = logging.getLogger("commtrace")

_MOST_OF_A_CORE: Final = 0.02
"""In rank 0 the replay takes the GIL from training: of large jobs not every window is replayed."""


_STAGE: Final = "stage_imbalance"
_UNKNOWN_THEN: Final = ("communication", "sequence_length_imbalance")
"""While ranks or a stage are slow, links that touch them and sequences are not judged."""

_MOST_OF_EXCESS: Final = 0.5
"""If the replay explains less of a rank's excess, it gives no cost: a gap of this rank alone is in no work that its
peers do as well, and single steps do not move a median."""


class ReplayedSamples(NamedTuple):
    """Statistics and replay of the newest sampled steps."""

    work: WorkStatistics
    replay: Replay
    statistics: StepStatistics

    @classmethod
    def of(cls, run: Run, matches: Matches) -> ReplayedSamples:
        """Replay the steps of a run. Raise ReplayError if a rank's step is not complete."""
        _, steps, statistics = ObservedProgram.of(run, matches)
        return cls(WorkStatistics.of(run, statistics, Thresholds()), Replay.of(steps, statistics), statistics)


class SampledReplay:
    """Prepares the sampled steps of all ranks for a replay. A failure here does not keep ranks from being named."""

    def __init__(
        self, world_size: int, seconds: float = 4.0, thread_seconds: Callable[[], float] = time.thread_time
    ) -> None:
        self._steps = SampledSteps(world_size)
        self._some_steps = FaultsOfSomeSteps(world_size, seconds)
        self._thread_seconds = thread_seconds
        self._next_at = 0.0
        self._is_off = False
        self._is_lost_off = False
        self._is_some_steps_off = False
        self._is_refused = False

    @property
    def windows(self) -> int:
        """Return the number of windows that the newest steps come from."""
        return self._steps.windows

    def newest(self, reports: Sequence[WindowReport], now: float) -> ReplayedSamples | None:
        """Take the samples of ranks, and return the newest steps; None if there are none to replay at ``now``."""
        if self._is_off:
            return None
        begin = self._thread_seconds()
        try:
            self._take(reports)
            steps = _replayed(self._steps) if now >= self._next_at else None
        except Exception:
            self._is_off = True
            _logger.warning("commtrace: the monitor no longer replays steps; it still names slow ranks", exc_info=True)
            return None
        if steps is not None:
            self._next_at = now + (self._thread_seconds() - begin) / _MOST_OF_A_CORE
        return steps

    def lost(self, steps: ReplayedSamples, slow: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return what the newest steps lose beside what is ``slow``; none once this has failed.

        Its time counts as that of a replay.
        """
        if self._is_lost_off:
            return ()
        begin = self._thread_seconds()
        try:
            return lost_in_samples(steps, slow)
        except Exception:
            self._is_lost_off = True
            _logger.warning("commtrace: the monitor no longer divides lost time; all else goes on", exc_info=True)
            return ()
        finally:
            self._next_at += (self._thread_seconds() - begin) / _MOST_OF_A_CORE

    def look_for_faults_of_some_steps(self, now: float) -> None:
        """Look for them in the steps that are kept, if new ones are long. Its time counts as that of a replay."""
        if self._is_some_steps_off:
            return
        begin = self._thread_seconds()
        try:
            self._some_steps.look(self._steps, now)
        except Exception:
            self._is_some_steps_off = True
            _logger.warning(
                "commtrace: the monitor no longer looks for faults of some steps; all else goes on", exc_info=True
            )
        finally:
            self._next_at += (self._thread_seconds() - begin) / _MOST_OF_A_CORE

    def faults_of_some_steps(self, now: float) -> tuple[Finding, ...]:
        """Return those that are known at ``now``."""
        return self._some_steps.known(now)

    def _take(self, reports: Sequence[WindowReport]) -> None:
        gil_yield = GilYield()
        for report in reports:
            gil_yield.maybe_yield()
            if report.sample is None:
                continue
            try:
                self._steps.take(report.rank, report.host, report.sample)
            except SampleError as error:
                if not self._is_refused:
                    self._is_refused = True
                    _logger.warning(
                        "commtrace: the monitor cannot use the sampled steps of rank %d: %s", report.rank, error
                    )


def _replayed(steps: SampledSteps) -> ReplayedSamples | None:
    run = steps.newest_run()
    if run is None:
        return None
    numbers = np.unique(np.concatenate([trace.spans.step for trace in run.ranks.values()]))
    matched = match_run(ChosenSteps(run, run), f"{max(int(numbers[0]), 0)}:{int(numbers[-1]) + 1}")
    if not matched.matches.clocks_agree or not matched.steps.used:
        return None
    try:
        replayed = ReplayedSamples.of(matched.run, matched.matches)
    except ReplayError:
        return None  # a rank's step is not complete
    work = replayed.work
    return replayed if work.noise_is_known and work.replay_error <= work.thresholds.replay_error else None


class Price(NamedTuple):
    """The cost of a slow rank, ns per step; shares are None if there are too many slow ranks."""

    set_ns: float  # of its set, with all other slow ranks mended as well
    share_ns: float | None = None  # see findings.Member, like alone_ns
    alone_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Priced:
    """The result of a replay; mappings are by rank."""

    of_rank: Mapping[int, Price]  # the cost of each slow rank
    of_no_rank: Sequence[Finding]  # stages, sequences, links, launch-bound work; costliest first
    explained_ns: Mapping[int, float]  # excess in work that peers do as well
    phases: Mapping[int, str]  # the one phase in which the set of a slow rank is slow; empty if it is not one
    phase_texts: Mapping[int, str]  # the longer phases with numbers, if there are few slow ranks
    launches: Mapping[int, LaunchLateness | None]  # how each slow rank launches its work; None if not known
    late: frozenset[int]  # slow ranks most of whose excess lies before their phases
    longer_inputs: tuple[LongerInput, ...] = ()  # replicas of slow ranks with longer input than others
    replica_of: Mapping[int, int] = field(default_factory=dict)  # place in data parallelism
    undecided: tuple[str, ...] = ()  # abstentions on stages and links
    not_looked_for: tuple[str, ...] = ()  # causes that cannot be judged while ranks or a stage are slow

    def price(self, rank: int, excess_ns: float) -> Price | None:
        """Return the cost of a rank; None if most of its ``excess_ns`` was not replayed."""
        if self.explained_ns.get(rank, 0.0) < _MOST_OF_EXCESS * excess_ns:
            return None
        return self.of_rank.get(rank)


def price(steps: ReplayedSamples, slow: Sequence[frozenset[int]], normal: Int64, past: JobPast | None = None) -> Priced:
    """Replay the steps without slow ranks, and find causes other than ranks.

    ``slow`` are sets of ranks that are named together, ``normal`` ranks with normal work. Stages and links that are
    healthy now are added to ``past``.
    """
    work, replay, _ = steps
    past = past or JobPast()
    found = find_slow_ranks(work, {})
    if slow and len(normal):
        compared = replace(found.work, peers=work.peers.among(normal))
        found = replace(found, work=compared, microbatches=compare_microbatches(compared))
    everybody = frozenset[int]().union(*slow)
    inputs = tuple(longer_inputs(found.microbatches, everybody))
    has_long_ones = frozenset(rank for one in inputs if one.microbatches for rank in one.ranks)
    pauses = [cause for cause in PAUSES if cause != CHECKPOINT]

    def as_normal(ranks: frozenset[int]) -> Scenario:
        causes = {rank: (MICROBATCHES if rank in has_long_ones else WORK, *pauses) for rank in ranks}
        return Scenario(work=(normal_speed(found, causes),)) if ranks else MEASURED

    mended, others, undecided, healthy = of_no_single_rank(
        work, replay, everybody, as_normal(everybody), LIVE, usual=past.usual
    )
    past.add(healthy)

    @cache
    def saved_ns(ranks: frozenset[int]) -> Int64:
        return replay.saved_ns(as_normal(ranks) + others)

    def cost_ns(ranks: frozenset[int], of: frozenset[int]) -> float:
        """Return the cost of ``ranks`` with the rest of ``of`` mended as well."""
        return cost_of(work, saved_ns(of) - saved_ns(of - ranks)).ns

    of_rank: dict[int, Price] = {}
    for one in slow:
        set_ns = cost_ns(one, everybody)
        for rank in one:
            alone = frozenset({rank})
            each = (cost_ns(alone, everybody), cost_ns(alone, alone)) if len(everybody) <= MOST_SHARES else (None, None)
            of_rank[rank] = Price(set_ns, *each)
    findings = [each.finding for each in mended]
    has_stage = any(finding.cause == _STAGE for finding in findings)
    return Priced(
        of_rank=of_rank,
        of_no_rank=ranked(findings),
        explained_ns=_explained_ns(found),
        phases={rank: slow_phase(found.work, one) for one in slow for rank in one},
        phase_texts={rank: format_phases(found.work, rank) for rank in everybody if len(everybody) <= MOST_SHARES},
        launches={rank: launches_of(found.work, rank, everybody) for rank in everybody},
        late=frozenset(rank for rank in everybody if launches_late(found.work, rank)),
        longer_inputs=inputs,
        replica_of=replica_of_ranks(work.run),
        undecided=tuple(finding.evidence for finding in undecided),
        not_looked_for=_UNKNOWN_THEN if slow or has_stage else (),
    )


def lost_in_samples(steps: ReplayedSamples, slow: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return what the steps lose beside what is ``slow``, by cause."""
    replayed = steps.replay.replay(scenarios_of_lost_time(steps.statistics))
    return tuple(lost_findings(lost_time(steps.statistics, replayed, slow), slow))


def _explained_ns(found: SlowRanks) -> dict[int, float]:
    peers = found.work.peers
    beyond = np.bincount(peers.rank, peers.excess_ns, minlength=int(peers.rank.max(initial=-1)) + 1)
    return {
        rank: float(beyond[rank]) + sum(max(own[rank], 0.0) for own in found.pause_excess_ns.values())
        for rank in found.work.ranks.tolist()
    }
