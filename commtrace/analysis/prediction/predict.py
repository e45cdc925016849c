"""Predict the step time of a run under changes, with the error of the replay and the uncertainty of the answer.

>>> predict(open_run("commtrace-runs/my-run"), Changes(microbatches=16)).predicted_ns  # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.matching.operations import is_kernel_trace
from commtrace.analysis.pipeline.observed import pipeline_totals
from commtrace.analysis.prediction.assumptions import (
    CONFIDENCE,
    MISSED,
    SCATTER,
    Assumption,
    UncertaintyPart,
    assumptions,
    notes_on_layers,
    spread_of_microbatches,
    stage_lengths,
)
from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.durations import (
    Durations,
    compared_with_stages,
    fastest_and_slowest_stand_in,
    measured_durations,
    recorded_gbps,
    with_network,
    with_overlap,
    without_slow_ranks,
)
from commtrace.analysis.prediction.parts import PipelineParts, take_apart
from commtrace.analysis.prediction.rebuilt_steps import (
    HALF,
    LaneWork,
    RebuiltSteps,
    StageLengths,
    changed_work,
    rebuild_steps,
    work_as_recorded,
)
from commtrace.analysis.prediction.recorded_steps import RecordedSteps
from commtrace.analysis.replay.program import common_steps
from commtrace.analysis.stragglers.mended import JudgedSteps, MendedRanks
from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.trace.json_values import JsonObject
from commtrace.trace.schedule import (
    ONE_F_ONE_B,
    UNKNOWN,
    WEIGHTS,
    WRITTEN,
    ZB1P,
    Action,
    as_chunked,
    orders,
    splits_backwards,
    with_chunks,
)
from commtrace.trace.spans import Int64

_MOST_PROBLEMS: Final = 3

MOST_STEPS: Final = 40
"""Steps that are replayed, evenly drawn from those that count."""

MOST_LANES: Final = 4096
"""Ranks times steps that are replayed."""

MOST_ACTIONS: Final = 1 << 20
"""Forwards and backwards that are put into another order, of all ranks and steps; unless the run has more itself."""

FEWEST_STEPS: Final = 4
"""Steps that are replayed of a run with more ranks than that."""

TARGET_ERROR: Final = 0.02
"""Largest error of the replay of the run itself, as a share, that is called faithful."""


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
    uncertainty: tuple[UncertaintyPart, ...]  # the parts of ±
    assumptions: tuple[str, ...]  # sentences
    left_out: tuple[str, ...]  # phrases: what neither the answer nor its ± holds, and parts of ± that are not known
    steps: tuple[int, ...]  # that were replayed
    schedule: str  # of the run, as recognised; empty if it did not matter
    stages: int | None
    chunks: int | None  # of the prediction
    microbatches: int | None  # of the prediction, per replica and step
    recorded_microbatches: int | None

    @property
    def uncertainty_ns(self) -> float:
        """Return the ± of the prediction: the sum of its parts, as nothing says that they would cancel."""
        return math.fsum(part.ns for part in self.uncertainty)

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
            "uncertainty": [{"cause": part.cause, "ns": round(part.ns)} for part in self.uncertainty],
            "ratio": self.ratio,
            "throughput_ratio": self.throughput_ratio,
            "assumptions": list(self.assumptions),
            "left_out": list(self.left_out),
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
    parts: PipelineParts | None
    work: tuple[tuple[LaneWork, ...], ...]
    rebuilt: RebuiltSteps | None


def steps_drawn(steps: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the steps to replay: all, or so many evenly drawn ones that their lanes stay few."""
    most = min(MOST_STEPS, max(MOST_LANES // max(num_ranks, 1), FEWEST_STEPS))
    if len(steps) <= most:
        return tuple(steps)
    return tuple(steps[at] for at in np.linspace(0, len(steps) - 1, most).astype(int).tolist())


@dataclass(frozen=True)
class StepModel:
    """The steps of a run as a graph of work, transfers and their order: it answers what they would take with changes.

    ``commtrace whatif`` asks it, and ``commtrace search`` for the layout that the run has, so that one question has one
    answer.
    """

    analysis: Analysis
    recorded: RecordedSteps
    measured: Durations
    judged: JudgedSteps | None = None  # what is known of slow ranks; None: nothing

    @classmethod
    def observed(cls, analysis: Analysis, judged: JudgedSteps | None = None) -> StepModel:
        """Return the model of the analysed steps, or of some of them, evenly drawn; ``judged`` is of their run.

        Raises:
            ReplayError: the steps cannot be replayed.
            CommtraceError: the run holds nothing that could be replayed.
        """
        _check(analysis)
        recorded_by_all = np.intersect1d(common_steps(analysis.run), np.array(analysis.steps.used, np.int64))
        steps = np.array(steps_drawn(recorded_by_all.tolist(), len(analysis.run.ranks)), np.int64)
        if not len(steps):
            raise CommtraceError(
                "No step was recorded by all ranks, so nothing can be replayed. commtrace doctor RUN says what is "
                "missing."
            )
        recorded = RecordedSteps.of(analysis, steps)
        return cls(analysis, recorded, measured_durations(recorded), judged)

    @cached_property
    def times(self) -> Int64:
        """Return the instants of the recorded graph as they were measured."""
        return self.recorded.times(*self.measured[:2])

    @cached_property
    def parts(self) -> PipelineParts:
        """Return the recorded steps, taken apart.

        Raises:
            ConfigurationError: a rank recorded no forwards and backwards, or the stages of its pipeline are not known.
        """
        return take_apart(self.recorded, self.measured, self.times)

    @cached_property
    def rebuilt(self) -> RebuiltSteps:
        """Return the steps, rebuilt from their parts without a change."""
        parts = self.parts
        as_recorded = tuple(tuple(work_as_recorded(lane) for lane in rank) for rank in parts.lanes)
        return rebuild_steps(self.recorded, self.measured, parts, as_recorded, parts.chunks, _transfers(parts))

    def predict(self, changes: Changes) -> Outcome:
        """Predict the step time with these changes.

        Raises:
            ConfigurationError: the run lacks what a change needs, or cannot have it.
        """
        mended = None if self.judged is None else self.judged.without(changes.without_slow_ranks)
        durations = _changed_durations(self.recorded, self.measured, changes, mended=mended)
        likes = fastest_and_slowest_stand_in(self.recorded, compared_with_stages(changes.without_slow_ranks, mended))
        stand_ins = (
            None
            if likes is None
            else [_changed_durations(self.recorded, self.measured, changes, rank) for rank in likes]
        )
        if changes.rebuilds:
            return _rebuilt_outcome(self, changes, durations, stand_ins)
        _check_weight_share(changes, splits=False)
        return _replayed_outcome(self, changes, durations, stand_ins)


def predict(analysis: Analysis, changes: Changes, judged: JudgedSteps | None = None) -> Outcome:
    """Predict the step time of the analysed steps with these changes; ``judged`` is what slows their run, if known.

    Raises:
        ConfigurationError: the run lacks what a change needs, or cannot have it.
        ReplayError: the steps cannot be replayed.
        CommtraceError: the run holds nothing that could be replayed.
    """
    return StepModel.observed(analysis, judged).predict(changes)


_STAND_IN: Final = "work of the slow rank"


def _changed_durations(
    recorded: RecordedSteps,
    measured: Durations,
    changes: Changes,
    like: int | None = None,
    mended: MendedRanks | None = None,
) -> Durations:
    durations = without_slow_ranks(recorded, measured, changes.without_slow_ranks, like, mended)
    durations = with_network(recorded, durations, changes.bandwidth, changes.latency)
    return with_overlap(recorded, durations, changes.overlap)


def _replayed_outcome(
    model: StepModel, changes: Changes, durations: Durations, stand_ins: Sequence[Durations] | None
) -> Outcome:
    """Replay the recorded order with other durations."""
    recorded = model.recorded
    times = recorded.times(*durations[:2])
    changed_ns = recorded.step_ns(times)
    others_ns = {}
    if stand_ins is not None:
        others_ns[_STAND_IN] = [recorded.step_ns(recorded.times(*stand_in[:2])) for stand_in in stand_ins]
    unchanged_ns = recorded.step_ns(model.times)
    prediction = _prediction(
        recorded,
        changes,
        unchanged_ns,
        None,
        changed_ns,
        durations.assumptions,
        _spreads(changed_ns, others_ns),
        _not_known(others_ns),
    )
    return Outcome(prediction, recorded, durations, times, None, (), None)


def _rebuilt_outcome(
    model: StepModel, changes: Changes, durations: Durations, stand_ins: Sequence[Durations] | None
) -> Outcome:
    """Rebuild the steps from their parts, in another order or with other lengths."""
    recorded = model.recorded
    times, parts = model.times, model.parts
    if durations is not model.measured:
        times = recorded.times(*durations[:2])
        parts = take_apart(recorded, durations, times)
    plan = _Plan.of(model.analysis, parts, changes)
    work = plan.work(parts, changes, plan.lengths)
    rebuilt = rebuild_steps(recorded, durations, parts, work, plan.chunks, _transfers(parts))

    others_ns = {}
    if stand_ins is not None:
        others_ns[_STAND_IN] = [plan.step_ns(recorded, stand_in, changes, plan.lengths) for stand_in in stand_ins]
    for assumption in plan.assumed:
        others_ns[assumption.name] = [
            plan.step_ns(recorded, durations, changes, lengths, parts) for lengths in assumption.alternatives
        ]
    spreads, not_known = _spreads(rebuilt.step_ns, others_ns), _not_known(others_ns)
    if plan.microbatches != parts.microbatches:
        moved_ns = spread_of_microbatches(parts, plan.microbatches)
        if moved_ns is None:
            not_known += ("other microbatches (not known: one microbatch)",)
        else:
            spreads += (UncertaintyPart("other microbatches", moved_ns),)
    prediction = _prediction(
        recorded,
        changes,
        recorded.step_ns(model.times),
        model.rebuilt.step_ns,
        rebuilt.step_ns,
        (*durations.assumptions, *plan.notes),
        spreads,
        not_known,
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


def _spreads(answer_ns: Int64, others_ns: Mapping[str, Sequence[Int64]]) -> tuple[UncertaintyPart, ...]:
    """Return how far the mean step moves with each assumption made otherwise, at most."""
    return tuple(
        UncertaintyPart(name, max(abs(float(alternative.mean() - answer_ns.mean())) for alternative in others))
        for name, others in others_ns.items()
        if others
    )


def _not_known(others_ns: Mapping[str, Sequence[Int64]]) -> tuple[str, ...]:
    """Return the assumptions beside which the run allows no other, so that nothing can move, in phrases."""
    return tuple(f"{name} (not known: too few stages to compare)" for name, others in others_ns.items() if not others)


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
        problems = "".join(f" {problem}" for problem in run.problems[:_MOST_PROBLEMS])
        raise CommtraceError(
            f"Only {present} of {expected} ranks are in this run; the others' waits would be wrong in a replay. Merge "
            f"the directories of all nodes first: commtrace merge.{problems}"
        )


def _prediction(
    recorded: RecordedSteps,
    changes: Changes,
    replayed_ns: Int64,
    rebuilt_ns: Int64 | None,
    changed_ns: Int64,
    notes: Sequence[str],
    spreads: Sequence[UncertaintyPart],
    not_known: Sequence[str],
) -> Prediction:
    """Return the answer with the parts of its ±.

    * What the model misses of the unchanged run. If the step grows, it may miss as much more.
    * Two standard errors over the n steps, ``2 · √(d² + s²) / √n``: d is the standard deviation of what the changes
      save of a step, s that of the measured steps. One step says nothing of it.
    * ``spreads``: what the answer moves by if its assumptions are made otherwise; ``not_known`` are phrases on those
      of which that cannot be told.
    """
    steps, measured_ns = recorded.steps, recorded.measured_ns()
    fidelity = Fidelity(
        float(measured_ns.mean()),
        float(replayed_ns.mean()),
        None if rebuilt_ns is None else float(rebuilt_ns.mean()),
    )
    model_ns = replayed_ns if rebuilt_ns is None else rebuilt_ns
    unexplained = fidelity.measured_ns - fidelity.modelled_ns
    growth = max(1.0, float(changed_ns.mean()) / fidelity.modelled_ns)
    uncertainty = [UncertaintyPart(MISSED, abs(unexplained) * growth)]
    left_out = [*changes.left_out(), *not_known]
    if len(steps) > 1:
        deviation, scatter = (float(np.std(each, ddof=1)) for each in (changed_ns - model_ns, measured_ns))
        standard_error = math.hypot(deviation, scatter) / math.sqrt(len(steps))
        uncertainty.append(UncertaintyPart(SCATTER, CONFIDENCE * standard_error))
    else:
        left_out.append(f"{SCATTER} (not known: one step)")
    return Prediction(
        changes=changes.describe(recorded_gbps(recorded, changes.bandwidth)),
        fidelity=fidelity,
        modelled_ns=float(changed_ns.mean()),
        predicted_ns=float(changed_ns.mean()) + unexplained,
        uncertainty=(*uncertainty, *spreads),
        assumptions=tuple(dict.fromkeys(notes)),
        left_out=tuple(left_out),
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
    orders: tuple[tuple[Action, ...], ...]  # by stage; empty: as recorded
    chunks: int
    microbatches: int
    lengths: tuple[StageLengths, ...]  # by stage
    assumed: tuple[Assumption, ...]  # of these lengths
    notes: tuple[str, ...]

    @classmethod
    def of(cls, analysis: Analysis, parts: PipelineParts, changes: Changes) -> _Plan:
        rows = analysis.replayed
        pipeline = pipeline_totals(rows.run, rows.matches, rows.roles).pipeline()
        recognised = pipeline.schedule if pipeline else (ONE_F_ONE_B if parts.stages == 1 else UNKNOWN)
        microbatches = parts.microbatches if changes.microbatches is None else changes.microbatches
        chunks = _chunks(parts, changes)
        schedule = _schedule(recognised, chunks, changes)
        planned: tuple[tuple[Action, ...], ...] = ()
        if changes.schedule or changes.chunks is not None or microbatches != parts.microbatches:
            if not schedule:
                reason = pipeline.reason if pipeline and pipeline.reason else f"commtrace calls it {recognised}"
                raise ConfigurationError(
                    f"The schedule of this run cannot be written anew ({reason}). Say which one to run: "
                    f"--schedule {', '.join(WRITTEN)}."
                )
            _check_actions(parts, schedule, microbatches, chunks)
            planned = orders(schedule, parts.stages, microbatches, chunks)
        _check_recompute(parts, changes)
        splits = splits_backwards(schedule) if schedule else _has_weights(parts)
        _check_weight_share(changes, splits=splits)
        assumes_weights = splits_backwards(schedule) and not _tells_weights(parts, changes)
        lengths = stage_lengths(parts, changes)
        assumed = assumptions(parts, changes, lengths, assumes_weights=assumes_weights)
        notes = (*_notes(parts, changes, chunks, microbatches, assumes_weights), *notes_on_layers(parts, changes))
        return cls(recognised, planned, chunks, microbatches, lengths, assumed, notes)

    def work(
        self, parts: PipelineParts, changes: Changes, lengths: Sequence[StageLengths]
    ) -> tuple[tuple[LaneWork, ...], ...]:
        """Return what each rank does, step by step."""
        return tuple(
            tuple(
                changed_work(lane, self.orders[stage] if self.orders else None, self.chunks, changes, lengths[stage])
                for lane in parts.lanes[rank]
            )
            for rank, stage in _stage_of_rank(parts)
        )

    def step_ns(
        self,
        recorded: RecordedSteps,
        durations: Durations,
        changes: Changes,
        lengths: Sequence[StageLengths],
        parts: PipelineParts | None = None,
    ) -> Int64:
        """Return the lengths of the steps rebuilt with other durations or lengths; ``parts`` of these durations."""
        if parts is None:
            parts = take_apart(recorded, durations, recorded.times(*durations[:2]))
        work = self.work(parts, changes, lengths)
        return rebuild_steps(recorded, durations, parts, work, self.chunks, _transfers(parts)).step_ns


def _chunks(parts: PipelineParts, changes: Changes) -> int:
    if changes.chunks is not None:
        return changes.chunks
    return 1 if changes.schedule == ONE_F_ONE_B else parts.chunks


def _schedule(recognised: str, chunks: int, changes: Changes) -> str:
    """Return the schedule to run; empty if it is none that can be written anew."""
    if changes.schedule:
        return with_chunks(changes.schedule, chunks)
    return as_chunked(recognised, chunks) if recognised in WRITTEN else ""


def _tells_weights(parts: PipelineParts, changes: Changes) -> bool:
    """Return whether it is known how long the weights' part of a backward takes."""
    return _has_weights(parts) or changes.weight_share is not None


def _has_weights(parts: PipelineParts) -> bool:
    return any(action.letter == WEIGHTS for rank in parts.lanes for action in rank[0].actions)


def _notes(
    parts: PipelineParts, changes: Changes, chunks: int, microbatches: int, assumes_weights: bool
) -> Iterator[str]:
    """Yield what a schedule assumes beyond the recorded steps."""
    if assumes_weights:
        yield (
            f"The run does not tell how long the weights' part of a backward takes: {HALF:.0%} are assumed. "
            "Set it with --weight-share."
        )
    if chunks != parts.chunks:
        yield f"The work of a stage is divided evenly among its {chunks} chunks."
        if chunks > 1 == parts.chunks and parts.stages > 2:
            yield (
                "Messages from the last stage back to the first were not recorded: they are taken to be as long as "
                "the others."
            )
    if microbatches > parts.microbatches:
        yield "Microbatches beyond the recorded ones take the times of the recorded ones again."
    if changes.recompute:
        yield "Each backward is preceded by a repetition of its whole forward."


def _check_actions(parts: PipelineParts, schedule: str, microbatches: int, chunks: int) -> None:
    """Refuse steps that would take minutes and gigabytes to rebuild; as many actions as were recorded are fine."""
    lanes = [lane for rank in parts.lanes for lane in rank]
    of_a_microbatch = chunks * (3 if splits_backwards(schedule) else 2)
    most = max(MOST_ACTIONS, sum(len(lane.actions) for lane in lanes))
    if len(lanes) * microbatches * of_a_microbatch > most:
        raise ConfigurationError(
            f"{microbatches} microbatches in {chunks} chunk{'s' * (chunks > 1)} per stage are more than {most:,} "
            f"forwards and backwards on {len(parts.lanes)} ranks in {len(parts.lanes[0])} steps: ask for fewer, or "
            "replay fewer steps with --steps"
        )


def _check_weight_share(changes: Changes, *, splits: bool) -> None:
    if changes.weight_share is not None and not splits:
        raise ConfigurationError(
            f"--weight-share {changes.weight_share:g} has no effect, as no backward is split: add --schedule "
            f"{ZB1P}, or leave it out"
        )


def _check_recompute(parts: PipelineParts, changes: Changes) -> None:
    repeats = any(lane.recompute_ns.any() for rank in parts.lanes for lane in rank)
    if changes.recompute and repeats:
        raise ConfigurationError("--recompute on: this run recomputes activations already")
    if changes.recompute is False and not repeats:
        raise ConfigurationError("--recompute off: this run recomputes nothing, as far as was recorded")


def _stage_of_rank(parts: PipelineParts) -> list[tuple[int, int]]:
    stage = {rank: at for pipeline in parts.pipelines for at, rank in enumerate(pipeline)}
    return sorted(stage.items())


def _transfers(parts: PipelineParts) -> list[list[float]]:
    return [
        [parts.mean_transfer_ns if math.isnan(lane.transfer_ns) else lane.transfer_ns for lane in rank]
        for rank in parts.lanes
    ]
