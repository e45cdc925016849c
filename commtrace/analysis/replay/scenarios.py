"""Replay the steps of a run with other durations: normal ranks, ideal work, no transfers.

A rule looks only at the work or transfer that it changes, so it applies to any steps of the run.

>>> Replay.of(observed, statistics).saved_ns(Scenario(work=(stage_2_as_the_others,)))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from commtrace.analysis.keys import find_rows
from commtrace.analysis.replay.observed_steps import (
    Integers,
    ModelTransfers,
    ModelWork,
    ObservedSteps,
    Places,
)
from commtrace.analysis.replay.segments import BETWEEN
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.statistics import Float64
from commtrace.errors import CommtraceError
from commtrace.findings.causes import PAUSES
from commtrace.trace.spans import Bool, Int64


class Addable(Protocol):
    """What is read off some steps; the sum of several is that of all of these steps."""

    def __add__(self, other: Any, /) -> Any: ...


Reading = TypeVar("Reading", bound=Addable)


@dataclass(frozen=True, slots=True)
class LongMicrobatches:
    """Microbatches that take longer than on other ranks."""

    rank: Int64
    step: Int64  # index
    chunk: Int64
    microbatch: Int64
    normal_ns: Float64  # of each entry; NaN if unknown

    def longer_ns(self, work: ModelWork) -> Float64:
        """Return the excess of each work over normal; 0 outside of these microbatches."""
        measured_ns = work.work_ns
        places = np.broadcast_arrays(work.rank, work.step, work.chunk, work.microbatch, measured_ns)[:-1]
        known = self.rank, self.step, self.chunk, self.microbatch
        row = find_rows(known, [column.reshape(-1) for column in places]).reshape(measured_ns.shape)
        normal = np.nan_to_num(self.normal_ns[work.entry])
        is_compared = (row >= 0) & work.is_in_phase & (normal > 0)
        return np.where(is_compared, np.maximum(measured_ns - normal, 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class NormalSpeed:
    """Ranks work at normal speed in some steps."""

    steps: Bool
    is_mended: Bool  # shape (ranks, steps)
    ratio: Float64  # normal by measured work, of each entry
    pause_ratio: Mapping[str, Float64]  # by cause, the same for the pauses of each rank
    seldom: Float64  # share by which the work of a rare long step is shortened, shape (ranks, steps)
    microbatches: LongMicrobatches | None  # that are shortened

    def apply(self, work: ModelWork, ns: Int64) -> Int64:
        """Return the durations of work: ``ns``, which are without this rule, less what it shortens of the measured."""
        rank_and_step, measured_ns = (work.row, work.step), work.work_ns
        durations = np.where(self.is_mended[rank_and_step], measured_ns * self.ratio[work.entry], measured_ns)
        for cause in PAUSES:
            durations += work.pause_ns(cause) * self.pause_ratio[cause][work.row]
        durations -= measured_ns * self.seldom[rank_and_step]
        if self.microbatches is not None:
            durations -= self.microbatches.longer_ns(work)
        return ns + np.where(self.steps[work.step], np.rint(durations).astype(np.int64) - work.total_ns, 0)


@dataclass(frozen=True, slots=True)
class NormalStages:
    """Forwards and backwards of stages take a share of their time."""

    ratio: Float64  # that share, shape (stages, steps)

    def apply(self, work: ModelWork, ns: Int64) -> Int64:
        ratio = self.ratio[np.maximum(work.stage, 0), work.step]
        return np.rint(ns * np.where(work.is_in_phase, ratio, 1.0)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class EqualMicrobatches:
    """Forwards and backwards of all microbatches take the mean time of the same work."""

    mean_ns: Int64  # of each entry

    def apply(self, work: ModelWork, ns: Int64) -> Int64:
        return np.where(work.is_in_phase, self.mean_ns[work.entry], ns)


@dataclass(frozen=True, slots=True)
class WithoutPauses:
    """Pauses of these causes take no time."""

    causes: tuple[str, ...]

    def apply(self, work: ModelWork, ns: Int64) -> Int64:
        for cause in self.causes:
            ns = ns - work.pause_ns(cause)
        return ns


@dataclass(frozen=True, slots=True)
class PromptLaunches:
    """Work in which devices waited for their hosts takes no time: a lower bound of what it takes."""

    only_between: bool  # phases, where nothing else was recorded

    def apply(self, work: ModelWork, ns: Int64) -> Int64:
        waited = np.maximum(work.launch_bound_ns, 0)
        if self.only_between:
            waited = np.where(work.kind >= BETWEEN, waited, 0)
        return np.maximum(ns - waited, 0)


@dataclass(frozen=True, slots=True)
class IdealWork:
    """Some work takes its ideal time."""

    ns: Int64  # of each entry
    is_ideal: Bool  # of each entry; segments without an entry keep their durations

    def apply(self, work: ModelWork, ns: Int64) -> Int64:
        return np.where(np.append(self.is_ideal, False)[work.entry], np.append(self.ns, 0)[work.entry], ns)


@dataclass(frozen=True, slots=True)
class NormalLinks:
    """Transfers are as fast as normal in some steps."""

    steps: Bool
    ratio: Float64  # normal by measured time, of each row of traffic
    normal_ns: Float64  # transfers that take no longer keep their durations

    def apply(self, transfers: ModelTransfers, ns: Float64) -> Float64:
        ratio, normal = np.append(self.ratio, 1.0)[transfers.row], np.append(self.normal_ns, 0.0)[transfers.row]
        mended = np.maximum(ns * ratio, np.minimum(ns, normal))
        return np.where(self.steps[transfers.step], mended, ns)


@dataclass(frozen=True, slots=True)
class IdealTransfers:
    """Some transfers take their ideal time."""

    ns: Int64  # of each kind
    is_ideal: Bool  # shape (kinds, ranks); transfers without a kind keep their durations

    def apply(self, transfers: ModelTransfers, ns: Float64) -> Float64:
        kind = transfers.kind
        if not len(self.ns):
            return ns
        is_ideal = (kind >= 0) & self.is_ideal[kind, transfers.rank]
        return np.where(is_ideal, self.ns[kind], ns)


@dataclass(frozen=True, slots=True)
class NoTransfers:
    """Communication takes no time once all participants have arrived."""

    def apply(self, transfers: ModelTransfers, ns: Float64) -> Float64:
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
    between_ns: int  # of these and of those that were replayed: from the end of the step before, mean over the ranks
    replayed_ns: Int64  # of each scenario
    work_ns: Int64  # work and pauses of all ranks, of each scenario

    def plus(self, other: ReplayedSums) -> ReplayedSums:
        return ReplayedSums(
            self.num_steps + other.num_steps,
            self.measured_ns + other.measured_ns,
            self.between_ns + other.between_ns,
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


_WEIGHTS_AT_ONCE: Final = 1_000_000
"""Of so many scenarios as fit, all are replayed at once; enough to hide numpy's overhead."""


