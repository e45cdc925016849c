"""Read the sizes of a DeepSpeed engine's parameters and its options, so that a run can be compared with its plan.

The names of the options are those of ``commtrace.planning.layout.ZeroOptions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from commtrace.integrations.topology import DeepSpeedEngine

if TYPE_CHECKING:
    from commtrace.trace.topology import Topology

_OPTIONS: Final[Mapping[str, str]] = {
    "reduce_bucket_size": "zero_reduce_bucket_size",
    "stage3_prefetch_bucket_size": "zero_prefetch_bucket_size",
    "stage3_param_persistence_threshold": "zero_param_persistence_threshold",
    "stage3_max_live_parameters": "zero_max_live_parameters",
    "stage3_max_reuse_distance": "zero_max_reuse_distance",
    "reduce_scatter": "zero_reduce_scatter",
    "use_multi_rank_bucket_allreduce": "zero_multi_rank_bucket_allreduce",
    "overlap_comm": "zero_overlap_comm",
}
"""The engine's method for each option."""

_NOT_PLANNED: Final[Mapping[str, str]] = {
    "experts": "has_moe_layers",
    "pipeline": "pipeline_parallelism",
    "quantized weights": "zero_quantized_weights",
    "quantized gradients": "zero_quantized_gradients",
    "hierarchical partitions": "zero_hpz_partition_size",
    "sparse gradients": "sparse_gradients_enabled",
    "offloaded optimizer": "zero_offload_optimizer",
}
_MOST_TENSORS: Final = 65_536


def deepspeed_sizes(engine: DeepSpeedEngine) -> Topology:
    """Return the parameters and the options of an engine; nothing if they are more than a mark can hold."""
    parameters = [parameter for parameter in engine.parameters() if parameter.requires_grad]
    if not parameters or len(parameters) > _MOST_TENSORS:
        return {}
    options = {name: _called(engine, method) for name, method in _OPTIONS.items()}
    dtype = _called(engine, "communication_data_type") or parameters[0].dtype
    left_out = [name for name, method in _NOT_PLANNED.items() if _is_set(name, _called(engine, method))]
    if len(parameters) < sum(1 for _ in engine.parameters()):
        left_out.append("frozen parameters")
    return {
        "zero": {
            **{name: int(value) for name, value in options.items() if value is not None},
            "check_overflow": int(bool(getattr(getattr(engine, "optimizer", None), "check_grad_overflow", True))),
            "parameter_bytes": parameters[0].dtype.itemsize,
            "gradient_bytes": dtype.itemsize,
        },
        "parameter_elements": [int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters],
        "parameter_groups": _groups(engine, parameters),
        "not_planned": left_out,
    }


def _called(engine: object, name: str) -> Any:
    # Another version of DeepSpeed may keep elsewhere what a method of this name reads.
    try:
        value = getattr(engine, name, None)
        return value() if callable(value) else value
    except (AttributeError, KeyError):
        return None


def _is_set(name: str, value: object) -> bool:
    return value not in (None, False, 0, 1) if name == "hierarchical partitions" else bool(value)


def _groups(engine: object, parameters: Iterable[object]) -> list[int]:
    """Return the optimizer's group of every parameter; nothing if there is one."""
    optimizer = getattr(engine, "optimizer", None)
    groups = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "fp16_groups", None) or []
    number = {id(parameter): index for index, group in enumerate(groups) for parameter in group}
    group_of_parameter = [number.get(id(parameter), 0) for parameter in parameters]
    return group_of_parameter if len(set(group_of_parameter)) > 1 else []
