"""The what-if analysis: steps with some measured durations replaced by ideal ones.

The slowdown ``S`` is the step time with measured durations over that with ideal ones
(:mod:`commtrace.analysis.replay.ideal`, stages made equal too). ``S`` of an operation, stage or data-parallel rank
keeps only its measured durations. ``M_W`` is the share of the slowdown that goes when the slowest 3 % of workers are
ideal (the ranks of one stage and data-parallel rank count as one), ``M_S`` when the last stage is.
Source: "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import grouped, pack, sort_groups
from commtrace.analysis.replay.ideal import Ideal
from commtrace.analysis.replay.scenarios import MEASURED, IdealTransfers, IdealWork, Replay, Scenario
from commtrace.analysis.replay.segments import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

SLOWEST_PERCENT: Final = 3
"""Percent of the workers, for M_W."""

_PHASE_NAMES: Final = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The slowdown of the job against ideal durations, and its sources."""

    slowdown: float  # S, of the mean step
    by_step: Mapping[int, float]  # S of one slice, as are the next ones
    by_operation: Mapping[str, float]
    by_stage: Mapping[int, float]
    by_dp_rank: Mapping[int, float]
    by_worker: Mapping[int, float]  # by rank, the smaller S of its stage and its data-parallel rank
    slowest_workers: tuple[int, ...]  # 3 %, at least one, and those that S cannot separate from them
    slowest_workers_share: float  # M_W; NaN without a slowdown
    last_stage_share: float  # M_S; NaN without a slowdown
    launch_slowdown: float  # measured over replayed step time: what the replay does not see
    actual_ns: float  # replayed duration of the mean step
    ideal_ns: float  # the same with ideal durations

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


@dataclass(frozen=True, slots=True)
class Experiment:
    """Operations that may take their ideal time, and what each belongs to. Columns of equal length."""

    # Returns step durations, ns, shape (scenarios, steps), with these operations ideal; one mask per scenario.
    replay: Callable[[Sequence[Bool]], npt.NDArray[np.int64]]
    operations: Sequence[str]  # names that ``operation`` indexes
    operation: Int64
    stage: Int64
    dp_rank: Int64
    worker: Int64  # rank
    steps: Sequence[int]
    measured_step_ns: Int64


def what_if(run: Run, statistics: StepStatistics, replay: Replay) -> WhatIf:
    """Return the what-if analysis of steps that every rank recorded."""
    return analyse_experiment(_experiment_of(run, statistics, replay))


def analyse_experiment(experiment: Experiment) -> WhatIf:
    """Replay the experiment once per slice."""
    nothing = np.zeros(len(experiment.operation), np.bool_)
    slices = [
        (codes, code)
        for codes in (experiment.operation, experiment.stage, experiment.dp_rank)
        for code in np.unique(codes).tolist()
    ]
    actual_steps, ideal_steps, *kept_steps = experiment.replay(
        [nothing, ~nothing, *(codes != code for codes, code in slices)]
    )
    actual, ideal = float(actual_steps.mean()), float(ideal_steps.mean())
    slowdowns = iter([float(step_ns.mean()) / ideal for step_ns in kept_steps])

    by_operation, by_stage, by_dp_rank = (
        {code: next(slowdowns) for code in np.unique(codes).tolist()}
        for codes in (experiment.operation, experiment.stage, experiment.dp_rank)
    )
    places = _places(experiment)
    by_worker = {worker: min(by_stage[stage], by_dp_rank[dp_rank]) for worker, stage, dp_rank in places}
    slowest = _slowest(places, by_worker)
    mended = [np.isin(experiment.worker, slowest), experiment.stage == experiment.stage.max(initial=0)]
    fixed = np.array([step_ns.mean() for step_ns in experiment.replay(mended)])
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


def _experiment_of(run: Run, statistics: StepStatistics, replay: Replay) -> Experiment:
    """Return the experiment on a recorded run: its kinds of work, then those of transfers on each rank."""
    entries, transfers, ideal_ns = statistics.table.entries, statistics.transfers, Ideal.of(statistics)
    cells, _ = grouped(pack([transfers.kind, transfers.rank]))
    kind, of_rank = transfers.kind[cells], transfers.rank[cells]
    row = np.searchsorted(statistics.ranks, of_rank)

    def scenario(ideal: Bool) -> Scenario:
        of_transfers = np.zeros((len(transfers.kinds), len(statistics.ranks)), np.bool_)
        of_work, of_transfers[kind, row] = np.split(ideal, [len(entries.rank)])
        return Scenario((IdealWork(ideal_ns.equal_ns, of_work),), (IdealTransfers(ideal_ns.transfer_ns, of_transfers),))

    rank = np.concatenate([entries.rank, of_rank]).astype(np.int64)
    dp_ranks = dp_rank_of(run)
    phases = [*_PHASE_NAMES.values(), "other"]
    phase = np.where(entries.kind < BETWEEN, entries.kind - FORWARD, len(phases) - 1)
    names = sorted({kind.operation for kind in transfers.kinds})
    name = np.array([names.index(kind.operation) for kind in transfers.kinds], np.int64)[kind]
    return Experiment(
        replay=lambda masks: np.array(replay.steps_ns([scenario(mask) if mask.any() else MEASURED for mask in masks])),
        operations=[*phases, *names],
        operation=np.concatenate([phase, name + len(phases)]).astype(np.int64),
        stage=statistics.stages[np.searchsorted(statistics.ranks, rank)],
        dp_rank=np.array([dp_ranks[member] for member in rank.tolist()], np.int64),
        worker=rank,
        steps=statistics.steps.tolist(),
        measured_step_ns=statistics.measured_ns,
    )


def dp_rank_of(run: Run) -> dict[int, int]:
    """Return the data-parallel coordinate of each rank; 0 where it is not known."""
    return {rank: int(trace.coordinates.get("dp", 0)) for rank, trace in run.ranks.items()}


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
