"""What a prediction assumes about forwards and backwards, and what else the recorded run allows.

Where the run does not tell how long something would take, an assumption answers, and the run bounds it: other stages,
the other half of a backward, other microbatches. What the answer moves by between these bounds belongs to its ±.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.parts import PipelineParts
from commtrace.analysis.prediction.rebuilt_steps import StageLengths
from commtrace.errors import ConfigurationError
from commtrace.trace.schedule import FORWARD

CONFIDENCE: Final = 2.0
"""Standard errors to either side."""


MISSED: Final = "error of the replay"
SCATTER: Final = "scatter of steps"


class UncertaintyPart(NamedTuple):
    """A part of the ± of an answer: ns to either side."""

    cause: str
    ns: float


class Assumption(NamedTuple):
    """Something that the run does not tell, with other lengths of forwards and backwards that it allows."""

    name: str
    alternatives: tuple[tuple[StageLengths, ...], ...]  # each by stage; empty if the run has nothing to compare with


class _StageTimes(NamedTuple):
    """What a stage does in its steps, ns in all."""

    forward: float
    backward: float
    recompute: float  # in the backwards


def stage_lengths(parts: PipelineParts, changes: Changes) -> tuple[StageLengths, ...]:
    """Return how forwards and backwards of each stage change in length.

    All layers of a stage take the same time. On the first and the last stage, what is beyond the time of as many layers
    of the other stages belongs to the embedding and the head, which stay where they are.

    Raises:
        ConfigurationError: the layers are not those of this pipeline.
    """
    if not changes.layers:
        return (StageLengths(),) * parts.stages
    before = _layers_before(parts, changes)
    layer = _layer_times(parts, before)
    return _with_layers(parts, changes, before, layer)


def assumptions(
    parts: PipelineParts, changes: Changes, lengths: tuple[StageLengths, ...], *, assumes_weights: bool
) -> tuple[Assumption, ...]:
    """Return what is assumed on the lengths of forwards and backwards.

    * Layers that move take the time of a layer of the stage: or that of the fastest, or of the slowest stage.
    * The gradients of weights take half of a backward: or what a backward takes beyond a forward, as the gradients of
      inputs are as many multiplications as a forward ("Zero Bubble Pipeline Parallelism", ICLR 2024, section 2).
    * A recomputation repeats the whole forward: or, on the first and the last stage, only as much as a forward of the
      other stages takes, without embedding and head.

    The first and the last of these compare with stages that have neither embedding nor head: with two stages they have
    no alternatives.
    """
    assumptions = []
    if changes.layers:
        assumptions.append(Assumption("time of a layer", _other_layers(parts, changes)))
    if assumes_weights:
        shares = [_share_beyond_forward(_times_of_stage(parts, stage)) for stage in range(parts.stages)]
        lengths_by_shares = tuple(
            replace(of_stage, weights=share) for of_stage, share in zip(lengths, shares, strict=True)
        )
        assumptions.append(Assumption("split of backwards", (lengths_by_shares,)))
    if changes.recompute:
        assumptions.append(Assumption("what is recomputed", _repeated_without_ends(parts, lengths)))
    return tuple(assumptions)


def spread_of_microbatches(parts: PipelineParts, microbatches: int) -> float | None:
    """Return what the microbatches that are added or left out may differ by, ns.

    Each is as long as the mean of the m recorded ones, give or take two standard errors of it, which makes
    ``2 · |M − m| · s / √m``: s is the standard deviation of a forward and backward between microbatches, each a mean
    over the steps, on the stage that works longest. None with one microbatch, which is compared with nothing.
    """
    if parts.microbatches < 2:
        return None
    added = abs(microbatches - parts.microbatches)
    longest = max((_times_by_microbatch(parts, stage) for stage in range(parts.stages)), key=lambda times: times.mean())
    return CONFIDENCE * added * float(np.std(longest, ddof=1)) / math.sqrt(parts.microbatches)


def notes_on_layers(parts: PipelineParts, changes: Changes) -> tuple[str, ...]:
    """Return what is assumed of layers that move, in sentences."""
    if not changes.layers:
        return ()
    before = ", ".join(map(str, changes.layers_before))
    return (
        f"In the run, the stages have {before} layers.",
        "Layers of one stage take equally long; embedding and head stay on the first and the last stage.",
    )


def _layers_before(parts: PipelineParts, changes: Changes) -> tuple[int, ...]:
    after = changes.layers
    if len(after) != parts.stages:
        raise ConfigurationError(f"--layers names {len(after)} stages, but the pipeline of this run has {parts.stages}")
    before = changes.layers_before
    if not before:
        raise ConfigurationError(
            f"--layers {','.join(map(str, after))}: this run did not record how many layers its stages have. Say it "
            "with --layers-before"
        )
    if len(before) != parts.stages:
        raise ConfigurationError(f"--layers-before names {len(before)} stages, but the run has {parts.stages}")
    if sum(before) != sum(after):
        raise ConfigurationError(
            f"--layers has {sum(after)} layers, and the run {sum(before)} ({', '.join(map(str, before))}): moving "
            "keeps their sum"
        )
    return before


def _layer_times(parts: PipelineParts, before: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return the forward and the backward of a layer of each stage, ns."""
    times = [_times_of_stage(parts, stage) for stage in range(parts.stages)]
    forward = _without_ends([of_stage.forward / count for of_stage, count in zip(times, before, strict=True)])
    backward = _without_ends([of_stage.backward / count for of_stage, count in zip(times, before, strict=True)])
    return list(zip(forward, backward, strict=True))


