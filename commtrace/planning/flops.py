"""The FLOPs of training a model, from its matrix multiplications: 2mnk each."""

from __future__ import annotations

from typing import Final

from commtrace.planning.model import Model

FORMULA: Final = "2mnk of every matrix multiplication, forward and twice backward, attention not halved by its mask"


def flops_per_sequence(model: Model) -> int:
    """Return the FLOPs of a forward and a backward pass of one sequence, without recomputation.

    With heads · head size = h, f = 4h and no gate this is 72·s·l·h²·(1 + s/(6h) + V/(12lh)): Narayanan et al. 2021
    (https://arxiv.org/abs/2104.04473, section 5.1) without its recomputed forward pass.
    """
    per_token = sum(_layer(model, layer) for layer in range(model.layers)) + 2 * model.hidden * model.vocabulary
    return 3 * model.sequence * per_token


def _layer(model: Model, layer: int) -> int:
    """Return the FLOPs of a token in the forward pass of a layer."""
    query, key_value = model.heads * model.head_size, model.query_groups * model.head_size
    projections = 2 * model.hidden * (2 * query + 2 * key_value)
    scores = 4 * model.sequence * query
    matrices = 3 if model.gated else 2
    if not model.has_experts(layer):
        return projections + scores + 2 * matrices * model.hidden * model.ffn
    experts = 2 * matrices * model.hidden * model.expert_ffn * model.experts_per_token
    return projections + scores + experts + 2 * model.hidden * model.experts
