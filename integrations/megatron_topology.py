"""Read the roles of megatron-core's process groups, by identity: different groups may have the same members."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.distributed import ProcessGroup

# First come, first served: where two names hold one group, the first one says what it is for.
_ROLE_OF_GLOBAL: Final[Mapping[str, str]] = {
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

_ROLE_OF_COLLECTION_FIELD: Final[Mapping[str, str]] = {
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

_DIMENSIONS: Final[Mapping[str, str]] = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "expert-tp": "expert_tensor_parallel",
}


def group_roles(parallel_state: object) -> list[tuple[ProcessGroup, str]]:
    """Return every group that ``megatron.core.parallel_state`` holds, once, with its role."""
    holdings = vars(parallel_state)
    unknown = {name: _role_from_name(name) for name in holdings if _holds_a_group(name) and name not in _ROLE_OF_GLOBAL}
    roles = {**_ROLE_OF_GLOBAL, **unknown}
    return list(_distinct((holdings.get(name), role) for name, role in roles.items()))


def collection_roles(collection: object) -> list[tuple[ProcessGroup, str]]:
    """Return the same for a ``ProcessGroupCollection``, or for those of a pipeline's modules."""
    modules = getattr(collection, "module_pgs", None)
    collections = [collection] if modules is None else list(modules.values())
    fields = _ROLE_OF_COLLECTION_FIELD.items()
    return [
        found
        for each in collections
        for found in _distinct((getattr(each, field, None), role) for field, role in fields)
    ]


def communicator_roles(communicator: object) -> list[tuple[ProcessGroup, str]]:
    """Return the groups of a ``MultiModulePipelineCommunicator`` that join one module's stages to the next one's."""
    bridges = getattr(communicator, "bridge_comms", ())
    fields = {"bridge_pg": "pp", "src_grid_broadcast_pg": "bridge", "dest_grid_broadcast_pg": "bridge"}.items()
    return list(_distinct((getattr(bridge, field, None), role) for bridge in bridges for field, role in fields))


def topology(parallel_state: object) -> dict[str, Any]:
    """Return the coordinates of this rank, sizes of every dimension, and the framework's version."""
    coordinates, sizes = {}, {}
    for dimension, name in _DIMENSIONS.items():
        rank = getattr(parallel_state, f"get_{name}_rank", None)
        size = getattr(parallel_state, f"get_{name}_world_size", None)
        if rank is not None and size is not None:
            coordinates[dimension], sizes[dimension] = int(rank()), int(size())
    if sizes.get("ep", 1) == 1 and sizes.get("expert-tp") == sizes.get("tp"):
        # Megatron has the groups of experts in dense models as well; there they say nothing.
        coordinates.pop("expert-tp", None)
        sizes.pop("expert-tp", None)
    sizes["vpp"] = int(getattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None) or 1)
    return {"coordinates": coordinates, "parallel": sizes, "framework": framework()}


def framework() -> dict[str, str]:
    """Return name and version of the megatron-core in this process."""
    version = getattr(sys.modules.get("megatron.core"), "__version__", "")
    return {"name": "megatron-core", "version": str(version)}


def _distinct(candidates: Iterator[tuple[Any, str]]) -> Iterator[tuple[ProcessGroup, str]]:
    found: list[tuple[ProcessGroup, str]] = []
    known: set[int] = set()
    for holding, role in candidates:
        for group in _groups_in(holding):
            if id(group) not in known:
                known.add(id(group))
                found.append((group, role))
    without_context_parallelism = all(group.size() == 1 for group, role in found if role == "cp")
    for group, role in found:
        yield group, role.removesuffix("-cp") if without_context_parallelism else role


def _groups_in(holding: object) -> list[ProcessGroup]:
    if isinstance(holding, dict):
        holding = list(holding.values())
    if isinstance(holding, (list, tuple)):
        return [group for group in holding if isinstance(group, ProcessGroup)]
    return [holding] if isinstance(holding, ProcessGroup) else []


def _holds_a_group(name: str) -> bool:
    return name.isupper() and "_GROUP" in name


def _role_from_name(name: str) -> str:
    """Return the role of a group that a later Megatron adds: ``_VISION_ENCODER_GROUP`` → ``vision-encoder``."""
    return name.strip("_").replace("_GROUPS", "").replace("_GROUP", "").lower().replace("_", "-")
