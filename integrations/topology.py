"""The roles of process groups and the place of this rank in the job, as each framework holds them.

A group gets its role by identity, not by its members, which several groups may share; the first holder counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import torch
from torch.distributed import ProcessGroup

from commtrace.capture.collectives.groups import is_generic_role
from commtrace.capture.tracer import Tracer
from commtrace.trace.schedule import NO_PIPELINING, ONE_F_ONE_B

if TYPE_CHECKING:
    from commtrace.trace.topology import Topology

GroupRoles: TypeAlias = list[tuple[ProcessGroup, str]]
"""Every group once, with its role."""


def add_dimension(tracer: Tracer, dimension: str, rank: int, size: int) -> None:
    """Add the place of this rank in one parallel dimension to the topology."""
    _, known = tracer.topology()
    tracer.set_topology(
        {
            "coordinates": {**known.get("coordinates", {}), dimension: rank},
            "parallel": {**known.get("parallel", {}), dimension: size},
        }
    )


def add_framework(tracer: Tracer, name: str) -> None:
    """Add a framework to the topology: ``torch.distributed.pipelining + FSDP``."""
    _, known = tracer.topology()
    names = [part for part in str(known.get("framework", {}).get("name", "")).split(" + ") if part]
    if name not in names:
        tracer.set_topology({"framework": {"name": " + ".join([*names, name]), "version": torch.__version__}})


def set_role_if_unknown(tracer: Tracer, process_group: ProcessGroup, role: str) -> str:
    """Set the role of a group, unless a framework or the name of its mesh dimension has; return its role."""
    if is_generic_role(tracer.groups.state(process_group).group.role):
        tracer.set_role(process_group, role)
    return tracer.groups.state(process_group).group.role


def _distinct(holdings: Iterable[tuple[object, str]]) -> GroupRoles:
    """Return every group that is held, alone or in a container, with the role of its first holder."""
    groups: dict[int, tuple[ProcessGroup, str]] = {}
    for holding, role in holdings:
        for group in _groups_in(holding):
            groups.setdefault(id(group), (group, role))
    return list(groups.values())


def _groups_in(holding: object) -> list[ProcessGroup]:
    if isinstance(holding, dict):
        holding = list(holding.values())
    held = holding if isinstance(holding, (list, tuple)) else [holding]
    return [group for group in held if isinstance(group, ProcessGroup)]


# Megatron

_MEGATRON_GLOBALS: Final[Mapping[str, str]] = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_GLOO": "dp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "cp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": "dp-cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp-cp",
    "_HYBRID_DP_CP_GROUPS": "dp-cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp-shard",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp-shard",
    "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp-replicate",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expert-tp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert-dp",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expert-dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expert-dp-shard",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expert-dp-shard",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "dp-replicate",
    "_EMBEDDING_GROUP": "embedding",
    "_POSITION_EMBEDDING_GROUP": "position-embedding",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "dist-opt",
    # Generalized tensor parallelism, since 0.19. Where it is not used, most of these are groups of above.
    "_GTP_WEIGHT_REMAT_GROUP": "gtp",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP": "expert-gtp",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "gtp-dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "gtp-dp-cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "gtp-dp-shard",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "gtp-expert-dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "gtp-expert-dp-shard",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "gtp-tp-ep-pp",
}

_MEGATRON_COLLECTION: Final[Mapping[str, str]] = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "cp": "cp",
    "hcp": "cp",
    "dp_cp": "dp-cp",
    "intra_dp_cp": "dp-shard",
    "ep": "ep",
    "expt_tp": "expert-tp",
    "expt_dp": "expert-dp",
    "intra_expt_dp": "expert-dp-shard",
    "inter_dist_opt": "dp-replicate",
    "embd": "embedding",
    "pos_embd": "position-embedding",
    "mp": "mp",
    "tp_dp_cp": "tp-dp-cp",
    "tp_cp": "tp-cp",
    "tp_ep": "tp-ep",
    "tp_ep_pp": "tp-ep-pp",
    "intra_dist_opt": "dist-opt",
    "dp_cp_ag": "dp-cp",
    "expt_dp_ag": "expert-dp",
    "gtp_remat": "gtp",
    "expt_gtp_remat": "expert-gtp",
    "dp_cp_gtp_remat": "gtp-dp-cp",
    "expt_dp_gtp_remat": "gtp-expert-dp",
    "tp_ep_pp_with_egtp_remat": "gtp-tp-ep-pp",
}

_MEGATRON_DIMENSIONS: Final[Mapping[str, str]] = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "expert-tp": "expert_tensor_parallel",
}


def megatron_roles(parallel_state: object) -> GroupRoles:
    """Return the groups that ``megatron.core.parallel_state`` holds."""
    held = vars(parallel_state)
    unknown = {name: _role_from_name(name) for name in held if _holds_a_group(name) and name not in _MEGATRON_GLOBALS}
    roles = {**_MEGATRON_GLOBALS, **unknown}
    return _distinct_of_megatron((held.get(name), role) for name, role in roles.items())


def collection_roles(collection: object) -> GroupRoles:
    """Return the groups of a ``ProcessGroupCollection``, or of those of a pipeline's modules."""
    modules = getattr(collection, "module_pgs", None)
    collections = [collection] if modules is None else list(modules.values())
    fields = _MEGATRON_COLLECTION.items()
    return [
        group_and_role
        for each in collections
        for group_and_role in _distinct_of_megatron((getattr(each, field, None), role) for field, role in fields)
    ]


