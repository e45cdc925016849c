"""What the programs share that train small models of Megatron on CPUs. Imported as a neighbour: they run by path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from train_megatron_gpt import LayerNorm


def layers_of_torch(config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """The decoder's layers, with torch's LayerNorm: neither Transformer Engine nor Apex is there."""
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    layers.layer_norm = LayerNorm
    for layer in layers.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LayerNorm
    return layers


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward step hands to Megatron's schedule."""
    loss = output.float().mean()
    return loss, loss.detach()
