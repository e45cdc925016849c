"""The parameters and options of a DeepSpeed engine, as its methods give them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from commtrace.integrations.deepspeed_sizes import deepspeed_sizes


def parameter(elements: int, *, trained: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16), requires_grad=trained)


def engine(*parameters: torch.nn.Parameter, **more: Any) -> Any:
    methods = {
        "zero_reduce_bucket_size": lambda: 500,
        "zero_overlap_comm": lambda: True,
        "zero_hpz_partition_size": lambda: 1,
    }
    return SimpleNamespace(
        parameters=lambda: iter(parameters), communication_data_type=torch.float32, **methods, **more
    )


def test_parameters_and_options() -> None:
    assert deepspeed_sizes(engine(parameter(7), parameter(3))) == {
        "zero": {
            "reduce_bucket_size": 500, "overlap_comm": 1, "check_overflow": 1, "parameter_bytes": 2,
            "gradient_bytes": 4,
        },
        "parameter_elements": [7, 3],
        "parameter_groups": [],
        "not_planned": [],
    }  # fmt: skip


def test_a_partitioned_parameter_has_its_whole_size() -> None:
    partitioned: Any = parameter(1)
    partitioned.ds_numel = 100

    assert deepspeed_sizes(engine(partitioned))["parameter_elements"] == [100]


def test_groups_of_the_optimizer() -> None:
    first, second, third = parameter(1), parameter(2), parameter(3)
    optimizer = SimpleNamespace(bit16_groups=[[first, third], [second]], check_grad_overflow=False)

    sizes = deepspeed_sizes(engine(first, second, third, optimizer=optimizer))

    assert sizes["parameter_groups"] == [0, 1, 0]
    assert sizes["zero"]["check_overflow"] == 0


def test_parts_of_a_model_that_no_plan_knows_are_named() -> None:
    sizes = deepspeed_sizes(engine(parameter(1), parameter(2, trained=False), has_moe_layers=True))

    assert sizes["parameter_elements"] == [1]
    assert sizes["not_planned"] == ["experts", "frozen parameters"]


def test_without_parameters_nothing_is_known() -> None:
    assert deepspeed_sizes(engine()) == {}
    assert deepspeed_sizes(engine(parameter(1, trained=False))) == {}


def test_a_method_that_another_version_does_not_keep_is_left_out() -> None:
    def without_configuration() -> int:
        raise AttributeError("_config")

    sizes = deepspeed_sizes(engine(parameter(1), zero_reduce_scatter=without_configuration))

    assert "reduce_scatter" not in sizes["zero"]
