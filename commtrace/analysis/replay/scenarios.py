"""Replay the steps of a run with other durations: normal ranks, ideal work, no transfers.

A rule looks only at the segment or transfer that it changes, so it applies to any steps of the run.

>>> replay_of(run, program, statistics).saved_ns(Scenario(work=(stage_2_as_the_others,)))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import find_rows
from commtrace.analysis.replay.program import Program
from commtrace.analysis.replay.segments import BACKWARD, BETWEEN, FORWARD, WorkSegments, narrow
from commtrace.analysis.replay.step_statistics import (
    Entries,
    LinkTraffic,
    StepStatistics,
    TransferKind,
    TransferTable,
    WorkTable,
    pause_ns,
)
from commtrace.analysis.statistics import Float64
from commtrace.errors import CommtraceError
from commtrace.findings.causes import PAUSES
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64


class Places(NamedTuple):
    """Indices into the tables of rules, as in the statistics of the run."""

    ranks: Int64
    steps: Int64
    entries: Entries
    traffic: tuple[LinkTraffic, ...]
    kinds: tuple[TransferKind, ...]

    @classmethod
    def of(cls, statistics: StepStatistics) -> Places:
        transfers = statistics.transfers
        return cls(statistics.ranks, statistics.steps, statistics.table.entries, transfers.traffic, transfers.kinds)


class PlacedSegments(NamedTuple):
    """The segments of a program, with their ranks, steps and entries as indices into the statistics (−1: none)."""

    segments: WorkSegments
    row: Int32
    step: Int32
    entry: Int32

    @property
    def is_in_phase(self) -> Bool:
        return np.isin(self.segments.kind, (FORWARD, BACKWARD))


class PlacedTransfers(NamedTuple):
    """The transfers of a program, with traffic, kinds, ranks and steps as indices into the statistics (−1: none)."""

    row: Int32
    kind: Int32
    rank: Int32
    step: Int32
    ns: Int64


@dataclass(frozen=True, slots=True)
class LongMicrobatches:
    """Microbatches that take longer than on other ranks."""

    rank: Int64
    step: Int64  # index
    chunk: Int64
    microbatch: Int64
    normal_ns: Float64  # of each entry; NaN if unknown

    def longer_ns(self, work: PlacedSegments) -> Float64:
        """Return the excess of each segment over normal; 0 outside of these microbatches."""
        segments = work.segments
        known = self.rank, self.step, self.chunk, self.microbatch
        found = find_rows(known, (segments.rank, work.step, segments.chunk, segments.microbatch))
        normal = np.nan_to_num(self.normal_ns[work.entry])
        is_compared = (found >= 0) & work.is_in_phase & (normal > 0)
        return np.where(is_compared, np.maximum(segments.work_ns - normal, 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class NormalSpeed:
    """Ranks work at normal speed in some steps."""

    steps: Bool
    is_mended: Bool  # shape (ranks, steps)
    ratio: Float64  # normal by measured work, of each entry
    pause_ratio: Mapping[str, Float64]  # by cause, the same for the pauses of each rank
    seldom: Float64  # share by which the work of a rare long step is shortened, shape (ranks, steps)
    microbatches: LongMicrobatches | None  # that are shortened

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        """Return the durations of segments; ``ns`` is without this rule."""
        segments, place = work.segments, (work.row, work.step)
        durations = np.where(self.is_mended[place], segments.work_ns * self.ratio[work.entry], segments.work_ns)
        for cause in PAUSES:
            durations += pause_ns(segments, cause) * self.pause_ratio[cause][work.row]
        durations -= segments.work_ns * self.seldom[place]
        if self.microbatches is not None:
            durations -= self.microbatches.longer_ns(work)
        return np.where(self.steps[work.step], np.rint(durations).astype(np.int64), ns)


@dataclass(frozen=True, slots=True)
class NormalStages:
    """Forwards and backwards of stages take a share of their time."""

    ratio: Float64  # that share, shape (stages, steps)

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        ratio = self.ratio[np.maximum(work.segments.stage, 0), work.step]
        return np.rint(ns * np.where(work.is_in_phase, ratio, 1.0)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class EqualMicrobatches:
    """Forwards and backwards of all microbatches take the mean time of the same work."""

    mean_ns: Int64  # of each entry

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        return np.where(work.is_in_phase, self.mean_ns[work.entry], ns)


@dataclass(frozen=True, slots=True)
class WithoutPauses:
    """Pauses of these causes take no time."""

    causes: tuple[str, ...]

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        for cause in self.causes:
            ns = ns - pause_ns(work.segments, cause)
        return ns


@dataclass(frozen=True, slots=True)
class PromptLaunches:
    """Work in which devices waited for their hosts takes no time: a lower bound of what it takes."""

    only_between: bool  # phases, where nothing else was recorded

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        waited = np.maximum(work.segments.launch_bound_ns, 0)
        if self.only_between:
            waited = np.where(work.segments.kind >= BETWEEN, waited, 0)
        return np.maximum(ns - waited, 0)


@dataclass(frozen=True, slots=True)
class IdealWork:
    """Some work takes its ideal time."""

    ns: Int64  # of each entry
    is_ideal: Bool  # of each entry; segments without an entry keep their durations

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        return np.where(np.append(self.is_ideal, False)[work.entry], np.append(self.ns, 0)[work.entry], ns)


@dataclass(frozen=True, slots=True)
class NormalLinks:
    """Transfers are as fast as normal in some steps."""

    steps: Bool
    ratio: Float64  # normal by measured time, of each row of traffic
    normal_ns: Float64  # transfers that take no longer keep their durations

    def apply(self, transfers: PlacedTransfers, ns: Float64) -> Float64:
        ratio, normal = np.append(self.ratio, 1.0)[transfers.row], np.append(self.normal_ns, 0.0)[transfers.row]
        mended = np.maximum(ns * ratio, np.minimum(ns, normal))
        return np.where(self.steps[transfers.step], mended, ns)


@dataclass(frozen=True, slots=True)
class IdealTransfers:
    """Some transfers take their ideal time."""

    ns: Int64  # of each kind
    is_ideal: Bool  # shape (kinds, ranks); transfers without a kind keep their durations

    def apply(self, transfers: PlacedTransfers, ns: Float64) -> Float64:
        kind = transfers.kind
        if not len(self.ns):
            return ns
        is_ideal = (kind >= 0) & self.is_ideal[kind, transfers.rank]
        return np.where(is_ideal, self.ns[kind], ns)


@dataclass(frozen=True, slots=True)
class NoTransfers:
    """Communication takes no time once all participants have arrived."""

    def apply(self, transfers: PlacedTransfers, ns: Float64) -> Float64:
        return np.zeros_like(ns)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Rules that are applied in turn to the measured durations."""

    work: tuple[NormalSpeed | NormalStages | EqualMicrobatches | WithoutPauses | PromptLaunches | IdealWork, ...] = ()
    transfers: tuple[NormalLinks | IdealTransfers | NoTransfers, ...] = ()
    without_launches: bool = False  # only work, pauses and transfers take time

    def __add__(self, other: Scenario) -> Scenario:
        return Scenario(
            self.work + other.work,
            self.transfers + other.transfers,
            self.without_launches or other.without_launches,
        )


