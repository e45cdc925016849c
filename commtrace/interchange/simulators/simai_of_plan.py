"""A plan as the SimAI workload that AICB would generate for it, field for field, without measured compute.

AICB's workload simplifies what Megatron-core sends, and its sizes are kept, so that results can be compared with those
of others. :func:`differences` says where they differ from the plan.
https://github.com/aliyun/aicb, workload_generator/SimAI_training_workload_generator.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commtrace.errors import ConfigurationError
from commtrace.interchange.simulators.simai_workload import NONE, Workload, WorkloadLayer, WorkloadPart
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import Plan

_UNMEASURED: Final = 1
"""What AICB writes for a compute time that it did not measure, ns."""

_EMBEDDING_COPIES: Final = 4
_CROSS_ENTROPY_CALLS: Final = 3
_OPTIMIZER_CALLS: Final = 4
_HALF, _FLOAT = 2, 4  # bytes


def workload_of_plan(plan: Plan) -> Workload:
    """Return the workload of a plan.

    Raises:
        ConfigurationError: AICB generates none for such a job.
    """
    model, layout = plan.model, plan.layout
    if layout.zero_stage is not None:
        raise ConfigurationError("a SimAI workload is made for Megatron-LM only: leave zero_stage out")
    if model.experts and not layout.sequence_parallel:
        raise ConfigurationError("AICB makes workloads with experts only with tp above 1 and sequence_parallel")
    if model.experts and model.moe_every != 1:
        raise ConfigurationError("AICB makes workloads only for models in which every layer has experts")
    return Workload(
        tp=layout.tp,
        ep=layout.ep,
        pp=layout.pp,
        chunks=_layers(model, layout),
        microbatches=layout.microbatches,
        world_size=layout.world_size,
        pipeline_bytes=_pipeline_bytes(model, layout),
        layers=tuple(_rows(model, layout)),
    )


def differences(plan: Plan) -> tuple[str, ...]:
    """Return what the workload has otherwise than the plan, in sentences."""
    return tuple(_differences(plan.model, plan.layout))


def _differences(model: Model, layout: Layout) -> Iterator[str]:
    yield (
        f"AICB counts the word embedding {_EMBEDDING_COPIES} times in the bytes of gradients and parameters, and the "
        "output layer beside it."
    )
    if layout.sequence_parallel:
        yield "AICB leaves out what tensor parallel ranks send in the backward of a layer."
        yield "AICB reduces the gradients of the embedding over tp in every microbatch; Megatron-core does not."
    if model.gated or model.query_groups != model.heads:
        yield "AICB counts an MLP with one matrix of columns, and a key and a value for each head."
    if layout.cp > 1:
        yield "AICB does not divide the sequence over cp."


def _layers(model: Model, layout: Layout) -> int:
    return model.layers // layout.pp


def _hidden_bytes(model: Model, layout: Layout) -> int:
    return _HALF * layout.microbatch * model.sequence * model.hidden


def _pipeline_bytes(model: Model, layout: Layout) -> int:
    if layout.pp == 1:
        return 0
    return _hidden_bytes(model, layout) // (layout.tp if layout.sequence_parallel else 1)


def _rows(model: Model, layout: Layout) -> Iterator[WorkloadLayer]:
    parameters, expert_parameters = _parameters(model, layout)
    idle = WorkloadPart(_UNMEASURED)
    yield WorkloadLayer(
        "grad_norm",
        WorkloadPart(_UNMEASURED, "ALLGATHER", _HALF * parameters),
        idle,
        WorkloadPart(_UNMEASURED, "REDUCESCATTER", _FLOAT * parameters),
    )
    if not layout.sequence_parallel:
        yield WorkloadLayer("layernorm", idle, WorkloadPart(_UNMEASURED, "ALLREDUCE", _HALF * parameters), idle)
    if layout.ep != layout.dp * layout.cp:
        expert_bytes = _HALF * expert_parameters
        yield WorkloadLayer("moe_grad_norm1", idle, idle, WorkloadPart(_UNMEASURED, "ALLGATHER_DP_EP", expert_bytes))
        expert_bytes = _FLOAT * expert_parameters
        yield WorkloadLayer(
            "moe_grad_norm2", idle, idle, WorkloadPart(_UNMEASURED, "REDUCESCATTER_DP_EP", expert_bytes)
        )
    for _ in range(layout.microbatches):
        yield from _microbatch(model, layout)
    loss_bytes = _FLOAT * model.sequence * layout.microbatch
    for number in range(_CROSS_ENTROPY_CALLS):
        yield WorkloadLayer(f"cross_entropy{number + 1}", WorkloadPart(0, "ALLREDUCE", loss_bytes))
    for number in range(_OPTIMIZER_CALLS):
        yield WorkloadLayer(f"optimizer{number + 1}", WorkloadPart(0, "ALLREDUCE", _FLOAT))


def _microbatch(model: Model, layout: Layout) -> Iterator[WorkloadLayer]:
    idle, hidden_bytes = WorkloadPart(_UNMEASURED), _hidden_bytes(model, layout)
    if layout.sequence_parallel:
        sent = WorkloadPart(_UNMEASURED, NONE, hidden_bytes)  # a size without an operation, as AICB leaves it there
        yield WorkloadLayer("embedding_layer", sent, sent, idle)
        for _ in range(_layers(model, layout)):
            yield from _sequence_parallel_layer(model, layout)
        yield WorkloadLayer("final_column", WorkloadPart(_UNMEASURED, "ALLGATHER", hidden_bytes), idle, idle)
    else:
        reduced = WorkloadPart(_UNMEASURED, "ALLREDUCE", hidden_bytes)
        yield WorkloadLayer("embedding_layer", reduced, reduced, idle)
        for _ in range(_layers(model, layout)):
            attention = WorkloadPart(_UNMEASURED, "ALLREDUCE", _recomputed(layout) * hidden_bytes)
            yield WorkloadLayer("attention_layer", attention, reduced, idle)
            yield WorkloadLayer("mlp_layer", reduced, reduced, idle)
    vocabulary_bytes = _HALF * (model.tokenizer_vocabulary or model.vocabulary) * model.hidden
    yield WorkloadLayer("embedding_norm", WorkloadPart(_UNMEASURED, "ALLREDUCE", vocabulary_bytes), idle, idle)


def _recomputed(layout: Layout) -> int:
    return 2 if layout.recompute == "selective" else 1


def _sequence_parallel_layer(model: Model, layout: Layout) -> Iterator[WorkloadLayer]:
    idle, hidden_bytes = WorkloadPart(_UNMEASURED), _hidden_bytes(model, layout)
    unsent = WorkloadPart(_UNMEASURED, NONE, hidden_bytes)
    attention_bytes = _recomputed(layout) * hidden_bytes
    yield WorkloadLayer("attention_column", WorkloadPart(_UNMEASURED, "ALLGATHER", attention_bytes), idle, idle)
    yield WorkloadLayer("attention_row", WorkloadPart(_UNMEASURED, "REDUCESCATTER", attention_bytes), unsent, idle)
    if not model.experts:
        yield WorkloadLayer("mlp_column", WorkloadPart(_UNMEASURED, "ALLGATHER", hidden_bytes), idle, idle)
        yield WorkloadLayer("mlp_row", WorkloadPart(_UNMEASURED, "REDUCESCATTER", hidden_bytes), unsent, idle)
        return
    token_bytes = hidden_bytes * model.experts_per_token
    routing = WorkloadPart(_UNMEASURED, "ALLGATHER", _HALF * layout.ep * model.experts * layout.tp)
    tokens = WorkloadPart(_UNMEASURED, "ALLTOALL_EP", token_bytes // layout.tp)
    gathered, reduced = (
        WorkloadPart(_UNMEASURED, "ALLGATHER", token_bytes),
        WorkloadPart(_UNMEASURED, "REDUCESCATTER", token_bytes),
    )
    for forward, backward in ((routing, idle), (tokens, tokens), (gathered, reduced), (reduced, gathered)):
        yield WorkloadLayer("mlp_moelayer", forward, backward, idle)
    yield WorkloadLayer("mlp_moelayer", tokens, tokens, idle)


def _parameters(model: Model, layout: Layout) -> tuple[int, int]:
    """Return the parameters of a rank, and those of its experts among them, as AICB counts them."""
    hidden, tp, layers = model.hidden, layout.tp, _layers(model, layout)
    bias = model.linear_bias
    # queries, keys and values of hidden each; then the projection back
    attention = _matrix(hidden, 3 * hidden // tp, 3 * hidden // tp if bias else 0)
    attention += _matrix(hidden // tp, hidden, hidden if bias else 0)
    embedding = _EMBEDDING_COPIES * (model.vocabulary // tp) * hidden + model.sequence * hidden
    experts = 0
    if model.experts:
        experts = layers * 2 * hidden * (model.expert_ffn * (model.experts // layout.ep) // tp)
        mlp = 0
    else:
        mlp = _matrix(hidden, model.ffn // tp, model.ffn // tp if bias else 0)
        mlp += _matrix(model.ffn // tp, hidden, hidden if bias else 0)
    total = embedding + layers * (attention + mlp) + experts
    if layout.sequence_parallel:
        norms = 2 * hidden
        columns = model.vocabulary // tp
        total += layers * norms + _matrix(hidden, columns, columns if bias else 0)
    return total, experts


def _matrix(rows: int, columns: int, bias: int) -> int:
    return rows * columns + bias
