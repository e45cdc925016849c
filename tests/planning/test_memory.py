"""Memory against the published formulas, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commtrace.planning.layout import Layout
from commtrace.planning.memory import layer_activations, stage_memory
from commtrace.planning.model import Model

GPT = Model(layers=8, hidden=1024, heads=16, sequence=2048, vocabulary=51_200)
S, B, H, A, N, V = 2048, 4, 1024, 16, 8, 51_200
SBH = S * B * H
SCORES = 5 * A * S * SBH // H  # 5as/h · sbh


def kept_of_a_layer(layout: Layout, model: Model = GPT) -> int:
    return sum(one.num_bytes for one in layer_activations(model, layout, 0))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(microbatch=B), 34 * SBH + SCORES),
        (Layout(microbatch=B, tp=4), SBH * 10 + (SBH * 24 + SCORES) // 4),
        (Layout(microbatch=B, tp=4, sequence_parallel=True), (34 * SBH + SCORES) // 4),
        (Layout(microbatch=B, tp=4, sequence_parallel=True, recompute="selective"), 34 * SBH // 4),
        (Layout(microbatch=B, flash_attention=True), 34 * SBH),
        (Layout(microbatch=B, flash_attention=True, cp=2), 17 * SBH),
    ],
)
def test_a_layer_keeps_what_korthikanti_s_table_says(layout: Layout, expected: int) -> None:
    assert kept_of_a_layer(layout) == expected


def test_without_dropout_there_are_no_masks() -> None:
    no_hidden, none = replace(GPT, hidden_dropout=False), replace(GPT, hidden_dropout=False, attention_dropout=False)
    layout = Layout(microbatch=B)

    assert kept_of_a_layer(layout, no_hidden) == 32 * SBH + SCORES
    assert kept_of_a_layer(layout, none) == 32 * SBH + SCORES * 2 // 5
    assert dict(stage_memory(none, layout, 0).activations)["embedding"] == 8 * S * B


def test_groups_of_queries_keep_fewer_keys_and_values() -> None:
    grouped = replace(GPT, query_groups=4)

    assert kept_of_a_layer(Layout(), GPT) - kept_of_a_layer(Layout(), grouped) == 4 * S * H * 3 // 4


@pytest.mark.parametrize(
    ("sizes", "ffn_of_a_rank", "hidden_of_a_rank"),
    [
        ({}, 6 * 2816, 2 * H),
        ({"tp": 4, "sequence_parallel": True, "expert_tp": 1}, 6 * 2816 // 4, 2 * H // 4),
        # the ranks that divide an expert gather the tokens of all of them
        ({"tp": 4, "sequence_parallel": True}, 6 * 2816 // 4, 2 * H),
    ],
)
def test_experts_keep_their_tokens(sizes: dict[str, Any], ffn_of_a_rank: int, hidden_of_a_rank: int) -> None:
    model = replace(GPT, experts=8, experts_per_token=2, expert_ffn=2816, gated=True)
    layout = Layout(ep=2, dp=2, **sizes)
    kept = dict(layer_activations(model, layout, 0))["experts"]

    assert kept == 3 * S * H // layout.tp + 2 * S * (hidden_of_a_rank + ffn_of_a_rank)


def test_a_gated_mlp_keeps_both_matrices_outputs_and_their_product() -> None:
    gated = replace(GPT, gated=True, ffn=2816)

    assert dict(layer_activations(gated, Layout(), 0))["mlp"] == S * (3 * H + 6 * 2816)


def test_full_recomputation_keeps_the_inputs_of_layers_and_one_layer() -> None:
    memory = stage_memory(GPT, Layout(microbatch=B, recompute="full", flash_attention=True), 0)

    assert dict(memory.activations) == {
        "layer inputs": 2 * SBH * N,
        "recomputed layer": 34 * SBH,
        "embedding": 8 * S * B + SBH,
        "output": 4 * SBH + 4 * S * B * V,
    }


def megatron_estimate(t: int, p: int, m: int, v: int = 1) -> int:
    """The activations of Megatron-LM's report of theoretical memory, with ffn = 4h."""
    total = (SBH * 34 * N + 8 * S * B * p + SBH * p) / t
    total *= 1 + (p - 1) / (p * v) if v > 1 else min(1, m / p)
    return round(total + (4 * SBH * (1 + V / H) / t if p == 1 else 0))


@pytest.mark.parametrize(
    ("t", "p", "m", "v"), [(1, 1, 8, 1), (4, 1, 8, 1), (4, 4, 8, 1), (2, 4, 2, 1), (2, 4, 8, 2), (4, 2, 8, 4)]
)
def test_the_activations_of_the_first_stage_are_megatron_s_estimate(t: int, p: int, m: int, v: int) -> None:
    layout = Layout(tp=t, pp=p, chunks=v, microbatch=B, microbatches=m, sequence_parallel=t > 1, recompute="selective")

    assert stage_memory(GPT, layout, 0).activations_bytes == megatron_estimate(t, p, m, v)


def test_later_stages_hold_fewer_microbatches() -> None:
    layout = Layout(pp=4, microbatch=B, microbatches=8, flash_attention=True)
    kept = [dict(stage_memory(GPT, layout, stage).activations)["mlp"] for stage in range(4)]

    assert kept == [microbatches * 2 * 19 * SBH for microbatches in (4, 3, 2, 1)]


@pytest.mark.parametrize(
    ("layout", "each"),
    [
        (Layout(dp=4), (2, 4, 12)),
        (Layout(dp=4, distributed_optimizer=True), (2, 4, 3)),
        (Layout(dp=2, cp=2, distributed_optimizer=True), (2, 4, 3)),
        (Layout(dp=4, zero_stage=0), (2, 2, 12)),
        (Layout(dp=4, zero_stage=1), (2, 2, 3)),
        (Layout(dp=4, zero_stage=2), (2, 0.5, 3)),
        (Layout(dp=4, zero_stage=3), (0.5, 0.5, 3)),
        (Layout(dp=4, parameter_bytes=4, optimizer_bytes=8), (4, 4, 8)),
    ],
)
def test_a_parameter_takes_18_bytes_or_its_share(layout: Layout, each: tuple[float, float, float]) -> None:
    memory = stage_memory(GPT, layout, 0)
    parameters = N * (12 * H * H + 13 * H) + V * H + S * H + 2 * H

    assert (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes) == tuple(
        one * parameters for one in each
    )


def test_optimizer_states_of_experts_are_divided_over_fewer_ranks() -> None:
    model = replace(GPT, experts=8, layers=1, linear_bias=False, qkv_bias=False)
    memory = stage_memory(model, Layout(dp=8, ep=4, distributed_optimizer=True), 0)
    expert = 2 * 8 * H * H  # two of eight experts
    dense = 4 * H * H + 6 * H + 8 * H + V * H + S * H

    assert memory.optimizer_bytes == 12 * dense // 8 + 12 * expert // 2


def test_the_peak_is_the_sum() -> None:
    memory = stage_memory(GPT, Layout(), 0)

    assert memory.peak_bytes == sum(
        (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.activations_bytes)
    )
    assert memory.to_json()["peak_bytes"] == memory.peak_bytes