MEASURED = Scenario()


class ReplayedSums(NamedTuple):
    """Sums over steps in several scenarios."""

    num_steps: int
    measured_ns: int  # mean over the ranks
    replayed_ns: Int64  # of each scenario
    work_ns: Int64  # work and pauses of all ranks, of each scenario

    def plus(self, other: ReplayedSums) -> ReplayedSums:
        return ReplayedSums(
            self.num_steps + other.num_steps,
            self.measured_ns + other.measured_ns,
            self.replayed_ns + other.replayed_ns,
            self.work_ns + other.work_ns,
        )


@dataclass(frozen=True, slots=True)
class ReplayedSteps:
    """Steps in several scenarios."""

    steps: Int64  # numbers of those in the statistics, ascending
    replayed_ns: Int64  # shape (scenarios, steps)
    sums: ReplayedSums  # with steps that are not in the statistics

    def __add__(self, later: ReplayedSteps) -> ReplayedSteps:
        return ReplayedSteps(
            np.concatenate([self.steps, later.steps]),
            np.hstack([self.replayed_ns, later.replayed_ns]),
            self.sums.plus(later.sums),
        )


@dataclass(frozen=True, slots=True)
class PlacedProgram:
    """Steps that can be replayed in any scenario of a run."""

    program: Program
    segments: PlacedSegments
    transfers: PlacedTransfers
    drawn: Bool  # of each step: it is in the statistics

    @classmethod
    def of(
        cls,
        run: Run,
        program: Program,
        places: Places,
        work: WorkTable | None = None,
        traffic: TransferTable | None = None,
    ) -> PlacedProgram:
        """Locate a program read from ``run`` in the statistics of the whole run.

        ``work`` and ``traffic`` are the tables of the program itself, if they are known.
        """
        segments, transfers = program.segments, program.transfers
        index = narrow(np.minimum(np.searchsorted(places.steps, program.steps), len(places.steps) - 1))
        work = WorkTable.of(segments) if work is None else work
        traffic = TransferTable.of(run, transfers) if traffic is None else traffic
        return cls(
            program,
            PlacedSegments(
                segments,
                narrow(np.searchsorted(places.ranks, segments.rank)),
                index[segments.step],
                places.entries.find(work),
            ),
            PlacedTransfers(
                _numbers_in(places.traffic, traffic.traffic)[traffic.row],
                _numbers_in(places.kinds, traffic.kinds)[traffic.kind],
                narrow(np.searchsorted(places.ranks, transfers.rank)),
                index[transfers.step],
                transfers.ns,
            ),
            np.isin(program.steps, places.steps),
        )

    def replay(self, scenarios: Sequence[Scenario]) -> ReplayedSteps:
        """Replay all steps in each scenario."""
        program, segments = self.program, self.program.segments
        bare = replace(program, edges=replace(program.edges, fixed_ns=np.zeros_like(program.edges.fixed_ns)))
        steps, (replayed, worked) = len(program.steps), np.zeros((2, len(scenarios), len(program.steps)), np.int64)
        for at, scenario in enumerate(scenarios):
            segment_ns, transfer_ns = self._durations(scenario)
            replayed[at] = (bare if scenario.without_launches else program).step_times(segment_ns, transfer_ns)
            worked[at] = np.bincount(
                segments.step, segments.total_ns if segment_ns is None else segment_ns, minlength=steps
            )
        measured_ns = int(program.measured_step_times().sum())
        sums = ReplayedSums(steps, measured_ns, replayed.sum(axis=1), worked.sum(axis=1))
        return ReplayedSteps(program.steps[self.drawn], replayed[:, self.drawn], sums)

    def _durations(self, scenario: Scenario) -> tuple[Int64 | None, Int64 | None]:
        """Return the durations of segments and of transfers; None if they are as measured."""
        segment_ns, transfer_ns = None, None
        if scenario.work:
            segment_ns = self.program.segments.total_ns
            for rule in scenario.work:
                segment_ns = rule.apply(self.segments, segment_ns)
        if scenario.transfers:
            ns = self.transfers.ns.astype(np.float64)
            for transfer_rule in scenario.transfers:
                ns = transfer_rule.apply(self.transfers, ns)
            transfer_ns = np.rint(ns).astype(np.int64)
        return segment_ns, transfer_ns


