"""DeepSpeed's configuration as a layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.deepspeed_config import deepspeed_layout
from commtrace.planning.deepspeed_options import unknown_options
from commtrace.planning.layout import PlannedJob
from commtrace.planning.plan import make_plan, plan_job
from commtrace.planning.plan_file import read_plan_file

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
CONFIG = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e4, "overlap_comm": True},
}


def test_a_configuration_beside_its_plan(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"model": MODEL, "layout": {"dp": 4}, "deepspeed": "ds.json"}))
    in_place = tmp_path / "in_place.json"
    in_place.write_text(json.dumps({"model": MODEL, "layout": {"dp": 4}, "deepspeed": CONFIG}))

    model, layout, notes, _ = read_plan_file(path)

    assert (layout.dp, layout.microbatch, layout.microbatches, layout.zero_stage) == (4, 2, 4, 2)
    assert (layout.zero.reduce_bucket_size, layout.zero.overlap_comm) == (50_000, True)
    assert (layout.parameter_bytes, layout.gradient_bytes, layout.optimizer_bytes) == (2, 2, 12)
    assert notes == ()
    assert read_plan_file(in_place) == PlannedJob(model, layout)
    rows = make_plan(model, layout).stages[0].traffic
    parameters = make_plan(model, layout).parameters
    gradients = sum(row.tensor_bytes for row in rows if row.what == "gradients")
    assert gradients == 4 * 2 * parameters  # one pass for each microbatch
    assert {row.role for row in rows} == {"dp"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, {"microbatch": 3, "microbatches": 1, "zero_stage": 0}),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, {"microbatch": 2, "microbatches": 4}),
        ({}, {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}),
        ({"fp16": {"enabled": True}, "communication_data_type": "fp32"}, {"parameter_bytes": 2, "gradient_bytes": 4}),
    ],
)
def test_options_that_are_left_out_follow_from_the_others(config: dict[str, Any], expected: dict[str, int]) -> None:
    assert expected.items() <= deepspeed_layout(config, {"dp": 2}).items()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, r"train_batch_size \(7\) is not"),
        ({"train_batch_size": "auto"}, 'train_batch_size is "auto"'),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, 'reduce_bucket_size is "auto"'),
        ({"zero_optimization": {"stage": "two"}}, "stage is 'two': give a number"),
        ({"zero_optimization": {"reduce_bucket_size": "many"}}, r"zero_optimization: .* `\$.reduce_bucket_size`"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "zero_optimization: reduce_bucket_size is -1"),
        ({"zero_optimization": True}, "zero_optimization is True"),
        ({"bf16": {"enabled": "auto"}}, 'enabled of bf16 is "auto"'),
        ({"communication_data_type": "int8"}, "communication_data_type is int8"),
    ],
)
def test_a_job_that_cannot_be_planned_says_why(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        deepspeed_layout(config, {"dp": 2})


def notes_of(tmp_path: Path, config: dict[str, Any]) -> tuple[str, ...]:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"model": MODEL, "layout": {"dp": 4}, "deepspeed": config}))
    notes = read_plan_file(path).notes
    assert set(notes) <= set(plan_job(read_plan_file(path)).notes)
    return notes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}, "offload_optimizer.device"),
        ({"offload_optimizer": {}, "offload_param": None}, ""),
        ({"zenflow": {"topk_ratio": 0.1}}, "zenflow"),
        ({"zenflow": {}}, "zenflow"),
        ({"zero_quantized_gradients": True, "zero_quantized_weights": False}, "zero_quantized_gradients"),
        ({"zero_hpz_partition_size": 8}, "zero_hpz_partition_size"),
        ({"stage3_model_persistence_threshold": 1e6, "mics_shard_size": -1}, "stage3_model_persistence_threshold"),
        ({"stage3_model_persistence_threshold": 0}, "stage3_model_persistence_threshold"),
        ({"stage3_model_persistence_threshold": sys.maxsize}, ""),
        ({"stage3_use_all_reduce_for_fetch_params": True}, "stage3_use_all_reduce_for_fetch_params"),
        ({"model_persistence_threshold": 1e6}, "stage3_model_persistence_threshold"),
        ({"allgather_sequential": True}, "stage3_allgather_sequential"),
        ({"zero_hpz_partition_size": 1, "contiguous_gradients": True}, ""),
    ],
)
def test_options_of_zero_that_change_the_numbers_are_named(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    notes = notes_of(tmp_path, {"zero_optimization": {"stage": 3, **options}})

    sentence = f"The numbers depend on zero_optimization.{named}, which a plan does not understand yet."
    assert notes == ((sentence,) if named else ())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size"),
        ({"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1}, ""),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"bfloat16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, ""),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, ""),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing.cpu_checkpointing"),
    ],
)
def test_other_options_that_change_the_numbers_are_named(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    notes = notes_of(tmp_path, {"zero_optimization": {"stage": 1}, **options})

    assert notes == ((f"The numbers depend on {named}, which a plan does not understand yet.",) if named else ())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"zero_optimization": {"stge": 3}}, "zero_optimization.stge is no option of DeepSpeed: is stage meant?"),
        (
            {"zero_optimisation": {"stage": 3}},
            "zero_optimisation is no option of DeepSpeed: is zero_optimization meant?",
        ),
        ({"train_batchsize": 8}, "train_batchsize is no option of DeepSpeed: is train_batch_size meant?"),
        ({"bf16": {"enable": True}}, "bf16.enable is no option of DeepSpeed: is enabled meant?"),
        ({"stage": 3}, "stage is no option of DeepSpeed: is zero_optimization.stage meant?"),
        ({"my_notes": "none"}, "my_notes is no option of DeepSpeed."),
    ],
)
def test_an_option_that_deepspeed_does_not_have_is_named(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    assert notes_of(tmp_path, options) == (f"{sentence} Planned without it.",)


def test_options_of_zero_3_need_not_begin_with_it() -> None:
    zero = {"stage": 3, "prefetch_bucket_size": 5, "stage3_max_live_parameters": 7}
    options = deepspeed_layout({"zero_optimization": zero}, {})["zero"]

    assert isinstance(options, dict)
    assert {"stage3_prefetch_bucket_size": 5, "stage3_max_live_parameters": 7}.items() <= options.items()


def test_every_option_of_the_installed_deepspeed_is_known() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config", reason="deepspeed is not installed")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    sections = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "bf16": precision.DeepSpeedBF16Config,
        "fp16": precision.DeepSpeedFP16Config,
    }
    for section, kind in sections.items():
        names = {name for key, field in kind.model_fields.items() for name in (key, field.alias) if name}
        assert list(unknown_options({section: dict.fromkeys(names)})) == []


def test_a_configuration_alone_says_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))

    with pytest.raises(ConfigurationError, match="name it in a file with the sizes of the model"):
        read_plan_file(path)
