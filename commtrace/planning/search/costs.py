"""The costs of a recorded run by part of the model: what one layer, the embedding and the output layer take.

They follow from the forwards and backwards of each stage, as the model of the run's steps has them. A stage without the
embedding and the output layer shows what a layer takes; the other two are what is left of the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.communication.table import communication_table
from commtrace.analysis.prediction.parts import LaneParts, PipelineParts
from commtrace.analysis.prediction.predict import StepModel
from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.pipeline_time import PAIRS, ChunkTimes, Gaps, pipeline_ns
from commtrace.planning.search.links import Links, measured_links
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.schedule import FORWARD

_PARALLEL_NAMES: Final = {"tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp", "vpp": "chunks"}


class PartTimes(NamedTuple):
    """One microbatch in the parts of a model on one rank."""

    layer: ChunkTimes
    embedding: ChunkTimes  # what the first stage takes on top of its layers
    output: ChunkTimes  # likewise, the last one

    def chunk(self, layers: int, *, is_first: bool, is_last: bool) -> ChunkTimes:
        """Return the times of a model chunk."""
        times = []
        for layer, embedding, output in zip(*self, strict=True):
            times.append(layers * layer + is_first * embedding + is_last * output)
        return ChunkTimes(*times)


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """How messages pass between stages, ns."""

    transfer_ns: float = 0.0
    send_delay_ns: float = 0.0  # from the end of an action until its message is sent
    received_early: bool = False  # while their receiver works


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What a run measured, per microbatch and rank, on the slowest of its pipelines: the others wait for it.

    Times of parts are without recomputation.
    """

    model: Model
    layout: Layout  # of the run
    gpus_per_node: int
    parts: PartTimes  # work, without communication
    links: Links
    optimizer_ns: int  # of the slowest rank, in a step
    step_ns: int
    modelled_ns: int  # the step that the model of the run makes of these parts
    deviation_ns: float  # standard deviation of the steps
    num_steps: int
    notes: tuple[str, ...] = ()  # what was taken for granted, in sentences
    with_communication: PartTimes | None = None  # the same parts with what they waited for, other than messages
    stages: tuple[tuple[ChunkTimes, ...], ...] = ()  # whole chunks of each stage as they are; empty: from the parts
    layers: tuple[ChunkTimes, ...] = ()  # a layer of each stage with what it waited for; empty: from the parts
    gaps: tuple[Gaps, ...] = ()  # of each stage; empty: none
    messages: MessageTimes | None = None  # None: from the bandwidth of the links
    tail_ns: int | None = None  # behind the last backward; None: gradients, optimizer and what is missing of the step
    stretch: float = 1.0  # a pipeline whose microbatches differ, by one of which each takes the mean time
    steps: StepModel | None = None  # which answers for the layout of the run itself

    @property
    def step_scatter(self) -> float:
        """Return the standard deviation of the steps over their mean."""
        return self.deviation_ns / self.step_ns


class _ChunkLayers(NamedTuple):
    """A model chunk of a stage, in the order of the layers."""

    layers: int
    times: ChunkTimes


def measure_costs(steps: StepModel, model: Model, layout: Layout) -> RunCosts:
    """Return the costs of a run of ``model`` in ``layout``.

    Raises:
        ConfigurationError: the run has another layout, or nothing from which the costs follow.
    """
    run = steps.recorded.run
    layout.check(model)
    if layout.zero_stage is not None:
        raise ConfigurationError("only jobs of Megatron-LM are searched: DeepSpeed's communication is not known here")
    if model.experts and model.moe_every > 1:
        raise ConfigurationError("layers with and without experts differ: their costs do not follow from whole stages")
    _check_layout(run, layout)
    parts = steps.parts
    for name, recorded, given in (
        ("pp", parts.stages, layout.pp),
        ("chunks", parts.chunks, layout.chunks),
        ("microbatches", parts.microbatches, layout.microbatches),
    ):
        if recorded != given:
            raise ConfigurationError(_of_another_run(name, recorded, given))
    pipelines = [_Pipeline.of(parts, pipeline) for pipeline in parts.pipelines]
    messages = _messages(parts)
    phases = [each.phase_ns(layout.microbatches, messages) for each in pipelines]
    slowest = pipelines[int(np.argmax(phases))]
    phase_ns, modelled_ns = float(steps.rebuilt.phase_ns.mean()), float(steps.rebuilt.step_ns.mean())
    measured = steps.recorded.measured_ns()
    notes: list[str] = []
    work = _solve(_parts(slowest.work, model, layout), model, notes)
    whole = _solve(_parts(slowest.chunks, model, layout), model, [])
    layers = [_layer(chunks, whole, model, layout, stage) for stage, chunks in enumerate(slowest.chunks)]
    near = steps.analysis.context
    table = communication_table(near.run, near.matches, steps.analysis.partition, near.roles, near.steps)
    return RunCosts(
        model=model,
        layout=layout,
        gpus_per_node=_gpus_per_node(run),
        parts=_without_recomputation(work, model, layout),
        links=measured_links(table),
        optimizer_ns=_optimizer_ns(steps),
        step_ns=round(float(measured.mean())),
        modelled_ns=round(modelled_ns),
        deviation_ns=float(np.std(measured, ddof=1)) if len(measured) > 1 else 0.0,
        num_steps=len(measured),
        notes=tuple(notes),
        with_communication=_without_recomputation(whole, model, layout),
        stages=slowest.chunks,
        layers=tuple(_without_recomputation(whole._replace(layer=layer), model, layout).layer for layer in layers),
        gaps=slowest.gaps,
        messages=messages if layout.pp > 1 else None,
        tail_ns=round(modelled_ns - phase_ns),
        stretch=phase_ns / max(phases),
        steps=steps,
    )


