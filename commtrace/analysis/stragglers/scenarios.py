"""What the steps of a run would take if slow ranks, stages or links were as fast as is normal.

A scenario is a few rules for durations, each a small table by rank, kind of work, step or link. A rule looks only at
the piece of work that it is applied to, so it can be sent anywhere and replayed on any steps of the run.

>>> replay = Replay(run, program, work)                         # doctest: +SKIP
>>> replay.saved_ns(Scenario(work=(stage_2_as_the_others,)))    # doctest: +SKIP
array([41205118, 40877342, 41034876])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import find_rows
from commtrace.analysis.replay.program import Program
from commtrace.analysis.replay.segments import BACKWARD, FORWARD, Segments
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.transfers import Traffic, traffic_of
from commtrace.analysis.stragglers.work_statistics import PAUSES, WorkStatistics, pause_ns
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64


class PlacedSegments(NamedTuple):
    """The segments of a program, with the indices of their ranks, steps and entries in the statistics of the run."""

    segments: Segments
    row: Int64
    step: Int64
    entry: Int64

    @property
    def is_in_phase(self) -> Bool:
        return np.isin(self.segments.kind, (FORWARD, BACKWARD))


class PlacedTransfers(NamedTuple):
    """The measured transfers of a program, with the indices of their traffic (−1: none) and steps in the statistics."""

    row: Int64
    step: Int64
    ns: Int64


@dataclass(frozen=True, slots=True)
class LongMicrobatches:
    """Microbatches that take longer than on other ranks.

    Attributes:
        rank, step, chunk, microbatch: of each; the step is an index.
        normal_ns: of each entry, what is normal; NaN where that is not known.
    """

    rank: Int64
    step: Int64
    chunk: Int64
    microbatch: Int64
    normal_ns: Float64

    def longer_ns(self, work: PlacedSegments) -> Float64:
        """Return by how much each segment is longer than is normal; 0 outside of these microbatches."""
        segments = work.segments
        known = self.rank, self.step, self.chunk, self.microbatch
        found = find_rows(known, (segments.rank, work.step, segments.chunk, segments.microbatch))
        normal = np.nan_to_num(self.normal_ns[work.entry])
        is_compared = (found >= 0) & work.is_in_phase & (normal > 0)
        return np.where(is_compared, np.maximum(segments.work_ns - normal, 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class NormalSpeed:
    """In some steps, ranks work as long as is normal.

    Attributes:
        is_mended: whose work, shape (ranks, steps).
        ratio: of each entry, what its work takes then, as a share of what it takes.
        pause_ratio: by cause, the same for the pauses of each rank.
        seldom: share of its work by which a rare long step is shortened, shape (ranks, steps).
        microbatches: that are shortened.
    """

    steps: Bool
    is_mended: Bool
    ratio: Float64
    pause_ratio: Mapping[str, Float64]
    seldom: Float64
    microbatches: LongMicrobatches | None

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        """Return the durations of segments, which without this rule last so long."""
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
    """Forwards and backwards of stages take a share of what they take.

    Attributes:
        ratio: that share, shape (stages, steps).
    """

    ratio: Float64

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        ratio = self.ratio[np.maximum(work.segments.stage, 0), work.step]
        return np.rint(ns * np.where(work.is_in_phase, ratio, 1.0)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class EqualMicrobatches:
    """Forwards and backwards of all microbatches take as long as the mean of those that are the same work.

    Attributes:
        mean_ns: of each entry.
    """

    mean_ns: Int64

    def apply(self, work: PlacedSegments, ns: Int64) -> Int64:
        return np.where(work.is_in_phase, self.mean_ns[work.entry], ns)


@dataclass(frozen=True, slots=True)
class NormalLinks:
    """In some steps, transfers are as fast as is normal.

    Attributes:
        ratio: of each row of traffic, what its transfers take then, as a share of what they take.
        normal_ns: what takes no longer stays as it is.
    """

    steps: Bool
    ratio: Float64
    normal_ns: Float64

    def apply(self, transfers: PlacedTransfers, ns: Float64) -> Float64:
        ratio, normal = np.append(self.ratio, 1.0)[transfers.row], np.append(self.normal_ns, 0.0)[transfers.row]
        mended = np.maximum(ns * ratio, np.minimum(ns, normal))
        return np.where(self.steps[transfers.step], mended, ns)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Rules that are applied one after the other to what was measured.

    Attributes:
        work: for work and pauses.
        transfers: for transfers.
    """

    work: tuple[NormalSpeed | NormalStages | EqualMicrobatches, ...] = ()
    transfers: tuple[NormalLinks, ...] = ()

    def __add__(self, other: Scenario) -> Scenario:
        return Scenario(self.work + other.work, self.transfers + other.transfers)


MEASURED = Scenario()


class Replay:
    """Replays some steps of a run."""

    def __init__(self, run: Run, program: Program, work: WorkStatistics) -> None:
        segments, transfers = program.segments, program.transfers
        index = np.searchsorted(work.of_steps.steps, program.steps)
        self._program = program
        self._segments = PlacedSegments(
            segments,
            np.searchsorted(work.ranks, segments.rank),
            index[segments.step],
            work.entries.of_segments(segments),
        )
        row = _numbers_in(work.of_steps.transfers.traffic, *traffic_of(run, transfers))
        self._transfers = PlacedTransfers(row, index[transfers.step], transfers.ns)

    def step_ns(self, scenario: Scenario = MEASURED) -> Int64:
        """Return how long each step of the program takes then."""
        segment_ns, transfer_ns = None, None
        if scenario.work:
            segment_ns = self._program.segments.total_ns
            for rule in scenario.work:
                segment_ns = rule.apply(self._segments, segment_ns)
        if scenario.transfers:
            ns = self._transfers.ns.astype(np.float64)
            for link_rule in scenario.transfers:
                ns = link_rule.apply(self._transfers, ns)
            transfer_ns = np.rint(ns).astype(np.int64)
        return self._program.step_times(segment_ns, transfer_ns)

    def saved_ns(self, scenario: Scenario, beside: Scenario = MEASURED) -> Int64:
        """Return what each step would save by these rules, where others hold anyway."""
        return self.step_ns(beside) - self.step_ns(beside + scenario)


def _numbers_in(known: tuple[Traffic, ...], traffic: tuple[Traffic, ...], row: Int64) -> Int64:
    """Return the rows with the numbers that their traffic has among the known; −1 for none."""
    number = {one: at for at, one in enumerate(known)}
    return np.array([*(number.get(one, -1) for one in traffic), -1], np.int64)[row]
