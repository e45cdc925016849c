"""Set facts about a job's dimensions to which several integrations contribute (DDP or FSDP inside a pipeline)."""

from __future__ import annotations

import re
from typing import Final

import torch
from torch.distributed import ProcessGroup

from commtrace.capture.tracer import Tracer
from commtrace.trace.metadata import UNKNOWN_ROLE

_SAYS_NOTHING: Final = re.compile(rf"{UNKNOWN_ROLE}|world|default|dim_\d+")
"""Roles without a meaning: torch's own defaults, those of unnamed meshes among them."""


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
    if _SAYS_NOTHING.fullmatch(tracer.groups.state(process_group).group.role):
        tracer.set_role(process_group, role)
    return tracer.groups.state(process_group).group.role
