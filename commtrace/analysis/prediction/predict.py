"""Predict the step time of a run under changes, with the error of the replay and the uncertainty of the answer.

>>> predict(open_run("commtrace-runs/my-run"), Changes(microbatches=16)).predicted_ns  # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.matching.operations import is_kernel_trace
from commtrace.analysis.pipeline.observed import pipeline_totals
from commtrace.analysis.pipeline.schedule import (
    GPIPE,
    INTERLEAVED,
    INTERLEAVED_ZERO_BUBBLE,
    LOOPED_BFS,
    ONE_F_ONE_B,
    UNKNOWN,
    ZB1P,
)
from commtrace.analysis.prediction import orders
from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.durations import (
    Durations,
    measured_durations,
    with_network,
    with_overlap,
    without_slow_ranks,
)
from commtrace.analysis.prediction.parts import Parts, take_apart
from commtrace.analysis.prediction.rebuilt import (
    HALF,
    LaneWork,
    Layer,
    Rebuilt,
    changed_work,
    rebuild,
    work_as_recorded,
)
from commtrace.analysis.prediction.recorded import RecordedSteps
from commtrace.analysis.replay.program import common_steps
from commtrace.analysis.statistics import Float64
from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.trace.json_values import JsonObject
from commtrace.trace.spans import Int64

MOST_STEPS: Final = 40
"""Steps that are replayed, evenly drawn from those that count."""

MOST_LANES: Final = 4096
"""Ranks times steps that are replayed."""

FEWEST_STEPS: Final = 4
"""Steps that are replayed of a run with more ranks than that."""

CONFIDENCE: Final = 2.0
"""Standard errors to either side."""

TARGET_ERROR: Final = 0.02
"""Largest error of the replay of the run itself, as a share, that is called faithful."""

_ORDER_OF: Final = {
    GPIPE: orders.GPIPE,
    LOOPED_BFS: orders.GPIPE,
    ONE_F_ONE_B: orders.ONE_F_ONE_B,
    INTERLEAVED: orders.INTERLEAVED,
    ZB1P: orders.ZERO_BUBBLE,
    INTERLEAVED_ZERO_BUBBLE: orders.ZERO_BUBBLE,
}


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How well the model reproduces the run itself: step times, ns, means over the steps."""

    measured_ns: float
    replayed_ns: float
    rebuilt_ns: float | None  # from its forwards, backwards and messages, where these are changed; else None

    @property
    def modelled_ns(self) -> float:
        """Return the unchanged step time of the model that answers."""
        return self.replayed_ns if self.rebuilt_ns is None else self.rebuilt_ns

    @property
    def error(self) -> float:
        """Return the model's error of the step time, as a share of the measured one."""
        return self.modelled_ns / self.measured_ns - 1

    def to_json(self) -> JsonObject:
        return {
            "measured_ns": round(self.measured_ns),
            "replayed_ns": round(self.replayed_ns),
            "rebuilt_ns": None if self.rebuilt_ns is None else round(self.rebuilt_ns),
            "error": self.error,
            "is_faithful": abs(self.error) <= TARGET_ERROR,
        }


@dataclass(frozen=True, slots=True)
class Prediction:
    """The step time of a run, as it is and as it would be."""

    changes: tuple[str, ...]  # phrases
    fidelity: Fidelity
    modelled_ns: float  # the model's own step time with the changes
    predicted_ns: float  # with what the model does not explain of the measured step
    uncertainty_ns: float  # to either side
    assumptions: tuple[str, ...]  # sentences
    steps: tuple[int, ...]  # that were replayed
    schedule: str  # of the run, as recognised; empty if it did not matter
    stages: int | None
    chunks: int | None  # of the prediction
    microbatches: int | None  # of the prediction, per replica and step
    recorded_microbatches: int | None

    @property
    def ratio(self) -> float:
        """Return the predicted step time by the measured one."""
        return self.predicted_ns / self.fidelity.measured_ns

    @property
    def throughput_ratio(self) -> float:
        """Return the microbatches per second, predicted by measured."""
        more = (self.microbatches or 1) / (self.recorded_microbatches or 1)
        return more / self.ratio

    def to_json(self) -> JsonObject:
        return {
            "changes": list(self.changes),
            "fidelity": self.fidelity.to_json(),
            "predicted_ns": round(self.predicted_ns),
            "uncertainty_ns": round(self.uncertainty_ns),
            "ratio": self.ratio,
            "throughput_ratio": self.throughput_ratio,
            "assumptions": list(self.assumptions),
            "steps": list(self.steps),
            "schedule": self.schedule,
            "stages": self.stages,
            "chunks": self.chunks,
            "microbatches": self.microbatches,
            "recorded_microbatches": self.recorded_microbatches,
        }


