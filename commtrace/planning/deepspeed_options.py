"""The names of DeepSpeed's options, so that a misspelt one is named instead of planned without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Final

STAGE3: Final = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
"""Options of ``zero_optimization`` that may also begin with ``stage3_``."""

_BF16: Final = frozenset({
    "bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow", "check_overflow", "enabled",
    "immediate_grad_update",
})  # fmt: skip

_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({
        "activation_checkpointing", "aio", "allgather_size", "amp", "autotuning", "bf16", "bfloat16", "checkpoint",
        "comet", "comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor",
        "curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt",
        "disable_allgather", "disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel",
        "flops_profiler", "fp16", "fp32_allreduce", "gradient_accumulation_steps", "gradient_allreduce_op",
        "gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "log_level",
        "managed_gradient_accumulation", "memory_breakdown", "nebula", "optimizer", "pipeline",
        "prescale_gradients", "progressive_layer_drop", "quantize_training", "scheduler",
        "seq_parallel_communication_data_type", "sequence_parallel_size", "sparse_attention", "sparse_gradients",
        "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size",
        "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
        "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer", "zero_optimization",
    }),
    "zero_optimization": frozenset({
        "allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients", "cpu_offload",
        "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint", "enable_sanity_checks",
        "ignore_unused_parameters", "leaf_module", "legacy_stage1", "load_from_fp32_weights",
        "log_trace_cache_warnings", "memory_efficient_linear", "mics_hierarchical_params_gather", "mics_shard_size",
        "offload_optimizer", "offload_param", "overlap_comm", "override_module_apply", "parameter_alignment",
        "pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory", "stage", "stage3_gather_fp16_weights_on_model_save", "sub_group_size",
        "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights", "zero_quantized_weights", "zeropp_loco_param", *STAGE3,
        *(f"stage3_{name}" for name in STAGE3),
    }),
    "zero_optimization.offload_optimizer": frozenset({
        "buffer_count", "cpuadam_cores_perc", "device", "fast_init", "nvme_path", "pin_memory", "pipeline_read",
        "pipeline_write", "ratio", "super_offload",
    }),
    "zero_optimization.offload_param": frozenset({
        "buffer_count", "buffer_size", "device", "max_in_cpu", "nvme_path", "pin_memory",
    }),
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp16": frozenset({
        "auto_cast", "consecutive_hysteresis", "enabled", "fp16_master_weights_and_grads", "hysteresis",
        "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale",
    }),
    "activation_checkpointing": frozenset({
        "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints", "partition_activations", "profile",
        "synchronize_checkpoint_boundary",
    }),
    "data_types": frozenset({"buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"}),
}  # fmt: skip
"""Names by the section that holds them, those of DeepSpeed 0.19 and of older versions, for the sections a plan reads.

Source: DeepSpeed's runtime/config.py, runtime/constants.py, runtime/precision_config.py and runtime/zero/config.py.
"""


def unknown_options(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each option that DeepSpeed does not have, with the one that may be meant."""
    for section, names in _NAMES.items():
        options = _section(config, section)
        for name in options:
            if name not in names:
                yield f"{_path(section, name)} is no option of DeepSpeed{_meant(str(name), section)}"


def _meant(name: str, section: str) -> str:
    """Return the end of the sentence: the nearest option of the section, or one of the same name elsewhere."""
    near = get_close_matches(name, _NAMES[section], n=1)
    elsewhere = [
        _path(section_of_name, name)
        for section_of_name, names in _NAMES.items()
        if section_of_name != section and name in names
    ]
    meant = near or elsewhere[:1]
    return f": is {meant[0]} meant? Planned without it." if meant else ". Planned without it."


def _path(section: str, name: object) -> str:
    return f"{section}.{name}" if section else str(name)


def _section(config: Mapping[str, object], path: str) -> Mapping[str, object]:
    section: object = config
    for name in filter(None, path.split(".")):
        section = section.get(name) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}