def _without_ends(by_stage: list[float]) -> list[float]:
    """Return times without what the first and the last stage take beyond the others."""
    usual = min(by_stage[1:-1] or by_stage)
    return [min(by_stage[0], usual), *by_stage[1:-1], min(by_stage[-1], usual)] if len(by_stage) > 1 else by_stage


def _with_layers(
    parts: PipelineParts, changes: Changes, before: tuple[int, ...], layer: list[tuple[float, float]]
) -> tuple[StageLengths, ...]:
    """Return the lengths of stages if each layer that comes or goes takes so long: forward and backward, by stage."""
    lengths = []
    for stage, (forward, backward) in enumerate(layer):
        added, of_stage = changes.layers[stage] - before[stage], _times_of_stage(parts, stage)
        lengths.append(StageLengths(1 + added * forward / of_stage.forward, 1 + added * backward / of_stage.backward))
    return tuple(lengths)


def _other_layers(parts: PipelineParts, changes: Changes) -> tuple[tuple[StageLengths, ...], ...]:
    if parts.stages == 2:
        return ()
    before = _layers_before(parts, changes)
    layer = _layer_times(parts, before)
    fastest, slowest = min(layer, key=sum), max(layer, key=sum)
    return tuple(_with_layers(parts, changes, before, [extreme] * parts.stages) for extreme in (fastest, slowest))


def _share_beyond_forward(times: _StageTimes) -> float:
    backward = times.backward - times.recompute
    return min(max(1 - times.forward / backward, 0.0), 1.0) if backward > 0 else 0.0


def _repeated_without_ends(
    parts: PipelineParts, lengths: tuple[StageLengths, ...]
) -> tuple[tuple[StageLengths, ...], ...]:
    if parts.stages < 3:
        return ()
    forwards = [_times_of_stage(parts, stage).forward for stage in range(parts.stages)]
    shares = [time / whole for time, whole in zip(_without_ends(forwards), forwards, strict=True)]
    return (tuple(replace(of_stage, repeated=share) for of_stage, share in zip(lengths, shares, strict=True)),)


def _times_of_stage(parts: PipelineParts, stage: int) -> _StageTimes:
    forward = backward = recompute = 0.0
    for pipeline in parts.pipelines:
        for lane in parts.lanes[pipeline[stage]]:
            recompute += float(lane.recompute_ns.sum())
            for action, busy in lane.busy_of().items():
                if action.letter == FORWARD:
                    forward += busy
                else:
                    backward += busy
    return _StageTimes(forward, backward, recompute)


def _times_by_microbatch(parts: PipelineParts, stage: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the forward and backward of each microbatch on a stage, ns, means over steps and replicas."""
    lanes = [lane for pipeline in parts.pipelines for lane in parts.lanes[pipeline[stage]]]
    totals = dict.fromkeys(lanes[0].microbatches, 0.0)
    for lane in lanes:
        for action, busy in lane.busy_of().items():
            totals[action.microbatch] = totals.get(action.microbatch, 0.0) + busy
    return np.array([totals[number] for number in sorted(totals)]) / len(lanes)
