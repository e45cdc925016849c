"""Read the sizes of a Megatron-core model and its layout, so that a run can be compared with its plan.

The names are those of the fields of ``commtrace.planning.model.Model`` and ``commtrace.planning.layout.Layout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from commtrace.trace.topology import Topology

_POSITIONS: Final[Mapping[str, str]] = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
_CP_COMMUNICATION: Final[Mapping[object, str]] = {None: "ring", "p2p": "ring", "a2a": "all_to_all"}
_NOT_PLANNED: Final = (
    "multi_latent_attention", "mtp_num_layers", "moe_shared_expert_intermediate_size", "qk_layernorm", "fp8", "fp4",
    "cpu_offloading", "pipeline_model_parallel_layout", "recompute_modules",
)  # fmt: skip
"""Options of a TransformerConfig on which the numbers depend, but which a plan does not know."""
_DDP_NOT_PLANNED: Final = ("use_megatron_fsdp", "use_custom_fsdp", "pad_buckets_for_high_nccl_busbw")


def megatron_sizes(chunks: object, sequence: object, microbatch: object) -> Topology:
    """Return the sizes of a model, as far as it is a GPT of Megatron-core; nothing of any other.

    Args:
        chunks: What the schedule was given: a model chunk or a list of them, in their wrappers.
        sequence: Tokens of a sample.
        microbatch: Samples of a microbatch.
    """
    chunk: Any = chunks[0] if isinstance(chunks, Sequence) and chunks else chunks
    ddp: object = None
    while chunk is not None and not hasattr(chunk, "vocab_size"):
        ddp = getattr(chunk, "ddp_config", ddp)
        chunk = getattr(chunk, "module", None)
    config = getattr(chunk, "config", None)
    if config is None or not hasattr(chunk, "share_embeddings_and_output_weights"):
        return {}
    if not (isinstance(sequence, int) and isinstance(microbatch, int)):
        return {}
    parameter_bytes = getattr(config, "params_dtype", torch.float32).itemsize
    left_out = [name for name in _NOT_PLANNED if _is_set(config, name)]
    left_out += [name for name in _DDP_NOT_PLANNED if _is_set(ddp, name)]
    frequency = _expert_frequency(getattr(config, "moe_layer_freq", 1))
    if frequency is None:
        left_out.append("moe_layer_freq")
    return {
        "model": {
            **_attention_and_mlp(config),
            "sequence": sequence,
            "vocabulary": int(chunk.vocab_size),
            "positions": _POSITIONS.get(str(getattr(chunk, "position_embedding_type", "")), "none"),
            "max_positions": int(getattr(chunk, "max_sequence_length", 0) or 0),
            "tied_embeddings": bool(chunk.share_embeddings_and_output_weights),
            "moe_every": frequency or 1,
            "hidden_dropout": bool(getattr(config, "hidden_dropout", True)),
            "attention_dropout": bool(getattr(config, "attention_dropout", True)),
        },
        "layout": {
            "microbatch": microbatch,
            "sequence_parallel": bool(getattr(config, "sequence_parallel", False)),
            "recompute": getattr(config, "recompute_granularity", None) or "none",
            "flash_attention": _has_flash_attention(chunk, config, parameter_bytes),
            "fused_cross_entropy": bool(getattr(config, "cross_entropy_loss_fusion", False)),
            "cp_communication": _cp_communication(getattr(config, "cp_comm_type", None)),
            "expert_dispatcher": _dispatcher(config),
            "parameter_bytes": parameter_bytes,
            "optimizer_bytes": 8 if parameter_bytes == 4 else 12,
            **_stages(config),
            **_gradients(ddp, parameter_bytes),
        },
        "not_planned": left_out,
    }


def _attention_and_mlp(config: Any) -> dict[str, int | bool | str]:
    experts = int(getattr(config, "num_moe_experts", None) or 0)
    linear_bias = bool(config.add_bias_linear)
    return {
        "layers": int(config.num_layers),
        "hidden": int(config.hidden_size),
        "heads": int(config.num_attention_heads),
        "query_groups": int(config.num_query_groups or 0),
        "head_size": int(config.kv_channels or 0),
        "ffn": int(config.ffn_hidden_size or 0),
        "gated": bool(config.gated_linear_unit),
        "linear_bias": linear_bias,
        "qkv_bias": linear_bias or bool(getattr(config, "add_qkv_bias", False)),
        "normalization": str(getattr(config, "normalization", "LayerNorm")),
        "experts": experts,
        "experts_per_token": int(getattr(config, "moe_router_topk", 2)) if experts else 2,
        "expert_ffn": int(getattr(config, "moe_ffn_hidden_size", None) or 0) if experts else 0,
    }


def _is_set(config: object, name: str) -> bool:
    value = getattr(config, name, None)
    if name == "recompute_modules":  # the default, and what selective recomputation is taken to be
        return bool(value) and value != ["core_attn"] and getattr(config, "recompute_granularity", None) == "selective"
    return bool(value)


def _expert_frequency(given: object) -> int | None:
    """Return k where every k-th layer has experts, the first among them; None for any other pattern."""
    if isinstance(given, int):
        return given
    pattern = list(given) if isinstance(given, Sequence) else []
    for every in range(1, len(pattern) + 1):
        if pattern == [int(layer % every == 0) for layer in range(len(pattern))]:
            return every
    return None


def _cp_communication(given: object) -> str:
    if isinstance(given, list):
        given = given[0] if len(set(given)) == 1 else "mixed"
    return _CP_COMMUNICATION.get(given, "other")


def _dispatcher(config: object) -> str:
    return "all_to_all" if getattr(config, "moe_token_dispatcher_type", "") == "alltoall" else "other"


def _has_flash_attention(chunk: object, config: object, parameter_bytes: int) -> bool:
    backend = getattr(getattr(config, "attention_backend", None), "name", "")
    if backend in ("flash", "fused"):
        return True
    layers = getattr(getattr(chunk, "decoder", None), "layers", ())
    attention = getattr(next(iter(layers), None), "self_attention", None)
    kind = type(getattr(attention, "core_attention", None)).__name__
    return backend == "auto" and parameter_bytes == 2 and kind.startswith("TE")


def _stages(config: Any) -> dict[str, int]:
    """Return the layers of the first and the last pipeline stage where they differ from the others'."""
    at_ends = {
        "first_stage_layers": int(getattr(config, "num_layers_in_first_pipeline_stage", None) or 0),
        "last_stage_layers": int(getattr(config, "num_layers_in_last_pipeline_stage", None) or 0),
    }
    embedding = int(getattr(config, "account_for_embedding_in_pipeline_split", False))
    loss = int(getattr(config, "account_for_loss_in_pipeline_split", False))
    if embedding or loss:
        each = (int(config.num_layers) + embedding + loss) // int(config.pipeline_model_parallel_size)
        at_ends = {"first_stage_layers": each - embedding, "last_stage_layers": each - loss}
    return {name: layers for name, layers in at_ends.items() if layers}


def _gradients(ddp: object, parameter_bytes: int) -> dict[str, int | bool]:
    return {
        "distributed_optimizer": bool(getattr(ddp, "use_distributed_optimizer", False)),
        "overlap_gradients": bool(getattr(ddp, "overlap_grad_reduce", False)),
        "bucket_elements": int(getattr(ddp, "bucket_size", None) or 0),
        "gradient_bytes": 4 if getattr(ddp, "grad_reduce_in_fp32", False) else parameter_bytes,
    }
