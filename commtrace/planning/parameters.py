"""The parameter tensors of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from commtrace.planning.layout import Layout
from commtrace.planning.model import Model

_EXPERTS: Final = "experts"


class Parameter(NamedTuple):
    """A parameter tensor of one rank."""

    part: str  # embedding, norm, attention, mlp, router, experts, output
    elements: int  # on this rank
    copies: int = 1  # tensors of this kind that differ, over the tensor and expert parallel ranks
    is_expert: bool = False  # of experts on other ranks than the rest: its data parallel ranks are its own
    is_shared_embedding: bool = False
    is_sequence_parallel: bool = False  # each rank has the gradient of its part of the sequence only


class Elements(NamedTuple):
    """How many elements the parameters of one rank have."""

    dense: int
    expert: int  # of those that are ``is_expert``


def chunk_parameters(model: Model, layout: Layout, stage: int, chunk: int) -> tuple[Parameter, ...]:
    """Return the parameters of one model chunk of a rank, in the order of Megatron-core's modules (local layers).

    Their sizes are those of the matrices; that order decides how buckets of gradients are filled.
    """
    return tuple(_chunk_parameters(model, layout, stage, chunk, model.experts // layout.ep))


def _chunk_parameters(model: Model, layout: Layout, stage: int, chunk: int, experts: int) -> Iterator[Parameter]:
    is_first = stage == chunk == 0
    is_last = (stage, chunk) == (layout.pp - 1, layout.chunks - 1)
    is_shared = model.tied_embeddings and layout.pp > 1
    word_embedding = model.vocabulary // layout.tp * model.hidden
    if is_first:
        yield Parameter("embedding", word_embedding, layout.tp, is_shared_embedding=is_shared)
        if model.positions == "learned":
            yield Parameter("embedding", model.max_positions * model.hidden)
    for layer in layout.stage_layers(model, stage)[chunk]:
        yield from _layer_parameters(model, layout, layer, experts)
    if is_last:
        yield from _norm(model)
        if not model.tied_embeddings:
            yield Parameter("output", word_embedding, layout.tp)
        elif is_shared:
            yield Parameter("output", word_embedding, layout.tp, is_shared_embedding=True)


def _layer_parameters(model: Model, layout: Layout, layer: int, experts: int) -> Iterator[Parameter]:
    tp = layout.tp
    query, key_value = model.heads * model.head_size, model.query_groups * model.head_size
    yield from _norm(model)
    yield Parameter("attention", query // tp * model.hidden, tp)
    if model.linear_bias:
        yield Parameter("attention", model.hidden, is_sequence_parallel=True)
    yield Parameter("attention", (query + 2 * key_value) // tp * model.hidden, tp)
    if model.qkv_bias:
        yield Parameter("attention", (query + 2 * key_value) // tp, tp)
    yield from _norm(model)
    if model.has_experts(layer):
        yield Parameter("router", model.experts * model.hidden, is_sequence_parallel=True)
        for _ in range(experts):
            yield from _mlp(model, _EXPERTS, model.expert_ffn, layout.expert_tp, layout.ep)
    else:
        yield from _mlp(model, "mlp", model.ffn, tp)


def _norm(model: Model) -> Iterator[Parameter]:
    for _ in range(2 if model.normalization == "LayerNorm" else 1):
        yield Parameter("norm", model.hidden, is_sequence_parallel=True)


def _mlp(model: Model, part: str, ffn: int, tp: int, ep: int = 1) -> Iterator[Parameter]:
    # Megatron-core reduces the gradients of experts with all others unless ep divides the experts
    is_expert = ep > 1
    columns = ffn // tp * (2 if model.gated else 1)
    yield Parameter(part, columns * model.hidden, tp * ep, is_expert)
    if model.linear_bias:
        yield Parameter(part, columns, tp * ep, is_expert)
    yield Parameter(part, ffn // tp * model.hidden, tp * ep, is_expert)
    if model.linear_bias:
        yield Parameter(part, model.hidden, ep, is_expert, is_sequence_parallel=part != _EXPERTS)


def stage_parameters(model: Model, layout: Layout, stage: int) -> tuple[Parameter, ...]:
    """Return the parameters of all chunks of one rank of a stage."""
    chunks = range(layout.chunks)
    return tuple(parameter for chunk in chunks for parameter in chunk_parameters(model, layout, stage, chunk))


def stage_elements(model: Model, layout: Layout, stage: int) -> Elements:
    """Return how many elements the parameters of one rank of a stage have."""
    dense = expert = 0
    for parameter, number in _counted(model, layout, stage):
        if parameter.is_expert:
            expert += parameter.elements * number
        else:
            dense += parameter.elements * number
    return Elements(dense, expert)


def _counted(model: Model, layout: Layout, stage: int) -> Iterator[tuple[Parameter, int]]:
    """Yield the parameters of a stage with how many there are: of a layer's experts, which are alike, those of one."""
    experts = model.experts // layout.ep
    for chunk in range(layout.chunks):
        for parameter in _chunk_parameters(model, layout, stage, chunk, experts=1):
            yield parameter, experts if parameter.part == _EXPERTS else 1


def model_parameters(model: Model, layout: Layout) -> int:
    """Return the number of parameters of the model; a tied embedding counts once."""
    return sum(
        parameter.elements * parameter.copies * number
        for stage in range(layout.pp)
        for parameter, number in _counted(model, layout, stage)
        if not (parameter.part == "output" and model.tied_embeddings)
    )
