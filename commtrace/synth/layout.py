"""Form process groups in Megatron's order of ranks: tp, cp, dp, pp from fast to slow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commtrace.synth.job import Job
from commtrace.trace.metadata import Group, group_id
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of a job by role; ``members`` are global ranks, of shape (groups, members)."""

    job: Job
    members: dict[str, Int64]
    groups: dict[str, tuple[Group, ...]]

    @classmethod
    def of(cls, job: Job) -> Layout:
        members = _members(job)
        ordinals: dict[tuple[int, ...], int] = {}
        groups: dict[str, tuple[Group, ...]] = {}
        for role, table in members.items():
            groups[role] = tuple(_group(role, tuple(row), ordinals) for row in np.sort(table, axis=1).tolist())
        return cls(job, members, groups)

    @property
    def ranks_per_stage(self) -> int:
        return self.job.tp * self.job.cp * self.job.dp

    @property
    def gradients(self) -> str:
        """Return the role of the group that reduces gradients."""
        return "dp-cp" if self.job.cp > 1 else "dp"

    def of_stage(self, role: str, stage: int) -> Int64:
        """Return the groups of a role inside a stage as positions in it, shape (groups, members)."""
        table = self.members[role]
        per_stage = len(table) // self.job.pp
        return np.asarray(table[stage * per_stage : (stage + 1) * per_stage] - stage * self.ranks_per_stage)

    def size(self, role: str) -> int:
        return int(self.members[role].shape[1]) if role in self.members else 1

    def groups_of(self, rank: int) -> dict[int, Group]:
        return {one.id: one for role in self.groups for one in self.groups[role] if rank in one.ranks}

    def group_ids(self, role: str) -> Int64:
        """Return the id of every rank's group of this role; −1 without one."""
        ids = np.full(self.job.world_size, -1, np.int64)
        for one in self.groups[role]:
            ids[list(one.ranks)] = one.id
        return ids

    def coordinates(self, rank: int) -> dict[str, int]:
        job = self.job
        rest, tp = divmod(rank, job.tp)
        rest, cp = divmod(rest, job.cp)
        pp, dp = divmod(rest, job.dp)
        return {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": (dp * job.cp + cp) % job.ep}

    def parallel(self) -> dict[str, int]:
        job = self.job
        return {"tp": job.tp, "pp": job.pp, "dp": job.dp, "cp": job.cp, "ep": job.ep, "vpp": job.chunks}

    def host(self, rank: int) -> int:
        return rank // self.job.gpus_per_host

    def on_one_host(self, members: Int64) -> bool:
        """Return whether groups (of global ranks, of one role) lie inside a host."""
        # All groups of a role lie alike.
        hosts = members[0] // self.job.gpus_per_host
        return bool((hosts == hosts[0]).all())


def _members(job: Job) -> dict[str, Int64]:
    grid = np.arange(job.world_size).reshape(job.pp, job.dp, job.cp, job.tp)
    tables = {
        "world": grid.reshape(1, -1),
        "tp": grid.reshape(-1, job.tp),
        "cp": grid.transpose(0, 1, 3, 2).reshape(-1, job.cp),
        "dp": grid.transpose(0, 2, 3, 1).reshape(-1, job.dp),
        "dp-cp": grid.transpose(0, 3, 1, 2).reshape(-1, job.dp * job.cp),
        "ep": grid.reshape(job.pp, -1, job.ep, job.tp).transpose(0, 1, 3, 2).reshape(-1, job.ep),
        "pp": grid.transpose(1, 2, 3, 0).reshape(-1, job.pp),
        "mp": grid.transpose(1, 2, 0, 3).reshape(-1, job.pp * job.tp),
    }
    if job.pp > 1:
        tables["embedding"] = grid[[0, -1]].transpose(1, 2, 3, 0).reshape(-1, 2)
    # Megatron makes all of them; those of one rank never communicate. dp-cp is dp where there is no cp.
    wanted = {"world", "dp", "pp", "tp", "mp", "embedding"} | ({"cp", "dp-cp"} if job.cp > 1 else set())
    wanted |= {"ep"} if job.ep > 1 else set()
    return {role: table.astype(np.int64) for role, table in tables.items() if role in wanted}


def _group(role: str, ranks: tuple[int, ...], ordinals: dict[tuple[int, ...], int]) -> Group:
    ordinal = ordinals.get(ranks, 0)
    ordinals[ranks] = ordinal + 1
    return Group(group_id(ranks, ordinal), ranks, ordinal, role, backend="nccl")