def communicator_roles(communicator: object) -> GroupRoles:
    """Return the groups of a ``MultiModulePipelineCommunicator`` that join one module's stages to the next one's."""
    bridges = getattr(communicator, "bridge_comms", ())
    fields = {"bridge_pg": "pp", "src_grid_broadcast_pg": "bridge", "dest_grid_broadcast_pg": "bridge"}.items()
    return _distinct((getattr(bridge, field, None), role) for bridge in bridges for field, role in fields)


def megatron_topology(parallel_state: object) -> Topology:
    """Return the coordinates of this rank, sizes of every dimension, and the framework's version."""
    coordinates, sizes = {}, {}
    for dimension, name in _MEGATRON_DIMENSIONS.items():
        rank = getattr(parallel_state, f"get_{name}_rank", None)
        size = getattr(parallel_state, f"get_{name}_world_size", None)
        if rank is not None and size is not None:
            coordinates[dimension], sizes[dimension] = int(rank()), int(size())
    if sizes.get("ep", 1) == 1 and sizes.get("expert-tp") == sizes.get("tp"):
        # Megatron has the groups of experts in dense models as well; there they say nothing.
        coordinates.pop("expert-tp", None)
        sizes.pop("expert-tp", None)
    sizes["vpp"] = int(getattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None) or 1)
    return {"coordinates": coordinates, "parallel": sizes, "framework": megatron_framework()}


def megatron_framework() -> dict[str, str]:
    """Return name and version of the megatron-core in this process."""
    return {"name": "megatron-core", "version": _version("megatron.core")}


def _distinct_of_megatron(holdings: Iterable[tuple[object, str]]) -> GroupRoles:
    groups = _distinct(holdings)
    has_context_parallelism = any(group.size() > 1 for group, role in groups if role == "cp")
    return groups if has_context_parallelism else [(group, role.removesuffix("-cp")) for group, role in groups]


def _holds_a_group(name: str) -> bool:
    return name.isupper() and "_GROUP" in name


def _role_from_name(name: str) -> str:
    """Return the role of a group that a later Megatron adds: ``_VISION_ENCODER_GROUP`` → ``vision-encoder``."""
    return name.strip("_").replace("_GROUPS", "").replace("_GROUP", "").lower().replace("_", "-")


# DeepSpeed

_MPU_METHODS: Final[Mapping[str, str]] = {
    "get_pipe_parallel_group": "pp",
    "get_pipeline_model_parallel_group": "pp",
    "get_tensor_model_parallel_group": "tp",
    "get_slice_parallel_group": "tp",
    "get_data_parallel_group": "dp",
    "get_sequence_parallel_group": "sp",
    "get_sequence_data_parallel_group": "dp-sp",
    "get_model_parallel_group": "mp",
}