def replay_steps(observed: ObservedSteps, places: Places, scenarios: Sequence[Scenario]) -> ReplayedSteps:
    """Replay all steps in each scenario; ``places`` are of the statistics that the scenarios were made from."""
    index, shape = observed.index_in(places), (len(scenarios), len(observed.steps))
    replayed, worked = np.zeros((2, *shape), np.int64)
    for part in observed.parts:
        at_once = max(1, _WEIGHTS_AT_ONCE // max(part.num_weights, 1))
        work, transfers = part.work(index), part.transfers(index)
        for first in range(0, len(scenarios), at_once):
            weights = []
            for number, scenario in enumerate(scenarios[first : first + at_once], first):
                work_ns, transfer_ns = durations(scenario, work, transfers)
                before = part.worked_before(work_ns)
                weights.append(part.weights(before, transfer_ns, fixed=not scenario.without_launches))
                worked[number, part.steps] = part.sums_of_work(work.total_ns if work_ns is None else work_ns)
            times = part.levels.times(np.concatenate(weights, axis=1) if len(weights) > 1 else weights[0])
            for number, step_ns in enumerate(np.split(part.step_ns(times), len(weights), axis=1), first):
                replayed[number, part.steps] = step_ns
    drawn = np.isin(observed.steps, places.steps)
    measured_ns, between_ns = int(observed.measured_ns.sum()), observed.between_ns
    sums = ReplayedSums(shape[1], measured_ns, between_ns, replayed.sum(axis=1), worked.sum(axis=1))
    return ReplayedSteps(observed.steps[drawn], replayed[:, drawn], sums)


def durations(scenario: Scenario, work: ModelWork, transfers: ModelTransfers) -> tuple[Int64 | None, Integers]:
    """Return the durations of work, None if they are as measured, and of transfers."""
    work_ns: Int64 | None = None
    if scenario.work:
        work_ns = work.total_ns
        for rule in scenario.work:
            work_ns = rule.apply(work, work_ns)
    if not scenario.transfers:
        return work_ns, transfers.ns
    ns = transfers.ns.astype(np.float64)
    for transfer_rule in scenario.transfers:
        ns = transfer_rule.apply(transfers, ns)
    return work_ns, np.rint(ns).astype(np.int64)


def check_steps(statistics: StepStatistics, replayed: ReplayedSteps) -> None:
    """Raise CommtraceError if files were deleted since the statistics were made."""
    if not np.array_equal(statistics.steps, replayed.steps):
        raise CommtraceError("Steps were deleted while they were analysed, to keep to the budget: try again.")


class ModelOfRun(Protocol):
    """Gives what is read off the models of all steps of a run, in parts that add up."""

    def __call__(self, reading: Callable[[ObservedSteps], Reading]) -> Reading: ...


class Replay:
    """Replays the steps of a run, whose models ``read`` reads, in the scenarios that its statistics suggest."""

    def __init__(self, statistics: StepStatistics, read: ModelOfRun) -> None:
        self._statistics = statistics
        self._read = read

    @classmethod
    def of(cls, observed: ObservedSteps, statistics: StepStatistics) -> Replay:
        """Return the replay of steps that are all in one model."""
        return cls(statistics, lambda reading: reading(observed))

    def replay(self, scenarios: Sequence[Scenario]) -> ReplayedSteps:
        """Replay all steps. Raise CommtraceError if files were deleted since the statistics were made."""
        places = Places.of(self._statistics)
        replayed = self._read(partial(replay_steps, places=places, scenarios=scenarios))
        check_steps(self._statistics, replayed)
        return replayed

    def steps_ns(self, scenarios: Sequence[Scenario]) -> list[Int64]:
        """Return the duration of each step of the statistics, one array per scenario."""
        asked = [scenario for scenario in scenarios if scenario != MEASURED]
        replayed_ns: list[Int64] = []
        if asked:
            replayed_ns = [*self.replay(asked).replayed_ns]
        return [self._statistics.replayed_ns if scenario == MEASURED else replayed_ns.pop(0) for scenario in scenarios]

    def saved_ns(self, scenario: Scenario, beside: Scenario = MEASURED) -> Int64:
        """Return the time that ``scenario`` saves in each step on top of ``beside``."""
        others, both = self.steps_ns([beside, beside + scenario])
        return others - both