class Outcome(NamedTuple):
    """A prediction with the steps that it is made of, for a timeline."""

    prediction: Prediction
    recorded: RecordedSteps
    durations: Durations
    times: Int64  # of the recorded graph with these durations
    parts: Parts | None
    work: tuple[tuple[LaneWork, ...], ...]
    rebuilt: Rebuilt | None


def steps_drawn(steps: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the steps to replay: all, or so many evenly drawn ones that their lanes stay few."""
    most = min(MOST_STEPS, max(MOST_LANES // max(num_ranks, 1), FEWEST_STEPS))
    if len(steps) <= most:
        return tuple(steps)
    return tuple(steps[at] for at in np.linspace(0, len(steps) - 1, most).astype(int).tolist())


def predict(analysis: Analysis, changes: Changes) -> Outcome:
    """Predict the step time of the analysed steps with these changes.

    Raises:
        ConfigurationError: the run lacks what a change needs, or cannot have it.
        ReplayError: the steps cannot be replayed.
        CommtraceError: the run holds nothing that could be replayed.
    """
    _check(analysis)
    recorded_by_all = np.intersect1d(common_steps(analysis.run), np.array(analysis.steps.used, np.int64))
    steps = np.array(steps_drawn(recorded_by_all.tolist(), len(analysis.run.ranks)), np.int64)
    if not len(steps):
        raise CommtraceError(
            "No step was recorded by all ranks, so nothing can be replayed. commtrace doctor RUN says what is missing."
        )
    recorded = RecordedSteps.of(analysis, steps)
    measured = measured_durations(recorded)
    unchanged = recorded.times(*measured[:2])
    durations = without_slow_ranks(recorded, measured, changes.without_slow_ranks)
    durations = with_network(recorded, durations, changes.bandwidth, changes.latency)
    durations = with_overlap(recorded, durations, changes.overlap)
    times = recorded.times(*durations[:2])
    measured_ns, replayed_ns = recorded.measured_ns(), recorded.step_ns(unchanged)
    if not changes.rebuilds:
        changed_ns = recorded.step_ns(times)
        prediction = _prediction(changes, steps, measured_ns, replayed_ns, None, changed_ns, durations.assumptions)
        return Outcome(prediction, recorded, durations, times, None, (), None)

    before = take_apart(recorded, measured, unchanged)
    as_recorded = tuple(tuple(work_as_recorded(lane) for lane in rank) for rank in before.lanes)
    baseline = rebuild(recorded, measured, before, as_recorded, before.chunks, _transfers(before))
    parts = take_apart(recorded, durations, times)
    plan = _Plan.of(analysis, parts, changes)
    work = tuple(
        tuple(
            changed_work(lane, plan.orders[stage] if plan.orders else None, plan.chunks, changes, plan.layers[stage])
            for lane in parts.lanes[rank]
        )
        for rank, stage in _stage_of_rank(parts)
    )
    rebuilt = rebuild(recorded, durations, parts, work, plan.chunks, _transfers(parts))
    prediction = _prediction(
        changes,
        steps,
        measured_ns,
        replayed_ns,
        baseline.step_ns,
        rebuilt.step_ns,
        (*durations.assumptions, *plan.assumptions),
    )
    prediction = replace(
        prediction,
        schedule=plan.schedule,
        stages=parts.stages,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        recorded_microbatches=parts.microbatches,
    )
    return Outcome(prediction, recorded, durations, times, parts, work, rebuilt)


def _check(analysis: Analysis) -> None:
    run = analysis.run
    if any(is_kernel_trace(trace.spans) for trace in run.ranks.values()):
        raise CommtraceError(
            "This run holds kernels of a profiler and no steps with waits, so it cannot be replayed. Record the job "
            "with commtrace: commtrace run -- torchrun …"
        )
    if not all(trace.has_times for trace in run.ranks.values()):
        raise CommtraceError("This run holds durations without times, so it cannot be replayed.")
    present, expected = len(run.ranks), run.world_size
    if present < expected:
        raise CommtraceError(
            f"Only {present} of {expected} ranks are in this run; the others' waits would be wrong in a replay. Merge "
            "the directories of all nodes first: commtrace merge."
        )


def _prediction(
    changes: Changes,
    steps: Int64,
    measured_ns: Float64,
    replayed_ns: Int64,
    rebuilt_ns: Int64 | None,
    changed_ns: Int64,
    assumptions: Sequence[str],
) -> Prediction:
    fidelity = Fidelity(
        float(measured_ns.mean()),
        float(replayed_ns.mean()),
        None if rebuilt_ns is None else float(rebuilt_ns.mean()),
    )
    model_ns = replayed_ns if rebuilt_ns is None else rebuilt_ns
    unexplained = fidelity.measured_ns - fidelity.modelled_ns
    deviation = float(np.std(changed_ns - model_ns, ddof=1)) if len(steps) > 1 else 0.0
    scatter = float(np.std(measured_ns, ddof=1)) if len(steps) > 1 else 0.0
    standard_error = math.hypot(deviation, scatter) / math.sqrt(len(steps))
    return Prediction(
        changes=changes.describe(),
        fidelity=fidelity,
        modelled_ns=float(changed_ns.mean()),
        predicted_ns=float(changed_ns.mean()) + unexplained,
        uncertainty_ns=abs(unexplained) + CONFIDENCE * standard_error,
        assumptions=tuple(dict.fromkeys(assumptions)),
        steps=tuple(steps.tolist()),
        schedule="",
        stages=None,
        chunks=None,
        microbatches=None,
        recorded_microbatches=None,
    )


class _Plan(NamedTuple):
    """The schedule of a prediction."""

    schedule: str  # recognised
    orders: tuple[tuple[orders.Action, ...], ...]  # by stage; empty: as recorded
    chunks: int
    microbatches: int
    layers: tuple[Layer, ...]  # by stage
    assumptions: tuple[str, ...]

    @classmethod
    def of(cls, analysis: Analysis, parts: Parts, changes: Changes) -> _Plan:
        rows = analysis.replayed
        found = pipeline_totals(rows.run, rows.matches, rows.roles).pipeline()
        recognised = found.schedule if found else (ONE_F_ONE_B if parts.stages == 1 else UNKNOWN)
        notes: list[str] = []
        microbatches = parts.microbatches if changes.microbatches is None else changes.microbatches
        schedule, chunks = changes.schedule or _ORDER_OF.get(recognised, ""), _chunks(parts, changes)
        if chunks > 1 and schedule == orders.ONE_F_ONE_B and not changes.schedule:
            schedule = orders.INTERLEAVED
        if chunks == 1 and schedule == orders.INTERLEAVED and not changes.schedule:
            schedule = orders.ONE_F_ONE_B
        planned: tuple[tuple[orders.Action, ...], ...] = ()
        if changes.schedule or changes.chunks is not None or microbatches != parts.microbatches:
            if not schedule:
                reason = found.reason if found and found.reason else f"commtrace calls it {recognised}"
                raise ConfigurationError(
                    f"The schedule of this run cannot be written anew ({reason}). Say which one to run: "
                    f"--schedule {', '.join(orders_known())}."
                )
            planned = orders.orders_of(schedule, parts.stages, microbatches, chunks)
        recorded_letters = {action.letter for rank in parts.lanes for action in rank[0].actions}
        tells_weights = orders.WEIGHTS in recorded_letters or changes.weight_share is not None
        if schedule == orders.ZERO_BUBBLE and not tells_weights:
            notes.append(
                f"The run does not tell how long the weights' part of a backward takes: {HALF:.0%} are assumed. "
                "Set it with --weight-share."
            )
        if chunks != parts.chunks:
            notes.append(f"The work of a stage is divided evenly among its {chunks} chunks.")
            if chunks > 1 == parts.chunks and parts.stages > 2:
                notes.append(
                    "Messages from the last stage back to the first were not recorded: they are taken to be as long "
                    "as the others."
                )
        if microbatches > parts.microbatches:
            notes.append("Microbatches beyond the recorded ones take the times of the recorded ones again.")
        if changes.recompute:
            notes.append("Each backward is preceded by a repetition of its whole forward.")
        _check_recompute(parts, changes)
        return cls(recognised, planned, chunks, microbatches, _layers(parts, changes, notes), tuple(notes))


def orders_known() -> tuple[str, ...]:
    """Return the schedules that a prediction can run."""
    return orders.GPIPE, orders.ONE_F_ONE_B, orders.INTERLEAVED, orders.ZERO_BUBBLE


def _chunks(parts: Parts, changes: Changes) -> int:
    if changes.chunks is not None:
        return changes.chunks
    return 1 if changes.schedule == orders.ONE_F_ONE_B else parts.chunks


def _check_recompute(parts: Parts, changes: Changes) -> None:
    repeats = any(lane.recompute_ns.any() for rank in parts.lanes for lane in rank)
    if changes.recompute and repeats:
        raise ConfigurationError("--recompute on: this run recomputes activations already")
    if changes.recompute is False and not repeats:
        raise ConfigurationError("--recompute off: this run recomputes nothing, as far as was recorded")


def _layers(parts: Parts, changes: Changes, notes: list[str]) -> tuple[Layer, ...]:
    """Return how forwards and backwards of each stage change in length.

    All layers of a stage take the same time. On the first and the last stage, what is beyond the time of as many layers
    of the other stages belongs to the embedding and the head, which stay where they are.
    """
    same = tuple(Layer(1.0, 1.0) for _ in range(parts.stages))
    after = changes.layers
    if not after:
        return same
    if len(after) != parts.stages:
        raise ConfigurationError(f"--layers names {len(after)} stages, but the pipeline of this run has {parts.stages}")
    before = changes.layers_before or (sum(after) // parts.stages,) * parts.stages
    if len(before) != parts.stages:
        raise ConfigurationError(f"--layers-before names {len(before)} stages, but the run has {parts.stages}")
    if sum(before) != sum(after):
        raise ConfigurationError(
            f"--layers has {sum(after)} layers, and the run {sum(before)}: say with --layers-before how many each "
            "stage had; moving keeps their sum"
        )
    if not changes.layers_before:
        notes.append(f"In the run, each stage is taken to have {before[0]} layers. Set others with --layers-before.")
    notes.append("Layers of one stage take equally long; embedding and head stay on the first and the last stage.")
    means = [_mean_of_stage(parts, stage) for stage in range(parts.stages)]
    ratios = []
    for which in range(2):
        each = [means[stage][which] / before[stage] for stage in range(parts.stages)]
        inner = each[1:-1]
        usual = min(inner) if inner else min(each)
        own = [
            min(each[stage], usual) if stage in (0, parts.stages - 1) else each[stage] for stage in range(parts.stages)
        ]
        ratios.append([1 + (after[at] - before[at]) * own[at] / means[at][which] for at in range(parts.stages)])
    return tuple(Layer(forward, backward) for forward, backward in zip(*ratios, strict=True))


def _mean_of_stage(parts: Parts, stage: int) -> tuple[float, float]:
    """Return the forwards and the backwards of a stage, ns per step."""
    totals = [0.0, 0.0]
    for pipeline in parts.pipelines:
        for lane in parts.lanes[pipeline[stage]]:
            for action, busy in lane.busy_of().items():
                totals[action.letter != orders.FORWARD] += busy
    return totals[0], totals[1]


def _stage_of_rank(parts: Parts) -> list[tuple[int, int]]:
    stage = {rank: at for pipeline in parts.pipelines for at, rank in enumerate(pipeline)}
    return sorted(stage.items())


def _transfers(parts: Parts) -> list[list[float]]:
    return [
        [parts.mean_transfer_ns if math.isnan(lane.transfer_ns) else lane.transfer_ns for lane in rank]
        for rank in parts.lanes
    ]
