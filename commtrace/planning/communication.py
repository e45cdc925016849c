"""The communication of Megatron-core in one iteration: every operation of a rank, its count and its bytes.

The formulas are those that real ranks were counted to follow, unless ``basis`` says otherwise. Bytes on the wire are
those of ring algorithms, of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, Literal, TypeAlias

from commtrace.analysis.communication.bandwidth import bus_factor
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model, padded
from commtrace.planning.parameters import Parameter, chunk_parameters, stage_parameters
from commtrace.trace.json_values import JsonObject, fields_to_json

When: TypeAlias = Literal["forward", "backward", "step"]
"""``step``: once in an iteration, after the backward of the last microbatch or around the optimizer."""

Basis: TypeAlias = Literal["counted", "source", "estimate"]
"""Where a row's count and bytes come from: ranks that ran, Megatron-core's source, or even routing to experts."""

GRADIENT_NORM: Final = "gradient norm"

_NORM_BYTES: Final = 4
_PARAMETER_ALIGNMENT: Final = 64  # elements
_BUCKET_ALIGNMENT: Final = 128
_MIN_BUCKET_ELEMENTS: Final = 40_000_000
_BUCKET_ELEMENTS_PER_RANK: Final = 1_000_000
_LOSS_BYTES: Final = 4  # of each token: the cross entropy is computed in fp32


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of communication of a rank in one iteration."""

    role: str  # of the process group
    operation: str
    what: str
    when: When
    count: int
    bytes_per_call: int  # of the full tensor
    group_size: int
    basis: Basis = "counted"

    @property
    def tensor_bytes(self) -> int:
        return self.count * self.bytes_per_call

    @property
    def wire_bytes(self) -> int:
        """Bytes that the rank sends, with a ring; a receive sends nothing."""
        if self.operation == "recv":
            return 0
        return round(self.tensor_bytes * bus_factor(self.operation, self.group_size))

    def to_json(self) -> JsonObject:
        totals: JsonObject = {"tensor_bytes": self.tensor_bytes, "wire_bytes": self.wire_bytes}
        return {**fields_to_json(self), **totals}


def stage_traffic(model: Model, layout: Layout, stage: int) -> tuple[Traffic, ...]:
    """Return the communication of each rank of a stage, in Megatron-core.

    Raises:
        ValueError: the layout is one of DeepSpeed.
    """
    if layout.zero_stage is not None:
        raise ValueError("DeepSpeed's communication follows other rules")
    parts = (_tensor_parallel, _context_parallel, _expert_parallel, _pipeline, _gradients, _optimizer)
    return tuple(row for part in parts for row in part(model, layout, stage) if row.count)


