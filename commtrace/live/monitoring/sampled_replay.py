"""Replays sampled steps while the job runs: what slow ranks cost, and what is slow although no rank works too long.

The same functions as for a recording, on the newest few steps (:mod:`commtrace.live.monitoring.sampled_steps`).

>>> replay = SampledReplay(world_size=8)                        # doctest: +SKIP
>>> steps = replay.newest(reports, now)                         # doctest: +SKIP
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
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.program import Program, build_program
from commtrace.analysis.steps.window import Window
from commtrace.analysis.stragglers.costs import cost_of
from commtrace.analysis.stragglers.evidence import phases_in_words, slow_phase
from commtrace.analysis.stragglers.limits import LIVE, Thresholds
from commtrace.analysis.stragglers.microbatches import (
    LongerInput,
    compare_microbatches,
    longer_inputs,
    replica_of_ranks,
)
from commtrace.analysis.stragglers.scenarios import MEASURED, Replay, Scenario
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
from commtrace.analysis.stragglers.verdict import Verdict
from commtrace.analysis.stragglers.work_statistics import CHECKPOINT, PAUSES, StepStatistics, WorkStatistics
from commtrace.live.gil import GilYield
from commtrace.live.monitoring.past import JobPast
from commtrace.live.monitoring.sampled_steps import SampledSteps, SampleError
from commtrace.live.monitoring.window import WindowReport
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

_logger = logging.getLogger("commtrace")

_MOST_OF_A_CORE: Final = 0.02
"""In rank 0 the replay takes the interpreter from training: of large jobs not every window is replayed."""


_STAGE: Final = "stage_imbalance"
_UNKNOWN_THEN: Final = ("communication", "sequence_length_imbalance")
"""While ranks or a stage are slow, links that touch them are not judged, and sequences not looked at."""

_MOST_OF_EXCESS: Final = 0.5
"""Where the replay compares less of what a rank works too long, it does not tell the cost: a gap that only this rank
has is in no work that its peers do as well, and single steps do not move a median."""


class ReplayedSteps(NamedTuple):
    """The newest sampled steps: their statistics, and what replays them."""

    work: WorkStatistics
    replay: Replay

    @classmethod
    def of(cls, run: Run, program: Program) -> ReplayedSteps:
        work = WorkStatistics.of(run, StepStatistics.of(run, program), Thresholds())
        return cls(work, Replay(run, program, work))


class SampledReplay:
    """Makes the sampled steps of all ranks ready to be replayed. What fails here does not keep ranks from being named.

    Args:
        world_size: ranks of the job.
        thread_seconds: CPU time of the calling thread.
    """

    def __init__(self, world_size: int, thread_seconds: Callable[[], float] = time.thread_time) -> None:
        self._steps = SampledSteps(world_size)
        self._thread_seconds = thread_seconds
        self._next_at = 0.0
        self._is_off = False
        self._is_refused = False

    @property
    def windows(self) -> int:
        """In how many windows those of the newest steps were that are new."""
        return self._steps.windows

    def newest(self, reports: Sequence[WindowReport], now: float) -> ReplayedSteps | None:
        """Take what ranks have sampled, and return the newest steps; None where that cannot be had now.

        Args:
            reports: newest windows.
            now: epoch seconds.
        """
        if self._is_off:
            return None
        begin = self._thread_seconds()
        try:
            self._take(reports)
            steps = _replayed(self._steps) if now >= self._next_at else None
        except Exception:
            self._is_off = True
            _logger.warning(
                "commtrace: the monitor replays no steps any more; it still names slow ranks", exc_info=True
            )
            return None
        if steps is not None:
            self._next_at = now + (self._thread_seconds() - begin) / _MOST_OF_A_CORE
        return steps

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
                        "commtrace: the monitor cannot use the steps that rank %d tells: %s", report.rank, error
                    )


def _replayed(steps: SampledSteps) -> ReplayedSteps | None:
    run = steps.newest_run()
    if run is None:
        return None
    numbers = np.unique(np.concatenate([trace.spans.step for trace in run.ranks.values()]))
    matched = match_run(Window(run, run), f"{max(int(numbers[0]), 0)}:{int(numbers[-1]) + 1}")
    if not matched.matches.clocks_agree or not matched.steps.used:
        return None
    try:
        program = build_program(matched.run, matched.matches)
    except ReplayError:
        return None  # what a rank told of a step is not whole
    replayed = ReplayedSteps.of(matched.run, program)
    work = replayed.work
    return replayed if work.noise_is_known and work.replay_error <= work.thresholds.replay_error else None


class Price(NamedTuple):
    """What a slow rank costs, ns per step.

    Attributes:
        set_ns: its set, all others that are slow mended as well.
        share_ns, alone_ns: it, see :class:`commtrace.analysis.stragglers.verdict.Member`; None where there are too many
            slow ranks to try them one by one.
    """

    set_ns: float
    share_ns: float | None = None
    alone_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Priced:
    """What replaying told.

    Attributes:
        of_rank: of each slow rank what it costs.
        verdicts: on stages, sequences and links, dearest first.
        explained_ns: of each rank, what it works beyond what is normal in work that its peers do as well.
        phases: of each slow rank the one phase in which its set is slow; empty where it is not one.
        phases_in_words: of each slow rank the phases that take longer, in numbers, if there are few slow ranks.
        late: slow ranks most of whose excess lies before their phases.
        longer_inputs: the replicas of slow ranks whose input is longer than that of others.
        replica_of: by rank, its place in data parallelism, as far as they tell it.
        undecided: sentences on stages and links of which it cannot be told.
        not_looked_for: causes of such verdicts that cannot be told while ranks or a stage are slow.
    """

    of_rank: Mapping[int, Price]
    verdicts: Sequence[Verdict]
    explained_ns: Mapping[int, float]
    phases: Mapping[int, str]
    phases_in_words: Mapping[int, str]
    late: frozenset[int]
    longer_inputs: tuple[LongerInput, ...] = ()
    replica_of: Mapping[int, int] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()
    not_looked_for: tuple[str, ...] = ()

    def price(self, rank: int, excess_ns: float) -> Price | None:
        """What this rank costs; None where it was not replayed, or most of the excess was not.

        Args:
            rank: a slow one.
            excess_ns: by which it works longer than is normal.
        """
        if self.explained_ns.get(rank, 0.0) < _MOST_OF_EXCESS * excess_ns:
            return None
        return self.of_rank.get(rank)


def price(steps: ReplayedSteps, slow: Sequence[frozenset[int]], normal: Int64, past: JobPast | None = None) -> Priced:
    """Replay the steps without slow ranks, and look for what no rank is slow for.

    Args:
        steps: to replay.
        slow: ranks that are named together.
        normal: ranks whose work is normal.
        past: what stages and links did before; takes what those do that are well in these steps.
    """
    work, replay = steps
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

    verdicts, others, undecided, well = of_no_single_rank(
        work, replay, everybody, as_normal(everybody), LIVE, usual=past.usual
    )
    past.add(well)

    @cache
    def saved_ns(ranks: frozenset[int]) -> Int64:
        """What the steps save without these ranks, and without what else is slow."""
        return replay.saved_ns(as_normal(ranks) + others)

    def cost_ns(ranks: frozenset[int], of: frozenset[int]) -> float:
        """What these ranks cost if all others of some are mended as well."""
        return cost_of(work, saved_ns(of) - saved_ns(of - ranks)).ms * 1e6

    of_rank: dict[int, Price] = {}
    for one in slow:
        set_ns = cost_ns(one, everybody)
        for rank in one:
            alone = frozenset({rank})
            each = (cost_ns(alone, everybody), cost_ns(alone, alone)) if len(everybody) <= MOST_SHARES else (None, None)
            of_rank[rank] = Price(set_ns, *each)
    has_stage = any(verdict.cause == _STAGE for verdict in verdicts)
    return Priced(
        of_rank,
        sorted(verdicts, key=lambda verdict: -verdict.cost_ms_per_step),
        _explained_ns(found),
        {rank: slow_phase(found.work, one) for one in slow for rank in one},
        {rank: phases_in_words(found.work, rank) for rank in everybody if len(everybody) <= MOST_SHARES},
        frozenset(rank for rank in everybody if launches_late(found.work, rank)),
        inputs,
        replica_of_ranks(work.run),
        undecided,
        _UNKNOWN_THEN if slow or has_stage else (),
    )


def _explained_ns(found: SlowRanks) -> dict[int, float]:
    peers = found.work.peers
    beyond = np.bincount(peers.rank, peers.excess_ns, minlength=int(peers.rank.max(initial=-1)) + 1)
    return {
        rank: float(beyond[rank]) + sum(max(own[rank], 0.0) for own in found.pause_excess_ns.values())
        for rank in found.work.ranks.tolist()
    }
