"""The cost of recording, from alternating runs with and without commtrace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.trace.json_values import JsonObject, fields_to_json

WARM_UP_STEPS: Final = 3
"""First steps that do not count, in runs of more than twice as many."""
_RESAMPLES: Final = 10_000
_CONFIDENCE: Final = (2.5, 97.5)

OPTIMIZER: Final = "optimizer"
WALL: Final = "wall"


class Stamp(NamedTuple):
    """The end of a step of an optimizer."""

    optimizer: int
    wall_ns: int
    cpu_ns: int


@dataclass(frozen=True, slots=True)
class RankStamps:
    """The ends of steps that one process reported at its end."""

    rank: int
    max_rss_bytes: int
    stamps: Sequence[Stamp]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the command."""

    wall_ns: int  # with all processes and start-up
    cpu_ns: int  # likewise
    ranks: Sequence[RankStamps]  # empty if no training process ended cleanly
    steps: int = 0  # of the recording, as all below; 0 without one
    spans: int = 0
    num_bytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


Pair = tuple[Measured, Measured]
"""A run without and a run with commtrace."""


class Ratio(NamedTuple):
    """The median of ratios, and the bootstrapped 95 % interval of that median."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OverheadCost:
    """Medians over the runs of each side, ns, and the ratio of a pair's two runs."""

    without_ns: int
    recorded_ns: int
    ratio: Ratio

    def to_json(self) -> JsonObject:
        return {"without": self.without_ns, "with": self.recorded_ns, "ratio": fields_to_json(self.ratio)}


class ExtraMemory(NamedTuple):
    """Extra bytes of a rank at its peak."""

    median: int
    max: int


class Recorded(NamedTuple):
    """The contents of the recordings, per rank; None without steps or spans."""

    steps: int
    spans_per_step: float | None
    bytes_per_step: float | None
    bytes_per_span: float | None
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Overhead:
    """The cost of recording."""

    pairs: int
    clock: str  # optimizer, or wall if some run has no process with two stamped steps
    step_time: OverheadCost  # mean over the ranks of their median step, or the wall time of the run
    noise: Ratio | None  # ratios of runs without commtrace, each to the previous one; None for a single pair
    step_cpu: OverheadCost | None  # of all threads of a rank; None by wall clock
    job_cpu: OverheadCost  # of all processes, start-up included
    memory_bytes: ExtraMemory | None  # None by wall clock, or if no rank stamped steps on both sides
    recorded: Recorded

    def to_json(self) -> JsonObject:
        return fields_to_json(self)


def summarise_overhead(pairs: Sequence[Pair]) -> Overhead:
    """Compare the runs of each pair."""
    stamped = all(any(_intervals(rank.stamps, 1) for rank in measured.ranks) for pair in pairs for measured in pair)
    step_time: Callable[[Measured], float] = _step_time if stamped else _wall_time
    return Overhead(
        pairs=len(pairs),
        clock=OPTIMIZER if stamped else WALL,
        step_time=_cost(pairs, step_time),
        noise=_noise([without for without, _ in pairs], step_time),
        step_cpu=_cost(pairs, _step_cpu) if stamped else None,
        job_cpu=_cost(pairs, lambda measured: measured.cpu_ns),
        memory_bytes=_memory(pairs) if stamped else None,
        recorded=_recorded([recorded for _, recorded in pairs]),
    )


def _intervals(stamps: Sequence[Stamp], column: int) -> list[int]:
    """Return the times between steps of the optimizer that steps most often, without the warm-up."""
    if not stamps:
        return []
    most = Counter(stamp.optimizer for stamp in stamps).most_common(1)[0][0]
    times = [stamp[column] for stamp in stamps if stamp.optimizer == most]
    steps = [after - before for before, after in pairwise(times)]
    return steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps


def _step_time(measured: Measured) -> float:
    return float(np.mean([np.median(steps) for rank in measured.ranks if (steps := _intervals(rank.stamps, 1))]))


def _step_cpu(measured: Measured) -> float:
    return float(np.mean([np.mean(steps) for rank in measured.ranks if (steps := _intervals(rank.stamps, 2))]))


def _wall_time(measured: Measured) -> float:
    return float(measured.wall_ns)


def _cost(pairs: Sequence[Pair], figure: Callable[[Measured], float]) -> OverheadCost:
    without, recorded = ([figure(pair[side]) for pair in pairs] for side in (0, 1))
    ratios = [after / before for before, after in zip(without, recorded, strict=True)]
    return OverheadCost(round(float(np.median(without))), round(float(np.median(recorded))), _ratio(ratios))


def _noise(runs: Sequence[Measured], figure: Callable[[Measured], float]) -> Ratio | None:
    ratios = [figure(after) / figure(before) for before, after in pairwise(runs)]
    return _ratio(ratios) if ratios else None


def _ratio(values: Sequence[float]) -> Ratio:
    sample = np.asarray(values)
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(sample, (_RESAMPLES, len(sample))), axis=1)
    low, high = np.percentile(medians, _CONFIDENCE)
    return Ratio(float(np.median(sample)), float(low), float(high))


def _memory(pairs: Sequence[Pair]) -> ExtraMemory | None:
    more: list[int] = []
    for without, recorded in pairs:
        before = {rank.rank: rank.max_rss_bytes for rank in without.ranks}
        more += [rank.max_rss_bytes - before[rank.rank] for rank in recorded.ranks if rank.rank in before]
    return ExtraMemory(round(float(np.median(more))), max(more)) if more else None


def _recorded(runs: Sequence[Measured]) -> Recorded:
    dropped: Counter[str] = Counter()
    for run in runs:
        dropped.update(run.dropped)
    steps, spans = sum(run.steps for run in runs), sum(run.spans for run in runs)
    num_bytes = sum(run.num_bytes for run in runs)
    return Recorded(
        steps=steps,
        spans_per_step=spans / steps if steps else None,
        bytes_per_step=num_bytes / steps if steps else None,
        bytes_per_span=num_bytes / spans if spans else None,
        dropped=dict(dropped),
    )
