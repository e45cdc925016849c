"""Reads the variables of a job's launcher: rank, world size, and the name of the job.

The variables are those that the launchers' own sources set:

* torchrun, and what starts through it (``accelerate launch``): RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
  TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT
* DeepSpeed's ``deepspeed.launcher.launch``: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE
* a pod of a Kubeflow PyTorchJob: RANK, WORLD_SIZE, of processes where each pod has one, else of the pod
* Open MPI's ``mpirun``: OMPI_COMM_WORLD_…; MVAPICH2: MV2_COMM_WORLD_…; MPICH and Intel MPI (Hydra): PMI_RANK,
  PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS; Cray's PALS: PMI_RANK, PMI_SIZE, PALS_LOCAL_RANKID
* a task of ``srun``: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; a batch script has no step
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_NO_NAMES: Final = frozenset({"", "none", "123456789"})
"""Rendezvous ids of torchrun and DeepSpeed's elastic launcher where nobody has given one."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Position(NamedTuple):
    """A process among those of its job. None where the launcher does not say."""

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
    _Variables("RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    _Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)
    ),
    _Variables("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"), ("MPI_LOCALNRANKS",)),
    _Variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ()),
)
"""The innermost first: torchrun may be started by mpirun, and that by srun."""


def position(environment: Mapping[str, str]) -> Position | None:
    """Return the place of this process by the innermost launcher; None if there is no launcher.

    A script may set RANK and WORLD_SIZE itself from its launcher's variables, without LOCAL_RANK: what is missing is
    taken from a launcher that says the same rank and size.
    """
    found = [place for variables in _LAUNCHERS if (place := _place(variables, environment)) is not None]
    if not found:
        return None
    same = [place for place in found if place[:2] == found[0][:2]]
    return Position(
        *found[0][:2],
        next((place.local_rank for place in same if place.local_rank is not None), None),
        next((place.local_world_size for place in same if place.local_world_size is not None), None),
    )


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Return the number of this process on its node; None if no launcher says it."""
    found = position(environment)
    return _number(environment.get("LOCAL_RANK")) if found is None else found.local_rank


def job_name(environment: Mapping[str, str]) -> str:
    """Return the launcher's name of the job on all nodes alike: a rendezvous id, or Slurm's job and step; else empty.

    One ``srun`` is one run, ``slurm-4711.0``, as Slurm itself names its steps. torchrun invents an id on a single node,
    which is left to :func:`commtrace.identity.run_id`.
    """
    rendezvous = environment.get("TORCHELASTIC_RUN_ID", "")
    is_invented = bool(_UUID.fullmatch(rendezvous)) and is_on_one_node(environment)
    if rendezvous not in _NO_NAMES and not is_invented:
        return rendezvous
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    if job:
        return f"slurm-{job}.{step}" if step else f"slurm-{job}"
    return ""


def is_on_one_node(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher says that all ranks are on this node. False also where it does not say."""
    place = position(environment)
    if place is None:
        return False
    return environment.get("GROUP_WORLD_SIZE") == "1" or place.world_size in (1, place.local_world_size)


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
    """Return how often torchrun has started the ranks of this node again because one of them failed.

    It counts no restart that came from a failure of another node, or because nodes came or went.
    """
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
