"""The costs of a recorded run by part of the model: what one layer, the embedding and the output layer take.

They follow from the forwards and backwards of each stage, without what these waited for. A stage without the embedding
and the output layer shows what a layer takes; the other two are what is left of the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.table import communication_table
from commtrace.analysis.replay.program import stage_of
from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.search.links import Links, measured_links
from commtrace.search.pipeline_time import ChunkTimes
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64

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
class RunCosts:
    """What a run measured, per microbatch and rank. Times without communication, and without recomputation."""

    model: Model
    layout: Layout  # of the run
    gpus_per_node: int
    parts: PartTimes
    links: Links
    optimizer_ns: int  # of the slowest rank, in a step
    step_ns: int
    step_scatter: float  # standard deviation of the steps over their mean
    notes: tuple[str, ...]  # what was taken for granted, in sentences


class _Part(NamedTuple):
    """A model chunk of a stage, in the order of the layers."""

    layers: int
    times: ChunkTimes


def measure_costs(analysis: Analysis, model: Model, layout: Layout) -> RunCosts:
    """Return the costs of a run of ``model`` in ``layout``.

    Raises:
        ConfigurationError: the run has another layout, or nothing from which the costs follow.
    """
    run = analysis.run
    layout.check(model)
    if layout.zero_stage is not None:
        raise ConfigurationError("only jobs of Megatron-LM are searched: DeepSpeed's communication is not known here")
    if model.experts and model.moe_every > 1:
        raise ConfigurationError("layers with and without experts differ: their costs do not follow from whole stages")
    _check_layout(run, layout)
    steps_ns = _step_durations(run)
    if not steps_ns:
        raise ConfigurationError("the run has no whole step: record more than the warm-up, or choose --steps")
    notes: list[str] = []
    parts = _solve(_parts(run, model, layout), model, notes)
    near = analysis.context
    table = communication_table(near.run, near.matches, analysis.partition, near.roles, near.steps)
    return RunCosts(
        model=model,
        layout=layout,
        gpus_per_node=_gpus_per_node(run),
        parts=_without_recomputation(parts, model, layout),
        links=measured_links(table),
        optimizer_ns=max(_work_per_step(trace, schema.OPTIMIZER) for trace in run.ranks.values()),
        step_ns=round(fmean(steps_ns)),
        step_scatter=pstdev(steps_ns) / fmean(steps_ns),
        notes=tuple(notes),
    )


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
            raise ConfigurationError(
                f"the run has {name} {recorded}, the job that was given with it {given}: give the job of this run"
            )
    world_size = max(trace.metadata.world_size for trace in run.ranks.values())
    if world_size != layout.world_size:
        raise ConfigurationError(
            f"the run has {world_size} ranks, the job that was given with it {layout.world_size}: give its own job"
        )


def _step_durations(run: Run) -> list[float]:
    """Return the durations of the steps, each of its slowest rank."""
    longest: dict[int, int] = {}
    for trace in run.ranks.values():
        spans = trace.spans
        rows = np.flatnonzero(spans.kind == schema.STEP)
        for step, ns in zip(spans.step[rows].tolist(), (spans.end[rows] - spans.start[rows]).tolist(), strict=True):
            longest[step] = max(longest.get(step, 0), ns)
    return [float(ns) for ns in longest.values()]


def _parts(run: Run, model: Model, layout: Layout) -> list[_Part]:
    """Return the chunks of all stages in the order of the layers, means over their ranks and microbatches."""
    sums: dict[tuple[int, int, int], list[float]] = {}
    for trace in run.ranks.values():
        stage = stage_of(trace)
        for kind in (schema.FORWARD, schema.BACKWARD):
            rows = np.flatnonzero(trace.spans.kind == kind)
            worked = _worked_ns(trace, rows)
            chunks = np.maximum(trace.spans.chunk[rows], 0)
            for chunk in range(layout.chunks):
                own = worked[chunks == chunk]
                # a forward may be several rows (zero bubble has two for a backward): sums are of all microbatches
                microbatches = len(np.unique(_numbers(trace, rows)[chunks == chunk]))
                if not microbatches:
                    name = schema.KINDS[kind]
                    raise ConfigurationError(
                        f"rank {trace.rank} (stage {stage}) recorded no {name} of chunk {chunk}: costs of a layer do "
                        "not follow from this run"
                    )
                sums.setdefault((chunk, stage, kind), []).append(float(own.sum()) / microbatches)
    found = []
    for chunk in range(layout.chunks):
        for stage in range(layout.pp):
            if (chunk, stage, schema.FORWARD) not in sums:
                raise ConfigurationError(f"no rank of stage {stage} was recorded: its costs are not known")
            forward, backward = (fmean(sums[chunk, stage, kind]) for kind in (schema.FORWARD, schema.BACKWARD))
            layers = len(layout.stage_layers(model, stage)[chunk])
            found.append(_Part(layers, ChunkTimes(round(forward), round(backward))))
    return found


def _numbers(trace: RankTrace, rows: Int64) -> Int64:
    """Return a number for each microbatch of each step."""
    return trace.spans.step[rows].astype(np.int64) * (1 << 32) + trace.spans.microbatch[rows]


def _worked_ns(trace: RankTrace, rows: Int64) -> Int64:
    """Return the lengths of spans without the stalls inside them."""
    spans = trace.spans
    stalls = np.flatnonzero(spans.kind == schema.STALL)
    begins, ends = _united(spans.start[stalls], spans.end[stalls])
    total = np.concatenate([[0], np.cumsum(ends - begins)])

    def stalled_before(times: Int64) -> Int64:
        begun = np.searchsorted(begins, times)
        if not len(ends):
            return np.zeros(len(times), np.int64)
        return np.asarray(total[begun] - np.where(begun > 0, np.maximum(ends[begun - 1] - times, 0), 0))

    start, end = spans.start[rows], spans.end[rows]
    return np.asarray(end - start - (stalled_before(end) - stalled_before(start)))


def _united(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Return intervals, ascending by start, without their overlaps."""
    if not len(start):
        return start, end
    furthest = np.maximum.accumulate(end)
    is_new: Bool = np.concatenate([[True], start[1:] > furthest[:-1]])
    first = np.flatnonzero(is_new)
    return start[first], np.maximum.reduceat(end, first)


