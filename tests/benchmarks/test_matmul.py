from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from commtrace.benchmarks.matmul import MatmulRate, Shape, rate
from commtrace.cli.main import app
from tests.json_schemas import errors


def test_a_product_has_two_flops_for_each_element_and_term() -> None:
    assert Shape(3, 5, 7).flops == 210
    # 2 · 10³ FLOPs in 1, 2 and 9 µs
    expected = MatmulRate(Shape(10, 10, 10), 3, mean=0.5e9, median=1e9, max=2e9)
    assert rate(Shape(10, 10, 10), [2_000, 1_000, 9_000]) == expected


def test_it_works_on_a_cpu() -> None:
    words = ["--shapes", "64x32x16,8x8x8", "--warmup", "1", "--iterations", "3"]
    result = CliRunner().invoke(app, ["bench", "matmul", *words, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)

    assert list(errors("bench-matmul", answer)) == []
    assert [(one["m"], one["n"], one["k"], one["iterations"]) for one in answer["shapes"]] == [
        (64, 32, 16, 3),
        (8, 8, 8, 3),
    ]
    rates = [one["flops_per_second"] for one in answer["shapes"]]
    assert all(0 < one["mean"] <= one["max"] and one["median"] <= one["max"] for one in rates)
    assert answer["achievable_flops_per_second"] == max(one["median"] for one in rates)


@pytest.mark.parametrize(
    ("words", "said"), [(["--shapes", "4x4"], "write MxNxK"), (["--dtype", "int8"], "write one of")]
)
def test_impossible_sizes_of_a_matmul_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "matmul", *words])

    assert result.exit_code == 2
    assert said in result.stderr
