from __future__ import annotations

from typing import Any

import pytest

from commtrace.planning.flops import flops_per_sequence
from commtrace.planning.model import Model

GPT3 = Model(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)


def test_a_gpt_has_the_flops_of_the_published_formula() -> None:
    s, layers, h, v = 2048, 96, 12288, 51200
    published = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))

    assert flops_per_sequence(GPT3) == pytest.approx(published, rel=1e-12)


def test_experts_count_as_often_as_a_token_uses_them() -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 1, "sequence": 4, "vocabulary": 16, "ffn": 32}
    dense, sparse = Model(**sizes), Model(**sizes, experts=4, experts_per_token=2)

    extra = 4 * 8 * 32 + 2 * 8 * 4  # the second expert of a token, and the router
    assert flops_per_sequence(sparse) - flops_per_sequence(dense) == 3 * 4 * extra


def test_grouped_queries_have_smaller_projections_and_gates_a_third_matrix() -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 4, "sequence": 4, "vocabulary": 16, "ffn": 32}
    plain = flops_per_sequence(Model(**sizes))

    grouped = flops_per_sequence(Model(**sizes, query_groups=2))
    gated = flops_per_sequence(Model(**sizes, gated=True))
    assert plain - grouped == 3 * 4 * (2 * 8 * 2 * (8 - 4))
    assert gated - plain == 3 * 4 * (2 * 8 * 32)
