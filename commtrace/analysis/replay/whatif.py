"""The what-if analysis: the steps with some measured durations replaced by ideal ones.

``S`` is the slowdown of the job: step time with the measured durations over step time with ideal ones. Ideal is the
mean over all ranks doing the same operation (over stages too: an uneven partition is a slowdown) for compute, and the
median for communication (:mod:`commtrace.analysis.replay.ideal`). ``S`` of an operation, stage or data-parallel rank
keeps only its measured durations and idealises the rest. ``M_W`` is the share of the slowdown that goes when the
slowest 3 % of workers are ideal (the ranks of one stage and data-parallel rank count as one), ``M_S`` when the last
stage is.
Source: "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.

>>> result = what_if(run, matches)                              # doctest: +SKIP
>>> result.slowdown, result.by_stage                            # doctest: +SKIP
(1.18, {0: 1.01, 1: 1.0, 2: 1.0, 3: 1.23})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.replay.ideal import equal_stages, mean_segments, median_transfers
from commtrace.analysis.replay.program import Program, build_program
from commtrace.analysis.replay.segments import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

SLOWEST_PERCENT: Final = 3
"""Of the workers, for M_W."""

_PHASE_NAMES: Final = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}
_MOST_CELLS: Final = 250_000
"""Durations that are replayed at once: what is made of them stays in the caches, and little new memory is touched."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The slowdown of the job against ideal durations, and its sources.

    Attributes:
        slowdown: S, of the mean step.
        by_step, by_operation, by_stage, by_dp_rank, by_worker: S of one slice; workers by rank. The S of a worker is
            the smaller one of its stage's and its data-parallel rank's.
        slowest_workers: the slowest 3 % of workers, at least one, and those that S cannot tell from them.
        slowest_workers_share: M_W; NaN where there is no slowdown to explain.
        last_stage_share: M_S; likewise.
        launch_slowdown: measured step time over replayed step time: what the replay does not see.
        actual_ns, ideal_ns: replayed duration of the mean step.
    """

    slowdown: float
    by_step: Mapping[int, float]
    by_operation: Mapping[str, float]
    by_stage: Mapping[int, float]
    by_dp_rank: Mapping[int, float]
    by_worker: Mapping[int, float]
    slowest_workers: tuple[int, ...]
    slowest_workers_share: float
    last_stage_share: float
    launch_slowdown: float
    actual_ns: float
    ideal_ns: float

    def to_json(self) -> JsonObject:
        return {
            "S": self.slowdown,
            "S_by_step": _with_text_keys(self.by_step),
            "S_by_operation": dict(self.by_operation),
            "S_by_stage": _with_text_keys(self.by_stage),
            "S_by_dp_rank": _with_text_keys(self.by_dp_rank),
            "S_by_worker": _with_text_keys(self.by_worker),
            "slowest_workers": list(self.slowest_workers),
            "M_W": _or_none(self.slowest_workers_share),
            "M_S": _or_none(self.last_stage_share),
            "launch_slowdown": self.launch_slowdown,
        }


Replay = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Step durations, of shape (scenarios, steps), from durations of operations, of shape (scenarios, operations); ns."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Operations with measured and ideal durations, and what each belongs to. Columns of equal length.

    ``operations`` are the words that ``operation`` indexes, ``worker`` is the rank.
    """

    replay: Replay
    measured_ns: Int64
    ideal_ns: Int64
    operations: Sequence[str]
    operation: Int64
    stage: Int64
    dp_rank: Int64
    worker: Int64
    steps: Sequence[int]
    measured_step_ns: Int64

    def step_ns(self, ideal: Sequence[Bool]) -> npt.NDArray[np.float64]:
        """Return the mean replayed step of each scenario, which says which operations are ideal."""
        at_once = max(1, _MOST_CELLS // max(len(self.measured_ns), 1))
        parts = [ideal[first : first + at_once] for first in range(0, len(ideal), at_once)]
        means = [self._mean_steps(part) for part in parts]
        return np.concatenate(means) if means else np.zeros(0)

    def _mean_steps(self, ideal: Sequence[Bool]) -> npt.NDArray[np.float64]:
        durations = np.where(np.stack(list(ideal)), self.ideal_ns, self.measured_ns)
        return np.asarray(self.replay(durations).mean(axis=1))


def what_if(run: Run, matches: Matches, program: Program | None = None) -> WhatIf:
    """Return the what-if analysis of all steps that every rank recorded.

    Args:
        run: with aligned clocks.
        matches: its communications, joined.
        program: of the run, if there is one already.

    Raises:
        ReplayError: the run cannot be replayed; the message says why.
    """
    return analyse_experiment(experiment_of(run, program or build_program(run, matches)))


def analyse_experiment(experiment: Experiment) -> WhatIf:
    """Replay the experiment once per slice."""
    actual_steps = experiment.replay(experiment.measured_ns[None])[0]
    ideal_steps = experiment.replay(experiment.ideal_ns[None])[0]
    actual, ideal = float(actual_steps.mean()), float(ideal_steps.mean())

    by_operation = _slowdowns(experiment, experiment.operation, ideal)
    by_stage = _slowdowns(experiment, experiment.stage, ideal)
    by_dp_rank = _slowdowns(experiment, experiment.dp_rank, ideal)
    places = _places(experiment)
    by_worker = {worker: min(by_stage[stage], by_dp_rank[dp_rank]) for worker, stage, dp_rank in places}
    slowest = _slowest(places, by_worker)
    fixed = experiment.step_ns(
        [
            np.isin(experiment.worker, slowest),
            experiment.stage == experiment.stage.max(initial=0),
        ]
    )
    recovered = (actual - fixed) / (actual - ideal) if actual != ideal else np.full(2, math.nan)
    return WhatIf(
        slowdown=actual / ideal,
        by_step=dict(zip(experiment.steps, (actual_steps / ideal_steps).tolist(), strict=True)),
        by_operation={experiment.operations[code]: slowdown for code, slowdown in by_operation.items()},
        by_stage=by_stage,
        by_dp_rank=by_dp_rank,
        by_worker=by_worker,
        slowest_workers=tuple(sorted(slowest)),
        slowest_workers_share=float(recovered[0]),
        last_stage_share=float(recovered[1]),
        launch_slowdown=float(experiment.measured_step_ns.mean()) / actual,
        actual_ns=actual,
        ideal_ns=ideal,
    )


def experiment_of(run: Run, program: Program) -> Experiment:
    """Return the experiment on a recorded run: its segments, then its transfers."""
    segments, transfers = program.segments, program.transfers
    rank = np.concatenate([segments.rank, transfers.rank])
    stage, dp_rank = (np.zeros(int(program.ranks.max()) + 1, np.int64) for _ in range(2))
    stage[segments.rank] = segments.stage
    for number, coordinate in dp_rank_of(run).items():
        dp_rank[number] = coordinate
    phases = [*_PHASE_NAMES.values(), "other"]
    phase = np.where(segments.kind < BETWEEN, segments.kind - FORWARD, len(phases) - 1)
    names, name = np.unique(transfers.name, return_inverse=True)

    def replay(durations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.stack([program.step_times(own[: len(segments)], own[len(segments) :]) for own in durations])

    return Experiment(
        replay=replay,
        measured_ns=np.concatenate([segments.total_ns, transfers.ns]),
        ideal_ns=np.concatenate([equal_stages(program, mean_segments(program)), median_transfers(program)]),
        operations=[*phases, *(run.names[code] for code in names)],
        operation=np.concatenate([phase, name.reshape(-1) + len(phases)]),
        stage=stage[rank],
        dp_rank=dp_rank[rank],
        worker=rank,
        steps=program.steps.tolist(),
        measured_step_ns=program.measured_step_times(),
    )


def dp_rank_of(run: Run) -> dict[int, int]:
    """Return the data-parallel coordinate of each rank; 0 where it is not known."""
    return {rank: int(trace.coordinates.get("dp", 0)) for rank, trace in run.ranks.items()}


def _slowdowns(experiment: Experiment, slices: Int64, ideal_ns: float) -> dict[int, float]:
    """Return S by slice, if only it keeps its measured durations."""
    codes = np.unique(slices)
    steps = experiment.step_ns([slices != code for code in codes])
    return dict(zip(codes.tolist(), (steps / ideal_ns).tolist(), strict=True))


def _places(experiment: Experiment) -> list[tuple[int, int, int]]:
    columns = (experiment.worker, experiment.stage, experiment.dp_rank)
    order, begins = sort_groups(pack(columns))
    places = np.stack([column[order[begins]] for column in columns])
    return [(worker, stage, dp_rank) for worker, stage, dp_rank in places.T.tolist()]


def _slowest(places: Sequence[tuple[int, int, int]], by_worker: Mapping[int, float]) -> list[int]:
    """Return the slowest workers, and all that share stage and data-parallel rank with them."""
    cells: dict[tuple[int, int], list[int]] = {}
    for worker, stage, dp_rank in places:
        cells.setdefault((stage, dp_rank), []).append(worker)
    most = -(-len(cells) * SLOWEST_PERCENT // 100)
    slowest = sorted(cells.values(), key=lambda workers: -by_worker[workers[0]])[:most]
    return [worker for workers in slowest for worker in workers]


def _with_text_keys(values: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in values.items()}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
