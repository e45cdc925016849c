"""Device memory of a rank: what is kept of each parameter, and the activations at their peak.

Not counted: the CUDA context, communication buffers, workspaces of libraries, and what the allocator loses to
fragmentation. So the numbers compare with ``torch.cuda.max_memory_allocated``, not with nvidia-smi.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.parameters import stage_elements
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.schedule import most_in_flight

MARGIN: Final = 0.05
"""Share of a GPU's memory that a plan should leave for what is not counted."""

_LOGIT_BYTES: Final = 4  # the loss is computed in fp32


class Activations(NamedTuple):
    """Activations of one part of the model on a rank, at the peak."""

    part: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank, in bytes."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations: tuple[Activations, ...]

    @property
    def activations_bytes(self) -> int:
        return sum(activation.num_bytes for activation in self.activations)

    @property
    def peak_bytes(self) -> int:
        """All of it: the first backward begins with all gradients allocated and all activations in flight."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes

    def to_json(self) -> JsonObject:
        totals: JsonObject = {"activations_bytes": self.activations_bytes, "peak_bytes": self.peak_bytes}
        return {**fields_to_json(self), **totals}


def leaves_margin(peak_bytes: int, memory_bytes: float) -> bool:
    """Return whether enough of a GPU's memory is left for what is not counted."""
    return peak_bytes <= (1 - MARGIN) * memory_bytes


class _Shards(NamedTuple):
    """Over how many ranks each kind of state is divided."""

    parameters: int
    gradients: int
    optimizer: int


def _shards(layout: Layout, copies: int) -> _Shards:
    zero_stage = layout.zero_stage or 0
    return _Shards(
        parameters=copies if zero_stage >= 3 else 1,
        gradients=copies if zero_stage >= 2 else 1,
        optimizer=copies if zero_stage >= 1 or layout.distributed_optimizer else 1,
    )


def stage_memory(model: Model, layout: Layout, stage: int) -> Memory:
    """Return the memory of each rank of a stage.

    With the default precisions a parameter takes 18 bytes, or 6 + 12/dp with the distributed optimizer, as in
    Megatron-LM's theoretical_memory_usage.py. In DeepSpeed it takes 16, 4 + 12/dp, 2 + 14/dp and 16/dp bytes in the
    stages 0 to 3 of ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    figure 1.
    """
    dense, expert = stage_elements(model, layout, stage)
    dense_shards, expert_shards = _shards(layout, layout.data_copies), _shards(layout, layout.expert_data_copies)

    def kept(each_bytes: int, of_dense: int, of_expert: int) -> int:
        return each_bytes * dense // of_dense + each_bytes * expert // of_expert

    return Memory(
        parameters_bytes=kept(layout.parameter_bytes, dense_shards.parameters, expert_shards.parameters),
        gradients_bytes=kept(layout.gradient_bytes, dense_shards.gradients, expert_shards.gradients),
        optimizer_bytes=kept(layout.optimizer_bytes, dense_shards.optimizer, expert_shards.optimizer),
        activations=stage_activations(model, layout, stage),
    )


def layer_activations(model: Model, layout: Layout, layer: int) -> tuple[Activations, ...]:
    """Return what one layer keeps of one microbatch until its backward, without full recomputation.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", table 2, for any
    ffn, for groups of queries, and with 6 instead of 4 bytes for each element of a gated MLP, which keeps the outputs
    of both matrices and their product. Without dropout there are no masks (1 byte for each element), and dropped scores
    are not kept beside those of the softmax. Tokens are taken to be divided evenly between experts.
    """
    tokens = model.sequence // layout.cp * layout.microbatch
    row = tokens * model.hidden
    query, key_value = model.heads * model.head_size, model.query_groups * model.head_size
    of_the_sequence = layout.tp if layout.sequence_parallel else 1
    ffn_bytes = 6 if model.gated else 4
    edge_bytes = 3 if model.hidden_dropout else 2
    norms = 4 * row // of_the_sequence
    attention = edge_bytes * row // of_the_sequence + 4 * tokens * (query + key_value) // layout.tp
    scores = (5 if model.attention_dropout else 2) * model.heads * model.sequence * tokens // layout.tp
    if layout.flash_attention or layout.recompute == "selective":
        scores = 0
    mlp_edges = edge_bytes * row // of_the_sequence
    if model.has_experts(layer):
        # the ranks that divide an expert gather its tokens, whole rows of them, from one another
        each_bytes = 2 * model.hidden * layout.expert_tp + ffn_bytes * model.expert_ffn
        experts = model.experts_per_token * tokens * each_bytes // layout.tp
        mlp = Activations("experts", mlp_edges + experts)
    else:
        mlp = Activations("mlp", mlp_edges + ffn_bytes * tokens * model.ffn // layout.tp)
    return (
        Activations("norms", norms),
        Activations("attention", attention),
        Activations("attention scores", scores),
        mlp,
    )


def stage_activations(model: Model, layout: Layout, stage: int) -> tuple[Activations, ...]:
    """Return the activations of each rank of a stage while most microbatches are in flight.

    The embedding keeps 8 bytes for each token (ids) and, with dropout, 1 for each element of its output (the mask); the
    output layer, of one microbatch, 4 bytes for each element of its input and of the logits. With sequence parallelism,
    dropout, no GQA and no gated MLP the sum on stage 0 is that of Megatron-LM's theoretical_memory_usage.py.
    """
    tokens = model.sequence // layout.cp * layout.microbatch
    row = tokens * model.hidden
    of_the_sequence = layout.tp if layout.sequence_parallel else 1
    in_flight = most_in_flight(layout.schedule, stage, layout.pp, layout.microbatches, layout.chunks)
    chunks = layout.stage_layers(model, stage)
    bytes_of_part: dict[str, int] = {}

    def add(part: str, num_bytes: int) -> None:
        bytes_of_part[part] = bytes_of_part.get(part, 0) + num_bytes

    layers = [layer for chunk in chunks for layer in chunk]
    if layout.recompute == "full":
        add("layer inputs", 2 * row // of_the_sequence * len(layers) * in_flight // layout.chunks)
        kept = max((layer_activations(model, layout, layer) for layer in layers), key=_sum)
        add("recomputed layer", _sum(kept))
    else:
        for layer in layers:
            for part, num_bytes in layer_activations(model, layout, layer):
                add(part, num_bytes * in_flight // layout.chunks)
    if stage == 0:
        add(
            "embedding",
            (8 * tokens + (row if model.hidden_dropout else 0)) // of_the_sequence * in_flight // layout.chunks,
        )
    if stage == layout.pp - 1:
        add("output", 4 * row // of_the_sequence + _LOGIT_BYTES * tokens * model.vocabulary // layout.tp)
    return tuple(Activations(part, num_bytes) for part, num_bytes in bytes_of_part.items() if num_bytes)


def _sum(activations: Iterable[Activations]) -> int:
    return sum(activation.num_bytes for activation in activations)
