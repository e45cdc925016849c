"""Aceso's predictions for its three models, to the last digit that it prints, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commtrace.errors import ConfigurationError
from commtrace.interchange.aceso.configuration import read_aceso_configuration
from commtrace.interchange.aceso.prediction import AcesoPrediction, predict
from commtrace.interchange.aceso.profile import Case, read_aceso_profile
from tests.interchange.aceso.aceso_files import GPT, HEADER, configuration, operators, small_profile
from tests.reference import reference_data

PROFILES = ("gpt_1_3B", "t5_770M", "wresnet_1B")


def published(name: str) -> AcesoPrediction:
    folder = reference_data("aceso")
    configuration = read_aceso_configuration(folder / "configs" / f"{name}.json")
    return predict(read_aceso_profile(folder, configuration.model), configuration)


@pytest.mark.parametrize(
    ("name", "iteration_ms", "stage", "allocated_mib", "reserved_mib", "memory_mib"),
    [
        ("gpt_1_3B", "58760.92", 1, "10660.64", "1280.00", "11940.64"),
        ("t5_770M", "33659.50", 3, "11319.47", "661.75", "11981.22"),
        ("wresnet_1B", "17672.05", 0, "10334.83", "1531.38", "11866.20"),
    ],
)
def test_a_prediction_equals_what_aceso_prints(
    name: str, iteration_ms: str, stage: int, allocated_mib: str, reserved_mib: str, memory_mib: str
) -> None:
    prediction = published(name)
    one = prediction.stages[stage]

    assert f"{prediction.iteration_ms:.2f}" == iteration_ms
    assert [f"{mib:.2f}" for mib in (one.allocated_mib, one.reserved_mib, one.memory_mib)] == [
        allocated_mib,
        reserved_mib,
        memory_mib,
    ]


@pytest.mark.parametrize(
    ("name", "iterations_ms"),
    [
        ("gpt_1_3B", ["56934.82", "57665.78", "58760.92", "57330.98"]),
        ("t5_770M", ["33659.50", "33488.95", "32704.11", "33354.48"]),
        ("wresnet_1B", ["17672.05", "16873.97"]),
    ],
)
def test_the_stages(name: str, iterations_ms: list[str]) -> None:
    assert [f"{stage.iteration_ms:.2f}" for stage in published(name).stages] == iterations_ms


@pytest.mark.parametrize(("name", "measured_ms"), [("gpt_1_3B", 59_011.61), ("t5_770M", 33_823.79)])
def test_ours_leaves_out_a_hundredth_that_was_measured(name: str, measured_ms: float) -> None:
    prediction = published(name)

    assert 0.985 < prediction.our_iteration_ms / measured_ms < 1
    assert prediction.our_gradients_ms == 0  # one GPU for each stage


def test_gradients_are_added_up_where_a_stage_has_two_gpus() -> None:
    # 297.7 MiB of parameters on each of two GPUs; 245 MiB of each took 42.014 ms to gather
    prediction = published("wresnet_1B")

    assert prediction.our_gradients_ms == pytest.approx(109.4, abs=1)


def small(folder: Path, **changes: Any) -> AcesoPrediction:
    small_profile(folder)
    return predict(read_aceso_profile(folder), read_aceso_configuration(configuration(folder, **changes)))


def test_a_model_worked_out_by_hand(tmp_path: Path) -> None:
    first, second = small(tmp_path).stages

    # 14 and 15 operators of 1 + 2 ms; messages of 4 MiB at the bandwidth of 2 MiB, 2 MiB/ms
    assert (first.forward_ms, first.backward_ms, first.incoming_ms, first.outgoing_ms) == (14, 28, 2, 2)
    assert second.iteration_ms == (45 + 4) * 3 + 46 + 49
    # 8 of each parameter's size: itself, a gradient, an fp32 copy and two moments. Softmax shares, dropout has 1.5
    kept = 4 + 16 * 12 + 24
    assert first.allocated_mib == 8 * 14 * 8 + 2 * kept
    assert first.reserved_mib == 14 * 8


def test_recomputation_keeps_the_ends_of_a_part(tmp_path: Path) -> None:
    again = [[0] * 2 + [1] * 3 + [0] * 9, [0] * 15]
    plain, recomputed = small(tmp_path).stages[0], small(tmp_path, recompute_ops=again).stages[0]

    assert recomputed.recompute_ms == 3
    # of qkv, score and softmax the first two are dropped for 2 microbatches, and there once while they are recomputed
    assert recomputed.allocated_mib == plain.allocated_mib - 2 * 32 + 32


def test_a_change_of_division_needs_a_profiled_collective(tmp_path: Path) -> None:
    mixed = {"model_parallel_size_of_each_op": [[1] * 2 + [2] * 12, [2] * 15], "num_gpus": [2, 2]}
    two = {"data_parallel_size_of_each_op": [[2] * 2 + [1] * 12, [1] * 15], "micro_batch_size": 2}
    for tp in (1, 2):
        (tmp_path / f"gpt_small_mbs2_tp{tp}_algo0.csv").write_text(operators(*GPT))
    with pytest.raises(ConfigurationError, match=r"no all_gather of 4 MiB on 2 GPUs was profiled"):
        small(tmp_path, **mixed, **two)
    (tmp_path / "prim_gpt_small_all_gather_2gpus.csv").write_text("data_size(MB),time(ms)\n4,7\n")

    assert small(tmp_path, **mixed, **two).stages[0].incoming_ms == 2 + 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "29 operators, the model of gpt_small has 42"),
        ({"micro_batch_size": 2}, "not profiled with microbatch 2, tp 1, algorithm 0"),
        ({"num_gpus": [1]}, "do not have the lengths"),
        ({"model_name": "bert"}, "models of the kind bert"),
        ({"micro_batch_size": 0}, "sizes below 1"),
        ({"num_gpus": "many"}, "is no configuration of Aceso"),
    ],
)
def test_a_configuration_that_cannot_be_used_says_why(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        small(tmp_path, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "expected the columns op_name"),
        (HEADER + "encoder-embedding,1,2\n", "expected 8 numbers"),
        (HEADER + "encoder-embedding,1,2,3,4,5,6,7,much\n", "could not convert string"),
        (HEADER + "encoder-embedding,1,2,3,4,5,6,7,-1\n", "expected 8 numbers from 0 on"),
    ],
)
def test_a_profile_that_cannot_be_read_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gpt_small_mbs1_tp1_algo0.csv").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_aceso_profile(tmp_path)


def test_a_folder_with_several_models_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no profile of Aceso"):
        read_aceso_profile(tmp_path)
    small_profile(tmp_path)
    (tmp_path / "gpt_large_mbs1_tp1_algo0.csv").write_text(operators(*GPT))
    with pytest.raises(ConfigurationError, match="gpt_large, gpt_small: choose one"):
        read_aceso_profile(tmp_path)
    with pytest.raises(ConfigurationError, match="no profile of gpt_tiny"):
        read_aceso_profile(tmp_path, "gpt_tiny")

    assert set(read_aceso_profile(tmp_path, "gpt_small").cases) == {Case(1, 1, 0), Case(1, 2, 0)}
