"""Parameters: those of real Megatron-core models, and of published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.parameters import model_parameters, stage_elements, stage_parameters

SMALL = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128)


def on_each_stage(layout: Layout) -> list[int]:
    return [
        sum(parameter.elements for parameter in stage_parameters(SMALL, layout, stage)) for stage in range(layout.pp)
    ]


@pytest.mark.parametrize(
    ("layout", "counted"),
    [
        (Layout(pp=4, microbatches=8), [60_224, 49_984, 49_984, 58_304]),
        (Layout(tp=2, microbatches=4), [107_008]),
        (Layout(tp=2, pp=2, microbatches=4, sequence_parallel=True), [56_512, 54_592]),
    ],
)
def test_ranks_hold_as_many_parameters_as_those_of_megatron_core(layout: Layout, counted: list[int]) -> None:
    assert on_each_stage(layout) == counted


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=2, pp=2), Layout(pp=2, chunks=2, microbatches=2)])
def test_the_model_does_not_depend_on_its_layout(layout: Layout) -> None:
    assert model_parameters(SMALL, layout) == 4 * (12 * 64 * 64 + 13 * 64) + 128 * 64 + 32 * 64 + 2 * 64


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=4),
        Layout(dp=4, ep=2),
        Layout(tp=2, pp=2, dp=2, ep=2, expert_tp=1, chunks=2, microbatches=2, sequence_parallel=True),
    ],
)
@pytest.mark.parametrize("moe_every", [1, 2])
def test_the_elements_of_a_stage_are_those_of_its_tensors(layout: Layout, moe_every: int) -> None:
    model = replace(SMALL, experts=8, moe_every=moe_every)
    for stage in range(layout.pp):
        tensors = stage_parameters(model, layout, stage)
        expert = sum(tensor.elements for tensor in tensors if tensor.is_expert)

        assert stage_elements(model, layout, stage) == (sum(one.elements for one in tensors) - expert, expert)
    assert (stage_elements(model, layout, 0).expert > 0) == (layout.ep > 1)
    whole_model = stage_parameters(model, Layout(), 0)
    assert model_parameters(model, layout) == sum(one.elements for one in whole_model)


def test_llama_3_8b() -> None:
    llama = Model(
        layers=32, hidden=4096, heads=32, sequence=8192, vocabulary=128_256, ffn=14_336, query_groups=8, gated=True,
        linear_bias=False, qkv_bias=False, normalization="RMSNorm", positions="rope", tied_embeddings=False,
    )  # fmt: skip

    assert model_parameters(llama, Layout(tp=8, pp=4)) == 8_030_261_248


def test_mixtral_8x7b() -> None:
    mixtral = Model(
        layers=32, hidden=4096, heads=32, sequence=4096, vocabulary=32_000, ffn=14_336, query_groups=8, gated=True,
        linear_bias=False, qkv_bias=False, normalization="RMSNorm", positions="rope", tied_embeddings=False, experts=8,
    )  # fmt: skip

    assert model_parameters(mixtral, Layout(dp=8, ep=8, tp=2, expert_tp=1, pp=2)) == 46_702_792_704


def test_the_total_of_the_sample_of_megatron_issue_488() -> None:
    sample = Model(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=50_432, ffn=10_880, gated=True)

    dense = 50_432 * 4096 + 2048 * 4096 + 2 * 4096
    biases = 3 * 4096 + 4096 + 2 * 10_880 + 4096
    layer = 4 * 4096**2 + 3 * 10_880 * 4096 + biases + 4 * 4096
    assert model_parameters(sample, Layout(tp=2, pp=2)) == dense + 32 * layer == 6_642_515_968
