"""Every number of the tool's sample, as it is published, and ours beside them."""

from __future__ import annotations

from typing import Literal

import pytest

from commtrace.interchange.megatron_issue_488 import LAYOUT, MODEL, ComparedNumber, compare, sample_plan

GIB = 1 << 30
NUMBERS = {(one.of, one.quantity, one.unit): one for one in compare(sample_plan())}


def found(of: str, quantity: str, unit: Literal["parameters", "bytes", "operations"]) -> ComparedNumber:
    return NUMBERS[of, quantity, unit]


def test_the_sample() -> None:
    assert (MODEL.ffn, LAYOUT.world_size, LAYOUT.dp * LAYOUT.microbatch * LAYOUT.microbatches) == (10_880, 16, 512)


@pytest.mark.parametrize(
    ("of", "tool", "ours"),
    [("whole model", 6_642_245_632, 6_642_515_968), ("fullest GPU", 1_718_898_688, 1_718_757_376)],
)
def test_parameters(of: str, tool: int, ours: int) -> None:
    one = found(of, "parameters", "parameters")

    assert (one.tool, one.ours) == (tool, ours)


@pytest.mark.parametrize(
    ("of", "quantity", "gib"),
    [
        ("whole model", "parameters", 12.4),
        ("whole model", "gradients", 24.7),
        ("whole model", "optimizer", 74.2),
        ("whole model", "activations", 44.8),
        ("whole model", "total", 156.2),
        ("fullest GPU", "parameters", 3.2),
        ("fullest GPU", "gradients", 6.4),
        ("fullest GPU", "optimizer", 4.8),
        ("fullest GPU", "activations", 25.8),
        ("fullest GPU", "total", 40.2),
        ("one iteration", "pipeline", 128),
        ("one iteration", "tensor", 2048),
        ("one iteration", "data", 12.8),
        ("one iteration", "all", 2188.8),
    ],
)
def test_sizes_match_the_tables_of_the_tool_in_gib(of: str, quantity: str, gib: float) -> None:
    assert round(found(of, quantity, "bytes").tool / GIB, 1) == gib


@pytest.mark.parametrize(
    ("quantity", "tool", "ours"),
    [
        ("pipeline", 2048, 1024),
        ("tensor", 32_768, 2080 * 16 + 96 * 8),
        ("data", 2, 64),
        ("all", 34_818, 1024 + 34_048 + 64),
    ],
)
def test_operations(quantity: str, tool: int, ours: int) -> None:
    one = found("one iteration", quantity, "operations")

    assert (one.tool, one.ours) == (tool, ours)


def test_the_pipeline_sends_a_message_for_each_microbatch_and_boundary() -> None:
    assert found("one iteration", "pipeline", "bytes").ours == 512 * 64 * (1 << 20) == 32 * GIB


def test_tensor_parallelism_has_the_embedding_the_output_and_the_loss() -> None:
    loss = 8 * 96 * 4 * 2048 * 4

    assert found("one iteration", "tensor", "bytes").ours == 2080 * GIB + loss


def test_every_difference_is_explained() -> None:
    assert all(one.difference for one in NUMBERS.values())
    assert all(one.tool != one.ours for one in NUMBERS.values())