_DEEPSPEED_GLOBALS: Final[Mapping[str, str]] = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_EXPERT_PARALLEL_GROUP": "ep",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert-dp",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "dp-shard",
    "_ALL_TO_ALL_GROUP": "dp",
    "_MODEL_PARALLEL_GROUP": "mp",
}

_ENGINE_ATTRIBUTES: Final[Mapping[str, str]] = {
    "data_parallel_group": "dp",
    "seq_parallel_group": "sp",
    "seq_data_parallel_group": "dp-sp",
    "expert_parallel_group": "ep",
    "expert_data_parallel_group": "expert-dp",
    "local_all_to_all_group": "dp",
}

_DEEPSPEED_DIMENSIONS: Final = ("tp", "pp", "dp", "sp", "ep", "expert-dp")


class DeepSpeedEngine(Protocol):
    """The part of a ``DeepSpeedEngine`` that is used."""

    global_steps: int

    def gradient_accumulation_steps(self) -> int: ...

    def is_gradient_accumulation_boundary(self) -> bool: ...

    def zero_optimization_stage(self) -> int: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


def deepspeed_roles(engine: DeepSpeedEngine) -> GroupRoles:
    """Return the groups of an engine; none if Megatron's integration sets the roles."""
    mpu = getattr(engine, "mpu", None)
    if mpu is not None and mpu is sys.modules.get("megatron.core.parallel_state"):
        return []
    return _distinct(_holdings(engine, mpu))


def deepspeed_topology(engine: DeepSpeedEngine, roles: GroupRoles) -> Topology:
    """Return the coordinates of this rank, sizes of every dimension, ZeRO stage, schedule, and DeepSpeed's version."""
    coordinates = dict.fromkeys(("tp", "pp", "dp"), 0)
    sizes = dict.fromkeys(("tp", "pp", "dp"), 1)
    for dimension in _DEEPSPEED_DIMENSIONS:
        group = next((group for group, role in roles if role == dimension), None)
        if group is not None:
            coordinates[dimension], sizes[dimension] = int(group.rank()), int(group.size())
    layout: Topology = {"coordinates": coordinates, "parallel": sizes} if roles else {}
    stages = int(getattr(engine, "num_stages", 1))
    return {
        **layout,
        "framework": {"name": "deepspeed", "version": _version("deepspeed")},
        "schedule": ONE_F_ONE_B if stages > 1 else NO_PIPELINING,
        "stages": stages,
        "chunks": 1,
        "microbatches": int(engine.gradient_accumulation_steps()),
        "zero_stage": int(engine.zero_optimization_stage()),
    }


def _holdings(engine: DeepSpeedEngine, mpu: object) -> Iterator[tuple[object, str]]:
    groups = sys.modules.get("deepspeed.utils.groups")
    for holder in (getattr(engine, "grid", None), None if mpu is groups else mpu):
        for name, role in _MPU_METHODS.items():
            method = getattr(holder, name, None)
            if method is not None:
                yield _group_of(method), role
    for name, role in _DEEPSPEED_GLOBALS.items():
        yield getattr(groups, name, None), role
    for name, role in _ENGINE_ATTRIBUTES.items():
        yield getattr(engine, name, None), role
    module = getattr(engine, "module", None)
    # ZeRO 3 partitions over the whole world, rather than over its own data-parallel group, unless configured otherwise.
    partitions = (getattr(parameter, "ds_process_group", None) for parameter in engine.parameters())
    yield {id(group): group for group in partitions}, "dp"
    for tied in getattr(module, "tied_comms", {}).values():
        yield tied.get("group"), "tied"
    yield getattr(module, "world_group", None), "world"
    yield getattr(groups, "_WORLD_GROUP", None), "world"


def _group_of(method: Callable[[], object]) -> object:
    # The mpu may have been written for something else, and may not have made the group.
    try:
        return method()
    except (AssertionError, AttributeError, KeyError, NotImplementedError):
        return None


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__version__", ""))
