"""Read the roles of DeepSpeed's process groups, by identity (the first holder counts), and this rank's place."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.distributed import ProcessGroup

_ROLE_OF_MPU_METHOD: Final[Mapping[str, str]] = {
    "get_pipe_parallel_group": "pp",
    "get_pipeline_model_parallel_group": "pp",
    "get_tensor_model_parallel_group": "tp",
    "get_slice_parallel_group": "tp",
    "get_data_parallel_group": "dp",
    "get_sequence_parallel_group": "sp",
    "get_sequence_data_parallel_group": "dp-sp",
    "get_model_parallel_group": "mp",
}

_ROLE_OF_GLOBAL: Final[Mapping[str, str]] = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_EXPERT_PARALLEL_GROUP": "ep",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert-dp",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "dp-shard",
    "_ALL_TO_ALL_GROUP": "dp",
    "_MODEL_PARALLEL_GROUP": "mp",
}

_ROLE_OF_ENGINE_ATTRIBUTE: Final[Mapping[str, str]] = {
    "data_parallel_group": "dp",
    "seq_parallel_group": "sp",
    "seq_data_parallel_group": "dp-sp",
    "expert_parallel_group": "ep",
    "expert_data_parallel_group": "expert-dp",
    "local_all_to_all_group": "dp",
}

_DIMENSIONS: Final = ("tp", "pp", "dp", "sp", "ep", "expert-dp")


def group_roles(engine: object) -> list[tuple[ProcessGroup, str]]:
    """Return each of the engine's groups, once, with its role; none if Megatron's integration sets the roles."""
    mpu = getattr(engine, "mpu", None)
    if mpu is not None and mpu is sys.modules.get("megatron.core.parallel_state"):
        return []
    found: list[tuple[ProcessGroup, str]] = []
    known: set[int] = set()
    for holding, role in _holdings(engine, mpu):
        for group in _groups_in(holding):
            if id(group) not in known:
                known.add(id(group))
                found.append((group, role))
    return found


def topology(engine: Any, roles: list[tuple[ProcessGroup, str]]) -> dict[str, Any]:
    """Return the coordinates of this rank, sizes of every dimension, ZeRO stage, schedule, and DeepSpeed's version."""
    coordinates = dict.fromkeys(("tp", "pp", "dp"), 0)
    sizes = dict.fromkeys(("tp", "pp", "dp"), 1)
    topology: dict[str, Any] = {}
    for dimension in _DIMENSIONS:
        group = next((group for group, role in roles if role == dimension), None)
        if group is not None:
            coordinates[dimension], sizes[dimension] = int(group.rank()), int(group.size())
    if roles:
        topology = {"coordinates": coordinates, "parallel": sizes}
    compiled = getattr(engine, "is_deepcompile_enabled", None)
    if compiled is not None and compiled():
        topology["not_visible"] = ["What graphs compiled by DeepCompile communicate: it is issued in C++."]
    stages = int(getattr(engine, "num_stages", 1))
    return {
        **topology,
        "framework": {"name": "deepspeed", "version": _version()},
        "schedule": "1f1b" if stages > 1 else "no pipelining",
        "stages": stages,
        "chunks": 1,
        "microbatches": int(engine.gradient_accumulation_steps()),
        "zero_stage": int(engine.zero_optimization_stage()),
    }


def _holdings(engine: Any, mpu: object) -> Iterator[tuple[Any, str]]:
    groups = sys.modules.get("deepspeed.utils.groups")
    for holder in (getattr(engine, "grid", None), None if mpu is groups else mpu):
        for name, role in _ROLE_OF_MPU_METHOD.items():
            method = getattr(holder, name, None)
            if method is not None:
                yield _group_of(method), role
    for name, role in _ROLE_OF_GLOBAL.items():
        yield getattr(groups, name, None), role
    for name, role in _ROLE_OF_ENGINE_ATTRIBUTE.items():
        yield getattr(engine, name, None), role
    module = getattr(engine, "module", None)
    # ZeRO 3 partitions over the whole world, rather than over its own data-parallel group, unless configured otherwise.
    partitions = (getattr(parameter, "ds_process_group", None) for parameter in engine.parameters())
    yield {id(group): group for group in partitions}, "dp"
    for tied in getattr(module, "tied_comms", {}).values():
        yield tied.get("group"), "tied"
    yield getattr(module, "world_group", None), "world"
    yield getattr(groups, "_WORLD_GROUP", None), "world"


def _group_of(method: Any) -> object:
    # The mpu may have been written for something else, and may not have made the group.
    try:
        return method()
    except (AssertionError, AttributeError, KeyError, NotImplementedError):
        return None


def _groups_in(holding: object) -> list[ProcessGroup]:
    if isinstance(holding, dict):
        return [group for group in holding.values() if isinstance(group, ProcessGroup)]
    return [holding] if isinstance(holding, ProcessGroup) else []


def _version() -> str:
    return str(getattr(sys.modules.get("deepspeed"), "__version__", ""))
