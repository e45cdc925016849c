"""What ranks say of themselves before a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from commtrace.benchmarks.facts import RankFacts


def facts(rank: int, **changes: Any) -> RankFacts:
    """A rank of two on each node, with a GPU and two cores of its own."""
    node = f"node{rank // 2}"
    own = RankFacts(
        rank=rank,
        node=node,
        host=node,
        address=f"10.0.0.{rank // 2}",
        port=5000 + rank,
        interface="eth0",
        interface_mbits=200_000,
        versions={"torch": "2.13.0", "NCCL": "2.28.3"},
        environment={"NCCL_DEBUG": "WARN"},
        missing_interfaces=[],
        cores=[2 * (rank % 2), 2 * (rank % 2) + 1],
        machine_cores=4,
        device="NVIDIA H100 80GB HBM3",
        device_id=f"uuid-{rank}",
        device_cores=[2 * (rank % 2), 2 * (rank % 2) + 1],
    )
    return replace(own, **changes)