def check_steps(statistics: StepStatistics, replayed: ReplayedSteps) -> None:
    """Raise CommtraceError if files were deleted since the statistics were made."""
    if not np.array_equal(statistics.steps, replayed.steps):
        raise CommtraceError("Steps were deleted while they were analysed, to keep to the budget: try again.")


class Replay:
    """Replays the steps of a run with ``replayed``, which returns all of its steps in several scenarios."""

    def __init__(self, statistics: StepStatistics, replayed: Callable[[Sequence[Scenario]], ReplayedSteps]) -> None:
        self._statistics = statistics
        self._replayed = replayed

    def replay(self, scenarios: Sequence[Scenario]) -> ReplayedSteps:
        """Replay all steps. Raise CommtraceError if files were deleted since the statistics were made."""
        replayed = self._replayed(scenarios)
        check_steps(self._statistics, replayed)
        return replayed

    def steps_ns(self, scenarios: Sequence[Scenario]) -> list[Int64]:
        """Return the duration of each step of the statistics, one array per scenario."""
        asked = [one for one in scenarios if one != MEASURED]
        found: list[Int64] = []
        if asked:
            found = [*self.replay(asked).replayed_ns]
        return [self._statistics.replayed_ns if one == MEASURED else found.pop(0) for one in scenarios]

    def saved_ns(self, scenario: Scenario, beside: Scenario = MEASURED) -> Int64:
        """Return the time that ``scenario`` saves in each step on top of ``beside``."""
        others, both = self.steps_ns([beside, beside + scenario])
        return others - both


def replay_of(run: Run, program: Program, statistics: StepStatistics) -> Replay:
    """Return the replay of a program that was read from ``run``."""
    is_of_all_steps = len(statistics.steps) == len(program.steps)
    work = statistics.table if is_of_all_steps else None
    traffic = statistics.transfers if is_of_all_steps else None
    return Replay(statistics, PlacedProgram.of(run, program, Places.of(statistics), work, traffic).replay)


def _numbers_in(known: tuple[NamedTuple, ...], keys: tuple[NamedTuple, ...]) -> Int32:
    """Return the index of each key among the known, −1 for none, and −1 at the end for index −1."""
    number = {one: at for at, one in enumerate(known)}
    return np.array([*(number.get(one, -1) for one in keys), -1], np.int32)