class _Pipeline(NamedTuple):
    """The stages of one pipeline: means over steps and microbatches."""

    chunks: tuple[tuple[ChunkTimes, ...], ...]
    work: tuple[tuple[ChunkTimes, ...], ...]  # the same without communication
    gaps: tuple[Gaps, ...]

    @classmethod
    def of(cls, parts: PipelineParts, pipeline: Sequence[int]) -> _Pipeline:
        stages = [parts.lanes[rank] for rank in pipeline]
        return cls(
            tuple(_chunk_times(lanes, parts.chunks, is_work=False) for lanes in stages),
            tuple(_chunk_times(lanes, parts.chunks, is_work=True) for lanes in stages),
            tuple(_gaps(lanes) for lanes in stages),
        )

    def phase_ns(self, microbatches: int, messages: MessageTimes) -> int:
        return schedule_ns(self.chunks, microbatches, messages, self.gaps)


def schedule_ns(
    stages: Sequence[Sequence[ChunkTimes]], microbatches: int, messages: MessageTimes, gaps: Sequence[Gaps] = ()
) -> int:
    """Return the time of a pipeline all of whose messages take the same time."""
    return pipeline_ns(
        stages,
        microbatches,
        [round(messages.transfer_ns)] * len(stages),
        gaps,
        [round(messages.send_delay_ns)] * len(stages),
        receives_early=messages.received_early,
    )


def _chunk_times(lanes: Sequence[LaneParts], chunks: int, *, is_work: bool) -> tuple[ChunkTimes, ...]:
    """Return what each chunk of a stage takes, given its steps; a backward is all parts of it."""
    times = []
    for chunk in range(chunks):
        sums = [0, 0]
        for lane in lanes:
            busy = lane.busy_ns - lane.waited_ns if is_work else lane.busy_ns
            for action, ns in zip(lane.actions, busy.tolist(), strict=True):
                if action.chunk == chunk:
                    sums[action.letter != FORWARD] += ns
        microbatches = sum(len(lane.microbatches) for lane in lanes)
        times.append(ChunkTimes(*(round(total / microbatches) for total in sums)))
    return tuple(times)


def _gaps(lanes: Sequence[LaneParts]) -> Gaps:
    means = [lane.mean_gaps(PAIRS) for lane in lanes]
    return Gaps(
        fmean(float(lane.gap_ns[0]) for lane in lanes),
        {pair: max(fmean(of_step[pair] for of_step in means), 0.0) for pair in PAIRS},
    )


def _messages(parts: PipelineParts) -> MessageTimes:
    return MessageTimes(parts.mean_transfer_ns, float(parts.send_delay_ns.mean()), parts.receives_early)


def _optimizer_ns(steps: StepModel) -> int:
    """Return the optimizer's work in a step on the slowest rank, without what it waited for."""
    longest = 0.0
    for index, rank in enumerate(steps.recorded.ranks.tolist()):
        spans = steps.recorded.run.ranks[rank].spans
        worked = []
        for at, number in enumerate(steps.recorded.steps.tolist()):
            rows = np.flatnonzero((spans.kind == schema.OPTIMIZER) & (spans.step == number))
            begins_step = int(steps.recorded.lanes.step_start[index, at])
            begin, end = spans.start[rows] - begins_step, spans.end[rows] - begins_step
            lane = steps.parts.lanes[index][at].lane
            worked.append(float((end - begin - lane.waited_ns(begin, end)).sum()))
        longest = max(longest, fmean(worked))
    return round(longest)


def attention_share(model: Model) -> float:
    """Return the share of a layer's FLOPs that is in attention scores, which selective recomputation does again.

    With 2 FLOPs for each multiply-add, a token has 2·P in the P parameters of a layer, and 4·s·heads·head_size with the
    other tokens.
    """
    scores = 4 * model.sequence * model.heads * model.head_size
    return scores / (scores + 2 * _layer_parameters(model))


