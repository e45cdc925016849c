"""Detect communication that bypasses torch.distributed, by the state of other libraries' modules, importing nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

PART: Final = "search for invisible communication"

CAPTURED_COMMUNICATION: Final = "communication captured into CUDA graphs"
"""A path that the capture itself detects: a communication was launched while its stream was recording a graph."""

REPLAYED_GRAPHS: Final = "CUDA graphs"
"""A path of this list that is none where replays are recorded."""

ACTIVE: Final = "active"
LOADED: Final = "loaded"

Modules = Mapping[str, ModuleType]


def find_invisible(modules: Modules | None = None) -> dict[str, str]:
    """Return the state of every known path in this process, by name."""
    loaded = sys.modules if modules is None else modules
    states = ((name, state_of(loaded)) for name, state_of in INVISIBLE_PATHS.items())
    return {name: state for name, state in states if state is not None}


def _held(modules: Modules, module: str, name: str) -> object:
    # By __dict__: a lazy module would import the name on access.
    imported = modules.get(module)
    return None if imported is None else vars(imported).get(name)


def _user_buffers(modules: Modules) -> str | None:
    # initialize_ub fills it, destroy_ub empties it: transformer_engine/pytorch/module/base.py.
    return ACTIVE if _held(modules, "transformer_engine.pytorch.module.base", "_ub_communicators") else None


def _deep_ep(modules: Modules) -> str | None:
    # Megatron keeps the buffers it has made; other users of deep_ep.Buffer keep theirs to themselves.
    fused = "megatron.core.transformer.moe.fused_a2a"
    if any(_held(modules, fused, name) is not None for name in ("_buffer", "_hybrid_ep_buffer")):
        return ACTIVE
    return LOADED if "deep_ep" in modules else None


def _nccl_ep(modules: Modules) -> str | None:
    # Megatron's _NCCLEPManager, and other users of Transformer Engine's, begin with ep_bootstrap, which sets it.
    return ACTIVE if _held(modules, "transformer_engine.pytorch.ep", "_BOOTSTRAPPED") else None


def _symmetric_memory(modules: Modules) -> str | None:
    symmetric_memory = "torch.distributed._symmetric_memory"
    names = ("_group_name_to_store", "_group_name_to_workspace_tensor", "_symm_mem_pools")
    return ACTIVE if any(_held(modules, symmetric_memory, name) for name in names) else None


def _nvshmem(modules: Modules) -> str | None:
    return LOADED if "nvshmem.core" in modules or "nvshmem" in modules else None


def _cuda_graphs(modules: Modules) -> str | None:
    # torch.cuda.graph makes one stream for all captures, at the first capture.
    graph = _held(modules, "torch.cuda.graphs", "graph")
    return ACTIVE if getattr(graph, "default_capture_stream", None) is not None else None


INVISIBLE_PATHS: Final[Mapping[str, Callable[[Modules], str | None]]] = {
    "Transformer Engine user buffers": _user_buffers,  # tensor-parallel communication overlapped with GEMMs
    "DeepEP": _deep_ep,  # dispatch and combine of experts
    "NCCL EP": _nccl_ep,  # the same
    "symmetric memory": _symmetric_memory,  # communication inside kernels on symmetric memory
    "NVSHMEM": _nvshmem,  # communication issued by kernels
    REPLAYED_GRAPHS: _cuda_graphs,  # communication replayed from a graph
}
"""Functions that find the state of each way of communicating that is not seen, by its name."""
