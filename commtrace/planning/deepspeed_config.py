"""A DeepSpeed configuration as the fields of a layout, with DeepSpeed's own names and defaults."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Final

import msgspec

from commtrace.errors import ConfigurationError
from commtrace.planning.deepspeed_options import STAGE3
from commtrace.planning.layout import ZeroOptions

_OFF: Final[Mapping[str, tuple[object, ...]]] = {
    "zero_optimization.offload_optimizer.device": ("none",),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.cpu_offload": (False,),
    "zero_optimization.cpu_offload_param": (False,),
    "zero_optimization.zenflow": (),
    "zero_optimization.mics_shard_size": (-1, 0),
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.stage3_model_persistence_threshold": (sys.maxsize,),
    "zero_optimization.stage3_module_granularity_threshold": (0,),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (False,),
    "zero_optimization.stage3_allgather_sequential": (False,),
    "zero_optimization.parameter_alignment": (False,),
    "zero_optimization.compute_grad_norm": (True,),
    "tensor_parallel.autotp_size": (0, 1),
    "tensor_parallel.tp.tp_size": (1,),
    "sequence_parallel_size": (1,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
    "activation_checkpointing.partition_activations": (False,),
    "activation_checkpointing.cpu_checkpointing": (False,),
    "sparse_gradients": (False,),
}
"""Options on which the numbers depend, but which are not understood: their values that change nothing."""

_SMALL_TYPES: Final = {"fp16": 2, "bf16": 2, "bfloat16": 2, "fp32": 4}


def deepspeed_layout(config: Mapping[str, object], layout: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a layout that a configuration sets, over those of ``layout``.

    Args:
        config: The content of the JSON file that DeepSpeed is given.
        layout: What the configuration does not know, such as dp.

    Raises:
        ConfigurationError: a value is left to DeepSpeed, or the sizes of the batch contradict one another.
    """
    config = _normalised(config)
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ConfigurationError(f"zero_optimization is {zero!r}: give its options, such as {{stage: 2}}")
    named = {field.name for field in fields(ZeroOptions)}
    stage = _number(zero, "stage", 0)
    is_half = _precision(config) != "fp32"
    # DeepSpeed decides on check_overflow itself
    given = {name: _value(zero, name) for name in (named & set(zero)) - {"check_overflow"}}
    try:
        options = msgspec.convert({"overlap_comm": stage == 3, "check_overflow": stage < 3, **given}, ZeroOptions)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"zero_optimization: {error}") from error
    parameter_bytes = 2 if is_half else 4
    communication = config.get("communication_data_type")
    return {
        **layout,
        **_batch(config, _number(layout, "dp", 1)),
        "zero_stage": stage,
        "zero": asdict(options),
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": parameter_bytes if communication is None else _bytes_of(str(communication)),
        "optimizer_bytes": 12 if is_half else 8,
        "clip_gradients": True,
    }


def not_planned(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return a sentence that names the options on which the numbers depend, but which are not understood."""
    config = _normalised(config)
    off = {**_OFF, "data_types.grad_accum_dtype": (_precision(config),)}
    used = [path for path, values in off.items() if _at(config, path) not in (None, *values)]
    return (f"The numbers depend on {', '.join(used)}, which a plan does not understand yet.",) if used else ()


def _normalised(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a configuration with one name for each option: those without ``stage3_`` and ``bfloat16`` are replaced."""
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        zero = {f"stage3_{name}" if name in STAGE3 else name: value for name, value in zero.items()}
        config = {**config, "zero_optimization": zero}
    # DeepSpeed reads the old name only without the new one
    return config if config.get("bf16") is not None else {**config, "bf16": config.get("bfloat16", {})}


def _at(config: Mapping[str, object], path: str) -> object:
    """Return the value of an option, such as ``bf16.enabled``; None if it is not given."""
    value: object = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _precision(config: Mapping[str, object]) -> str:
    """Return the type in which parameters are computed, and gradients accumulated if nothing else is said."""
    if _is_enabled(config, "fp16"):
        return "fp16"
    return "bf16" if _is_enabled(config, "bf16") else "fp32"


def _batch(config: Mapping[str, object], dp: int) -> dict[str, int]:
    """Return the microbatch and their number: train_batch_size is their product with dp."""
    whole = _number(config, "train_batch_size", 0)
    microbatch = _number(config, "train_micro_batch_size_per_gpu", 0)
    steps = _number(config, "gradient_accumulation_steps", 0)
    if whole and not microbatch:
        microbatch = whole // (dp * (steps or 1))
    microbatch = microbatch or 1
    steps = steps or (whole // (dp * microbatch) if whole else 1)
    if whole and whole != microbatch * steps * dp:
        raise ConfigurationError(
            f"train_batch_size ({whole}) is not train_micro_batch_size_per_gpu ({microbatch}) · "
            f"gradient_accumulation_steps ({steps}) · dp ({dp}): change one, or set dp of the layout"
        )
    return {"microbatch": microbatch, "microbatches": steps}


def _value(values: Mapping[str, object], name: str) -> object:
    value = values[name]
    if value == "auto":
        raise ConfigurationError(f'{name} is "auto", which the trainer decides: give the number it will have')
    # DeepSpeed takes 5e8 for a size
    return int(value) if isinstance(value, float) else value


def _number(values: Mapping[str, object], name: str, default: int) -> int:
    value = _value(values, name) if name in values else default
    if not isinstance(value, int):
        raise ConfigurationError(f"{name} is {value!r}: give a number")
    return value


def _is_enabled(config: Mapping[str, object], name: str) -> bool:
    part = config.get(name, {})
    enabled = part.get("enabled", False) if isinstance(part, Mapping) else False
    if enabled == "auto":
        raise ConfigurationError(f'enabled of {name} is "auto", which the trainer decides: give true or false')
    return bool(enabled)


def _bytes_of(name: str) -> int:
    if name not in _SMALL_TYPES:
        raise ConfigurationError(f"communication_data_type is {name}: give one of {', '.join(_SMALL_TYPES)}")
    return _SMALL_TYPES[name]