def _hidden_bytes(model: Model, layout: Layout) -> int:
    """Return S: the hidden states of one microbatch."""
    return layout.parameter_bytes * (model.sequence // layout.cp) * layout.microbatch * model.hidden


def _layers(model: Model, layout: Layout, stage: int) -> list[int]:
    return [layer for chunk in layout.stage_layers(model, stage) for layer in chunk]


def _tensor_parallel(model: Model, layout: Layout, stage: int) -> Iterator[Traffic]:
    m, tp = layout.microbatches, layout.tp
    is_first, is_last = stage == 0, stage == layout.pp - 1
    hidden_bytes = _hidden_bytes(model, layout)
    layers = _layers(model, layout, stage)
    # the experts of a layer communicate through their dispatcher, so that only the attention is left
    blocks = m * sum(1 if model.has_experts(layer) else 2 for layer in layers)

    def row(operation: str, what: str, when: When, count: int, num_bytes: int, basis: Basis = "counted") -> Traffic:
        return Traffic("tp", operation, what, when, count, num_bytes, tp, basis)

    if tp > 1 and not layout.sequence_parallel:
        yield row("all_reduce", "layers", "forward", blocks, hidden_bytes)
        yield row("all_reduce", "layers", "backward", blocks, hidden_bytes)
        yield row("all_reduce", "embedding", "forward", m * is_first, hidden_bytes)
        yield row("all_reduce", "output layer", "backward", m * is_last, hidden_bytes)
        if layout.recompute == "full":
            yield row("all_reduce", "recomputed layers", "backward", blocks, hidden_bytes, "source")
    if tp > 1 and layout.sequence_parallel:
        yield row("all_gather", "layers", "forward", blocks, hidden_bytes)
        yield row("all_gather", "layers", "backward", 2 * blocks, hidden_bytes)
        yield row("all_gather", "output layer", "forward", m * is_last, hidden_bytes)
        yield row("all_gather", "output layer", "backward", m * is_last, hidden_bytes)
        yield row("all_gather", "embedding", "backward", m * is_first, hidden_bytes)
        yield row("reduce_scatter", "layers", "forward", blocks, hidden_bytes)
        yield row("reduce_scatter", "layers", "backward", blocks, hidden_bytes)
        yield row("reduce_scatter", "output layer", "backward", m * is_last, hidden_bytes)
        # learned positions are added before the sequence is divided
        embedding = "all_reduce" if model.positions == "learned" else "reduce_scatter"
        yield row(embedding, "embedding", "forward", m * is_first, hidden_bytes)
        if layout.recompute == "full":
            yield row("all_gather", "recomputed layers", "backward", blocks, hidden_bytes, "source")
            yield row("reduce_scatter", "recomputed layers", "backward", blocks, hidden_bytes, "source")
        parts = [part for part in stage_parameters(model, layout, stage) if part.is_sequence_parallel]
        gradient_bytes = layout.gradient_bytes * sum(part.elements for part in parts)
        yield row("all_reduce", "norm and bias gradients", "step", 1, gradient_bytes)
    if is_last:  # also where the group has only one rank
        loss_bytes = _LOSS_BYTES * (model.sequence // layout.cp) * layout.microbatch
        if layout.fused_cross_entropy:
            yield row("all_reduce", "cross entropy", "forward", m, loss_bytes)
            yield row("all_reduce", "cross entropy", "forward", m, 2 * loss_bytes)
        else:
            yield row("all_reduce", "cross entropy", "forward", 3 * m, loss_bytes)


def _context_parallel(model: Model, layout: Layout, stage: int) -> Iterator[Traffic]:
    cp, attentions = layout.cp, layout.microbatches * len(_layers(model, layout, stage))
    if cp == 1 or layout.cp_communication == "other":
        return
    tokens = (model.sequence // cp) * layout.microbatch
    if layout.cp_communication == "all_to_all":
        heads_bytes = layout.parameter_bytes * tokens * model.heads * model.head_size // layout.tp
        phases: tuple[When, ...] = ("forward", "backward")
        for when in phases:
            yield Traffic("cp", "all_to_all", "attention", when, 4 * attentions, heads_bytes, cp, "source")
        return
    # keys and values go around the ring; in the backward with their gradients, but for the first and the last message
    block_bytes = 2 * layout.parameter_bytes * tokens * model.query_groups * model.head_size // layout.tp
    for operation in ("send", "recv"):
        yield Traffic("cp", operation, "keys, values", "forward", (cp - 1) * attentions, block_bytes, cp, "source")
        yield Traffic("cp", operation, "keys, values", "backward", 2 * attentions, block_bytes, cp, "source")
        both = "keys, values, gradients"
        yield Traffic("cp", operation, both, "backward", (cp - 2) * attentions, 2 * block_bytes, cp, "source")


def _expert_parallel(model: Model, layout: Layout, stage: int) -> Iterator[Traffic]:
    layers = sum(model.has_experts(layer) for layer in _layers(model, layout, stage))
    tp_ep = layout.expert_tp * layout.ep
    if not layers or tp_ep == 1 or layout.expert_dispatcher == "other":
        return
    calls = layers * layout.microbatches
    yield Traffic("tp-ep", "all_gather", "tokens per expert", "forward", calls, 8 * model.experts * tp_ep, tp_ep)
    copies = model.sequence * layout.microbatch * model.experts_per_token // (layout.tp * layout.cp)
    probability_bytes = layout.parameter_bytes * copies
    token_bytes = probability_bytes * model.hidden
    phases: tuple[When, ...] = ("forward", "backward")
    if layout.ep > 1:
        for when in phases:
            yield Traffic("ep", "all_to_all", "tokens", when, 2 * calls, token_bytes, layout.ep, "estimate")
            yield Traffic("ep", "all_to_all", "probabilities", when, calls, probability_bytes, layout.ep, "estimate")
    if layout.expert_tp > 1:  # the ranks that divide an expert gather its tokens, and add up their parts of its output
        size = layout.expert_tp
        for when in phases:
            for operation in ("all_gather", "reduce_scatter"):
                yield Traffic("expert-tp", operation, "tokens", when, calls, size * token_bytes, size, "estimate")
            operation = "all_gather" if when == "forward" else "reduce_scatter"
            gathered_bytes = size * probability_bytes
            yield Traffic("expert-tp", operation, "probabilities", when, calls, gathered_bytes, size, "estimate")


def _pipeline(model: Model, layout: Layout, stage: int) -> Iterator[Traffic]:
    if layout.pp == 1:
        return
    m, calls = layout.microbatches, layout.microbatches * layout.chunks
    message_bytes = _hidden_bytes(model, layout) // (layout.tp if layout.sequence_parallel else 1)
    after, before = calls - m * (stage == layout.pp - 1), calls - m * (stage == 0)
    activations, gradients = "activations", "gradients"
    yield Traffic("pp", "send", activations, "forward", after, message_bytes, layout.pp)
    yield Traffic("pp", "recv", activations, "forward", before, message_bytes, layout.pp)
    yield Traffic("pp", "send", gradients, "backward", before, message_bytes, layout.pp)
    yield Traffic("pp", "recv", gradients, "backward", after, message_bytes, layout.pp)


def _gradients(model: Model, layout: Layout, stage: int) -> Iterator[Traffic]:
    """Yield what data parallel ranks and the two ends of a tied embedding exchange, after the last microbatch."""
    for chunk in range(layout.chunks):
        parameters = chunk_parameters(model, layout, stage, chunk)
        is_divided = layout.overlap_gradients and stage == chunk == 0
        for role, is_expert, size in (
            ("dp-cp", False, layout.data_copies),
            ("expert-dp", True, layout.expert_data_copies),
        ):
            chosen = [parameter for parameter in parameters if parameter.is_expert == is_expert]
            for elements in bucket_elements(chosen, layout, size, is_divided):
                gradient_bytes = layout.gradient_bytes * elements
                if not layout.distributed_optimizer:
                    yield Traffic(role, "all_reduce", "gradients", "step", 1, gradient_bytes, size)
                    continue
                yield Traffic(role, "reduce_scatter", "gradients", "step", 1, gradient_bytes, size)
                yield Traffic(role, "all_gather", "parameters", "step", 1, layout.parameter_bytes * elements, size)
    if model.tied_embeddings and layout.pp > 1 and stage in (0, layout.pp - 1):
        embedding_bytes = layout.gradient_bytes * (model.vocabulary // layout.tp) * model.hidden
        yield Traffic("embedding", "all_reduce", "gradients", "step", 1, embedding_bytes, 2)


def _optimizer(model: Model, layout: Layout, stage: int) -> Iterator[Traffic]:
    """Yield the all-reduce of the squared norm of all gradients, over which the distributed optimizer's shards lie."""
    role, size = ("dist-opt", layout.world_size) if layout.distributed_optimizer else ("mp", layout.tp * layout.pp)
    yield Traffic(role, "all_reduce", GRADIENT_NORM, "step", int(layout.clip_gradients), _NORM_BYTES, size)


def bucket_elements(
    parameters: Sequence[Parameter], layout: Layout, group_size: int, is_divided: bool
) -> tuple[int, ...]:
    """Return the elements of each bucket of gradients, with padding, as Megatron-core's DDP fills them.

    Args:
        parameters: Those of one model chunk, of experts or not, in the order of the modules.
        group_size: Data parallel ranks.
        is_divided: Whether buckets have a largest size; else there is one, and one for each shared embedding.
    """
    largest = layout.bucket_elements or max(_MIN_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * group_size)
    buckets, filled = [], 0
    for parameter in reversed(parameters):
        is_alone = parameter.is_shared_embedding and layout.distributed_optimizer
        if is_alone and filled:
            buckets.append(filled)
            filled = 0
        if layout.distributed_optimizer:
            filled = padded(filled, _PARAMETER_ALIGNMENT)
        filled += parameter.elements
        if is_alone or (is_divided and filled >= largest):
            buckets.append(filled)
            filled = 0
    if filled:
        buckets.append(filled)
    if not layout.distributed_optimizer:
        return tuple(buckets)
    return tuple(padded(elements, lcm(group_size, _BUCKET_ALIGNMENT)) for elements in buckets)


def total_bytes(traffic: Iterable[Traffic]) -> tuple[int, int]:
    """Return the tensor bytes, a message counted where it is sent, and the bytes on the wire."""
    rows = [row for row in traffic if row.operation != "recv"]
    return sum(row.tensor_bytes for row in rows), sum(row.wire_bytes for row in rows)
