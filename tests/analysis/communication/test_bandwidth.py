from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.communication.bandwidth import bus_factor, bus_factors, moved_bytes


@pytest.mark.parametrize(("members", "factor"), [(2, 1.0), (8, 1.75), (32, 1.9375)])
def test_an_all_reduce_moves_the_tensor_nearly_twice(members: int, factor: float) -> None:
    assert bus_factor("all_reduce", members) == factor


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all"])
def test_operations_that_keep_a_share_at_home(operation: str) -> None:
    assert bus_factor(operation, 8) == 0.875


@pytest.mark.parametrize("operation", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_operations_that_move_the_tensor_once(operation: str) -> None:
    assert bus_factor(operation, 8) == 1.0


def test_an_uneven_all_to_all_counts_what_goes_to_others() -> None:
    num_bytes, self_bytes = np.array([800, 800]), np.array([-1, 300])
    assert moved_bytes("all_to_all", num_bytes, self_bytes).tolist() == [800, 500]
    assert bus_factors("all_to_all", 8, self_bytes).tolist() == [0.875, 1.0]


def test_self_bytes_mean_nothing_elsewhere() -> None:
    assert moved_bytes("all_reduce", np.array([800, -1]), np.array([300, -1])).tolist() == [800, 0]
