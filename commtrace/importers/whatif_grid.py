"""The process groups and pipeline neighbours of a job in a trace of the what-if study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commtrace.importers.whatif_types import OperationType
from commtrace.trace.groups import Group, group_id


class Worker(NamedTuple):
    """A place in the grid of the job."""

    rank: int
    stage: int
    dp_rank: int


class Grid:
    """The process groups of the job: one for every type of communication, because each is numbered by itself."""

    def __init__(self, workers: Sequence[Worker], types: Iterable[OperationType]) -> None:
        self._names = sorted({one.group for one in types if one.group})
        self._rank = {(worker.stage, worker.dp_rank): worker.rank for worker in workers}
        self._stages = sorted({worker.stage for worker in workers})
        self._dp_ranks = sorted({worker.dp_rank for worker in workers})
        self._groups: dict[tuple[str, int], Group] = {}

    def sizes(self) -> dict[str, int]:
        return {"pp_size": len(self._stages), "dp_size": len(self._dp_ranks)}

    def neighbour(self, worker: Worker, distance: int) -> int:
        """Return the rank so many stages on; after the last stage comes the first, with its next chunk."""
        position = (self._stages.index(worker.stage) + distance) % len(self._stages)
        return self._rank[self._stages[position], worker.dp_rank]

    def group(self, name: str, worker: Worker) -> Group:
        """Return the group that operations of this name run on."""
        role = _role(name)
        # One for each pipeline, for each stage, or for each worker.
        key = name, {"pp": worker.dp_rank, "embedding": worker.dp_rank, "dp": worker.stage}.get(role, worker.rank)
        if key not in self._groups:
            members = self._members(role, worker)
            ordinal = self._names.index(name)
            self._groups[key] = Group(group_id(members, ordinal), members, ordinal, role, name)
        return self._groups[key]

    def groups_of(self, worker: Worker) -> list[Group]:
        groups = [self.group(name, worker) for name in self._names]
        return [group for group in groups if worker.rank in group.ranks]

    def _members(self, role: str, worker: Worker) -> tuple[int, ...]:
        if role == "pp":
            return self._ranks((stage, worker.dp_rank) for stage in self._stages)
        if role == "embedding":
            return self._ranks((stage, worker.dp_rank) for stage in (self._stages[0], self._stages[-1]))
        if role == "tp":
            return (worker.rank,)  # the trace holds one rank of each tensor-parallel group
        return self._ranks((worker.stage, dp_rank) for dp_rank in self._dp_ranks)

    def _ranks(self, places: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(sorted({self._rank[place] for place in places}))


def _role(name: str) -> str:
    if name in ("forward", "backward"):
        return "pp"
    if name.startswith("embedding"):
        return "embedding"
    return "tp" if name.startswith("layernorm") else "dp"
