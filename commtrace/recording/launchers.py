"""Read the variables of a job's launcher, as its source sets them: rank, world size, and the name of the job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_NO_NAMES: Final = frozenset({"", "none", "123456789"})
"""Rendezvous ids of torchrun and DeepSpeed's elastic launcher where none was given."""

_MOST_NODES: Final = 1 << 16

_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Position(NamedTuple):
    """A process among those of its job; None where the launcher gives no number."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None


class _Variables(NamedTuple):
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]


_LAUNCHERS: Final = (
    # torchrun and ``accelerate launch``; DeepSpeed; a pod of a Kubeflow PyTorchJob with one process
    _Variables("RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    # Open MPI
    _Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # MVAPICH2
    _Variables(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)
    ),
    # MPICH and Intel MPI (Hydra); Cray's PALS
    _Variables("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"), ("MPI_LOCALNRANKS",)),
    # a task of ``srun``; a batch script has no step
    _Variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ()),
)
"""The innermost first: torchrun may be started by mpirun, and that by srun."""


def position(environment: Mapping[str, str]) -> Position | None:
    """Return the place of this process by the innermost launcher; None if there is no launcher."""
    places = [place for variables in _LAUNCHERS if (place := _place(variables, environment)) is not None]
    if not places:
        return None
    # A script may set RANK and WORLD_SIZE without LOCAL_RANK: that is another launcher's with the same rank and size.
    same = [place for place in places if place[:2] == places[0][:2]]
    return Position(
        *places[0][:2],
        next((place.local_rank for place in same if place.local_rank is not None), None),
        next((place.local_world_size for place in same if place.local_world_size is not None), None),
    )


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Return the number of this process on its node; None if no launcher says it."""
    place = position(environment)
    return _number(environment.get("LOCAL_RANK")) if place is None else place.local_rank


def counts_ranks_of_node(environment: Mapping[str, str]) -> bool:
    """Return False if the number on the node comes without their count, as Ray says 0 to all of them."""
    place = position(environment)
    return "LOCAL_RANK" not in environment or (place is not None and place.local_world_size is not None)


def job_name(environment: Mapping[str, str]) -> str:
    """Return the launcher's name of the job on all nodes alike, a rendezvous id or ``slurm-JOB.STEP``; else ""."""
    rendezvous = environment.get("TORCHELASTIC_RUN_ID", "")
    # torchrun invents an id on a single node, which is left to commtrace.recording.identity.run_id.
    is_invented = bool(_UUID.fullmatch(rendezvous)) and is_on_one_node(environment)
    if rendezvous not in _NO_NAMES and not is_invented:
        return rendezvous
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    if job:
        return f"slurm-{job}.{step}" if step else f"slurm-{job}"
    return ""


def is_on_one_node(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher puts all ranks on this node; False also if it does not say."""
    place = position(environment)
    if place is None:
        return False
    return environment.get("GROUP_WORLD_SIZE") == "1" or place.world_size in (1, place.local_world_size)


def ranks_per_node(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks this node has, under launchers that number ranks node by node; None under others."""
    # mpirun and srun can place neighbouring ranks on different nodes.
    sizes = (_number(environment.get(name)) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    return next((size for size in sizes if size), None)


def listed_nodes(environment: Mapping[str, str]) -> list[str]:
    """Return the nodes that Slurm gave to this step, or else to the job, in its order; empty without Slurm."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return list(dict.fromkeys(name for part in _outside_brackets(listed) for name in _expanded(part)))


def _outside_brackets(listed: str) -> list[str]:
    """Divide ``a[1-2,5],b`` at the commas that are in no brackets."""
    return [part for part in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", listed) if part.strip()]


def _expanded(part: str) -> list[str]:
    """Return the names of ``rack[1-2]node[08-10]``; numbers keep their zeros."""
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, numbers, after = match.groups()
    return [f"{before}{number}{rest}" for number in _numbers(numbers) for rest in _expanded(after)]


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        low, high = _number(first), _number(last or first)
        if low is None or high is None or not low <= high < low + _MOST_NODES:
            continue  # not as Slurm writes it: no name is better than a wrong one
        numbers += (str(number).zfill(len(first)) for number in range(low, high + 1))
    return numbers


def is_ray_worker(environment: Mapping[str, str], parent: int) -> bool:
    """Return whether Ray has started this process itself; ``parent`` is the number of its parent.

    Ray kills its workers when it is done with them, without a signal that Python hears.
    """
    return environment.get("RAY_RAYLET_PID") == str(parent)


def agent_store(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the store that torchrun itself keeps for its ranks; None where a rank keeps it."""
    port = _number(environment.get("MASTER_PORT"))
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or port is None:
        return None
    return environment.get("MASTER_ADDR", ""), port


def requeues(environment: Mapping[str, str]) -> int:
    """Return how often Slurm has started the job again."""
    return _number(environment.get("SLURM_RESTART_COUNT")) or 0


def worker_restarts(environment: Mapping[str, str]) -> int:
    """Return how often torchrun has started this node's ranks again after a failure of one of them."""
    # Not counted: restarts after a failure of another node, or because nodes came or went.
    return _number(environment.get("TORCHELASTIC_RESTART_COUNT")) or 0


def _place(variables: _Variables, environment: Mapping[str, str]) -> Position | None:
    rank, world_size = _number(environment.get(variables.rank)), _number(environment.get(variables.world_size))
    if rank is None or world_size is None:
        return None
    local_ranks = (_number(environment.get(name)) for name in variables.local_rank)
    local_sizes = (_number(environment.get(name)) for name in variables.local_world_size)
    return Position(
        rank,
        world_size,
        next((number for number in local_ranks if number is not None), None),
        next((number for number in local_sizes if number is not None), None),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None