def _layer_parameters(model: Model) -> int:
    """Return the matrices of a layer that a token uses."""
    query, key_value = model.heads * model.head_size, model.query_groups * model.head_size
    matrices = 3 if model.gated else 2
    mlp = model.experts_per_token * model.expert_ffn if model.experts else model.ffn
    return model.hidden * (2 * query + 2 * key_value + matrices * mlp)


def _check_layout(run: Run, layout: Layout) -> None:
    parallel: Mapping[str, int] = next(iter(run.ranks.values())).parallel
    for name, field in _PARALLEL_NAMES.items():
        recorded, given = parallel.get(name), getattr(layout, field)
        if recorded not in (None, 0, given):
            raise ConfigurationError(_of_another_run(name, recorded, given))
    world_size = max(trace.metadata.world_size for trace in run.ranks.values())
    if world_size != layout.world_size:
        raise ConfigurationError(
            f"the run has {world_size} ranks, the job that was given with it {layout.world_size}: give its own job"
        )


def _of_another_run(name: str, recorded: int, given: int) -> str:
    return f"the run has {name} {recorded}, the job that was given with it {given}: give the job of this run"


def _parts(stages: Sequence[Sequence[ChunkTimes]], model: Model, layout: Layout) -> list[_ChunkLayers]:
    """Return the chunks of all stages in the order of the layers."""
    return [
        _ChunkLayers(len(layout.stage_layers(model, stage)[chunk]), stages[stage][chunk])
        for chunk in range(layout.chunks)
        for stage in range(layout.pp)
    ]


def _solve(parts: Sequence[_ChunkLayers], model: Model, notes: list[str]) -> PartTimes:
    """Return the times of a layer, the embedding and the output layer."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        # the output layer is taken to be as fast as the layers, by FLOPs
        ratio = (
            model.hidden
            * model.vocabulary
            / (_layer_parameters(model) + 2 * model.sequence * model.heads * model.head_size)
        )
        layer = _map(lambda values: values[0] / (first.layers + ratio), [first.times])
        notes.append(
            "The run has one stage: the output layer is taken to be as fast as the others, by FLOPs, and the embedding "
            "to take no time. A run with pp · chunks of 3 or more measures them."
        )
        return PartTimes(layer, ChunkTimes(0, 0), _map(lambda values: values[0] * ratio, [layer]))
    inner = parts[1:-1] or parts[:1]
    layers = sum(part.layers for part in inner)
    layer = _map(lambda values: sum(values) / layers, [part.times for part in inner])
    if len(parts) == 2:
        notes.append(
            "The run has no stage without embedding and output layer: the embedding is taken to take no time, and what "
            "the last stage takes on top of its layers to be the output layer. A run with pp · chunks of 3 or more "
            "measures both."
        )
        return PartTimes(layer, ChunkTimes(0, 0), _rest(last, layer))
    return PartTimes(layer, _rest(first, layer), _rest(last, layer))


def _map(combine: Callable[[tuple[int, ...]], float], times: Sequence[ChunkTimes]) -> ChunkTimes:
    return ChunkTimes(*(round(combine(values)) for values in zip(*times, strict=True)))


def _rest(part: _ChunkLayers, layer: ChunkTimes) -> ChunkTimes:
    """Return what a part takes on top of its layers; less than none is noise."""
    return ChunkTimes(
        *(max(stage_ns - part.layers * layer_ns, 0) for stage_ns, layer_ns in zip(part.times, layer, strict=True))
    )


def recomputed_ns(layer: ChunkTimes, model: Model, recompute: str) -> int:
    """Return the time of the forward that is done again in the backward of a layer."""
    share = {"none": 0.0, "selective": attention_share(model), "full": 1.0}[recompute]
    return round(layer.forward_ns * share)


def _layer(chunks: Sequence[ChunkTimes], parts: PartTimes, model: Model, layout: Layout, stage: int) -> ChunkTimes:
    """Return a layer of a stage: what its chunks take without the embedding and the output layer, by their layers."""
    layers = sum(map(len, layout.stage_layers(model, stage)))
    ends = parts.chunk(0, is_first=stage == 0, is_last=stage == layout.pp - 1)
    total = _map(sum, chunks)
    return ChunkTimes(*(round(max(ns - end, 0) / layers) for ns, end in zip(total, ends, strict=True)))


def _without_recomputation(parts: PartTimes, model: Model, layout: Layout) -> PartTimes:
    layer = parts.layer
    again = recomputed_ns(layer, model, layout.recompute)
    return parts._replace(layer=ChunkTimes(layer.forward_ns, max(layer.backward_ns - again, 0)))


def _gpus_per_node(run: Run) -> int:
    nodes: dict[str, int] = {}
    for trace in run.ranks.values():
        nodes[trace.metadata.node] = nodes.get(trace.metadata.node, 0) + 1
    return max(nodes.values())
