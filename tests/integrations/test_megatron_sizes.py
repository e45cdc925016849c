"""The sizes of a Megatron-core model, as its objects have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commtrace.integrations.megatron_sizes import megatron_sizes


def wrapped(ddp: dict[str, Any] | None = None, **options: Any) -> SimpleNamespace:
    """A GPT in the wrappers of DDP and of 16-bit precision."""
    config = {
        "num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
        "ffn_hidden_size": 256, "gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm",
        "params_dtype": torch.bfloat16, "pipeline_model_parallel_size": 2,
    }  # fmt: skip
    gpt = SimpleNamespace(
        config=SimpleNamespace(**{**config, **options}),
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return SimpleNamespace(ddp_config=SimpleNamespace(**(ddp or {})), module=SimpleNamespace(module=gpt))


def test_a_model_in_its_wrappers() -> None:
    ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 999}

    assert megatron_sizes([wrapped(ddp)], 32, 2) == {
        "model": {
            "layers": 8, "hidden": 64, "heads": 4, "query_groups": 2, "head_size": 16, "ffn": 256, "gated": True,
            "linear_bias": False, "qkv_bias": False, "normalization": "RMSNorm", "experts": 0, "experts_per_token": 2,
            "expert_ffn": 0, "sequence": 32, "vocabulary": 128, "positions": "rope", "max_positions": 32,
            "tied_embeddings": False, "moe_every": 1, "hidden_dropout": True, "attention_dropout": True,
        },
        "layout": {
            "microbatch": 2, "sequence_parallel": False, "recompute": "none", "flash_attention": False,
            "fused_cross_entropy": False, "cp_communication": "ring", "expert_dispatcher": "other",
            "parameter_bytes": 2, "optimizer_bytes": 12, "distributed_optimizer": True, "overlap_gradients": True,
            "bucket_elements": 999, "gradient_bytes": 2,
        },
        "not_planned": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "part", "expected"),
    [
        ({"num_layers_in_first_pipeline_stage": 3}, "layout", {"first_stage_layers": 3}),
        (
            {"num_layers": 6, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": 1},
            "layout",
            {"first_stage_layers": 3, "last_stage_layers": 3},
        ),
        ({"attention_backend": SimpleNamespace(name="flash")}, "layout", {"flash_attention": True}),
        ({"cp_comm_type": ["a2a", "a2a"]}, "layout", {"cp_communication": "all_to_all"}),
        ({"cp_comm_type": ["p2p", "a2a"]}, "layout", {"cp_communication": "other"}),
        ({"num_moe_experts": 4, "moe_layer_freq": [1, 0, 1, 0]}, "model", {"experts": 4, "moe_every": 2}),
        (
            {"hidden_dropout": 0.0, "attention_dropout": 0},
            "model",
            {"hidden_dropout": False, "attention_dropout": False},
        ),
        ({"params_dtype": torch.float32}, "layout", {"parameter_bytes": 4, "optimizer_bytes": 8}),
    ],
)
def test_options_of_the_configuration(options: dict[str, Any], part: str, expected: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {**megatron_sizes(wrapped(**options), 32, 1)}

    assert expected.items() <= sizes[part].items()


@pytest.mark.parametrize(
    ("options", "ddp", "left_out"),
    [
        ({"fp8": "hybrid", "qk_layernorm": True}, {}, ["qk_layernorm", "fp8"]),
        ({"moe_layer_freq": [0, 1]}, {}, ["moe_layer_freq"]),
        ({"recompute_modules": ["core_attn"], "recompute_granularity": "selective"}, {}, []),
        ({"recompute_modules": ["mlp"], "recompute_granularity": "selective"}, {}, ["recompute_modules"]),
        ({}, {"use_megatron_fsdp": True}, ["use_megatron_fsdp"]),
    ],
)
def test_options_of_a_model_that_no_plan_knows_are_named(
    options: dict[str, Any], ddp: dict[str, Any], left_out: list[str]
) -> None:
    assert megatron_sizes(wrapped(ddp, **options), 32, 1)["not_planned"] == left_out


@pytest.mark.parametrize("model", [None, [], torch.nn.Linear(2, 2), SimpleNamespace(module=torch.nn.Linear(2, 2))])
def test_the_sizes_of_an_unknown_model_are_empty(model: object) -> None:
    assert megatron_sizes(model, 32, 1) == {}


def test_without_a_sequence_nothing_is_known() -> None:
    assert megatron_sizes(wrapped(), None, 1) == {}