def _work_per_step(trace: RankTrace, kind: int) -> int:
    rows = np.flatnonzero(trace.spans.kind == kind)
    steps = max(int((trace.spans.kind == schema.STEP).sum()), 1)
    return round(float(_worked_ns(trace, rows).sum()) / steps)


def _solve(parts: Sequence[_Part], model: Model, notes: list[str]) -> PartTimes:
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


def _rest(part: _Part, layer: ChunkTimes) -> ChunkTimes:
    """Return what a part takes on top of its layers; less than none is noise."""
    return ChunkTimes(*(max(own - part.layers * each, 0) for own, each in zip(part.times, layer, strict=True)))


def recomputed_ns(layer: ChunkTimes, model: Model, recompute: str) -> int:
    """Return the time of the forward that is done again in the backward of a layer."""
    share = {"none": 0.0, "selective": attention_share(model), "full": 1.0}[recompute]
    return round(layer.forward_ns * share)


def _without_recomputation(parts: PartTimes, model: Model, layout: Layout) -> PartTimes:
    layer = parts.layer
    again = recomputed_ns(layer, model, layout.recompute)
    return parts._replace(layer=ChunkTimes(layer.forward_ns, max(layer.backward_ns - again, 0)))


def _gpus_per_node(run: Run) -> int:
    nodes: dict[str, int] = {}
    for trace in run.ranks.values():
        nodes[trace.metadata.node] = nodes.get(trace.metadata.node, 0) + 1
    return max(nodes.values())
