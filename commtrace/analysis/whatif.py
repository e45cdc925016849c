"""What would the step take if …: the measured durations of some operations exchanged for those of their peers.

``S`` is the slowdown of the job: step time with the measured durations over step time with ideal ones. Ideal is the
mean over all ranks doing the same operation (over stages too: an uneven partition is a slowdown) for compute, and the
median for communication, whose rare outliers would move a mean. ``S`` of an operation, stage or data-parallel rank
keeps only its measured durations and idealises the rest. ``M_W`` is the share of the slowdown that goes when the
slowest 3 % of workers are ideal, ``M_S`` when the last stage is. Source: "Understanding Stragglers in Large Model
Training Using What-if Analysis", OSDI 2025.

>>> result = what_if(run, matches)                              # doctest: +SKIP
>>> result.slowdown, result.by_stage                            # doctest: +SKIP
(1.18, {0: 1.01, 1: 1.0, 2: 1.0, 3: 1.23})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.ideal import equal_stages, median_transfers, of_transfers
from commtrace.analysis.match import Matches
from commtrace.analysis.replay_lane import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from commtrace.analysis.replay_program import Program, build_program
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

SLOWEST_SHARE: Final = 0.03
"""Of the workers, for M_W."""

_PHASE_NAMES: Final = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """How much slower the job is than with ideal durations, and where that comes from.

    Attributes:
        slowdown: S, of the mean step.
        by_step, by_operation, by_stage, by_dp_rank, by_worker: S of one slice; workers by rank. The S of a worker is
            the smaller one of its stage's and its data-parallel rank's.
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
    slowest_workers_share: float
    last_stage_share: float
    launch_slowdown: float
    actual_ns: float
    ideal_ns: float

    def to_json(self) -> dict[str, Any]:
        return {
            "S": self.slowdown,
            "S_by_step": _with_text_keys(self.by_step),
            "S_by_operation": dict(self.by_operation),
            "S_by_stage": _with_text_keys(self.by_stage),
            "S_by_dp_rank": _with_text_keys(self.by_dp_rank),
            "S_by_worker": _with_text_keys(self.by_worker),
            "M_W": _or_none(self.slowest_workers_share),
            "M_S": _or_none(self.last_stage_share),
            "launch_slowdown": self.launch_slowdown,
        }


def what_if(run: Run, matches: Matches) -> WhatIf:
    """The what-if analysis of all steps that every rank recorded.

    Raises:
        ReplayError: the run cannot be replayed; the message says why.
    """
    return _analyse(run, build_program(run, matches))


def dp_rank_of(run: Run) -> dict[int, int]:
    """The data-parallel coordinate of each rank; where it is not known, its position among those of its stage."""
    return {rank: int(trace.coordinates.get("dp", 0)) for rank, trace in run.ranks.items()}


@dataclass(frozen=True, slots=True)
class _Labels:
    """What each segment and each transfer belongs to, in that order, so that slices of both are one mask."""

    operation: Int64
    stage: Int64
    dp_rank: Int64
    rank: Int64


def _analyse(run: Run, program: Program) -> WhatIf:
    operations, labels = _labels(run, program)
    measured = np.concatenate([program.segments.total_ns, program.transfers.ns])
    ideal = np.concatenate([equal_stages(program), median_transfers(run, program)])
    actual_steps, ideal_steps = _replay(program, measured), _replay(program, ideal)
    actual_ns, ideal_ns = float(actual_steps.mean()), float(ideal_steps.mean())

    def only(mask: Bool) -> float:
        return float(_replay(program, np.where(mask, measured, ideal)).mean()) / ideal_ns

    def recovered(mask: Bool) -> float:
        if actual_ns == ideal_ns:
            return math.nan
        fixed = float(_replay(program, np.where(mask, ideal, measured)).mean())
        return (actual_ns - fixed) / (actual_ns - ideal_ns)

    by_stage = {int(stage): only(labels.stage == stage) for stage in np.unique(labels.stage)}
    by_dp_rank = {int(dp_rank): only(labels.dp_rank == dp_rank) for dp_rank in np.unique(labels.dp_rank)}
    cells = {int(rank): (int(stage), int(dp)) for rank, stage, dp in _cells(labels)}
    by_worker = {rank: min(by_stage[stage], by_dp_rank[dp]) for rank, (stage, dp) in cells.items()}
    slowest = sorted(by_worker, key=lambda rank: -by_worker[rank])[: math.ceil(len(by_worker) * SLOWEST_SHARE)]
    return WhatIf(
        slowdown=actual_ns / ideal_ns,
        by_step=dict(zip(program.steps.tolist(), (actual_steps / ideal_steps).tolist(), strict=True)),
        by_operation={name: only(labels.operation == code) for code, name in enumerate(operations)},
        by_stage=by_stage,
        by_dp_rank=by_dp_rank,
        by_worker=by_worker,
        slowest_workers_share=recovered(np.isin(labels.rank, slowest)),
        last_stage_share=recovered(labels.stage == labels.stage.max()),
        launch_slowdown=float(program.measured_step_times().mean()) / actual_ns,
        actual_ns=actual_ns,
        ideal_ns=ideal_ns,
    )


def _replay(program: Program, durations: npt.NDArray[np.int64]) -> Int64:
    segments = len(program.segments)
    return program.step_times(durations[:segments], durations[segments:])


def _labels(run: Run, program: Program) -> tuple[list[str], _Labels]:
    segments, transfers = program.segments, program.transfers
    dp_rank = np.zeros(int(program.ranks.max()) + 1, np.int64)
    for worker, coordinate in dp_rank_of(run).items():
        dp_rank[worker] = coordinate
    stage = np.zeros(len(dp_rank), np.int64)
    stage[segments.rank] = segments.stage
    rank = np.concatenate([segments.rank, transfers.rank])
    kinds = [*_PHASE_NAMES.values(), "other"]
    phase = np.where(segments.kind < BETWEEN, segments.kind - FORWARD, len(kinds) - 1)
    communications, code = np.unique(of_transfers(run, program, "name"), return_inverse=True)
    operation = np.concatenate([phase, code.reshape(-1) + len(kinds)])
    used = [*kinds, *(run.names[name] for name in communications)]
    return used, _Labels(operation, stage[rank], dp_rank[rank], rank)


def _cells(labels: _Labels) -> list[tuple[int, int, int]]:
    cells = np.unique(np.stack([labels.rank, labels.stage, labels.dp_rank]), axis=1)
    return [(int(rank), int(stage), int(dp_rank)) for rank, stage, dp_rank in cells.T]


def _with_text_keys(values: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in values.items()}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
