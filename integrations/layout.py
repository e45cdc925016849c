"""The place of this rank in the layout that the user tells, where no framework does (COMMTRACE_LAYOUT).

A pipeline, or tensor parallelism, that is written by hand is known to nobody else.

>>> place_in({"tp": 2, "pp": 4}, rank=5)
{'tp': 1, 'pp': 2}
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import prod
from typing import Final

from torch.distributed import ProcessGroup

from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.tracer import Tracer

_logger: Final = logging.getLogger("commtrace")


def place_in(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return the place of a rank in each dimension; the first dimension is that of neighbouring ranks."""
    coordinates = {}
    for name, size in sizes.items():
        rank, coordinates[name] = divmod(rank, size)
    return coordinates


def install(tracer: Tracer, sizes: Mapping[str, int]) -> Callable[[], None]:
    """Tell this rank's place, and name the groups along one dimension; return the function that undoes the rest."""
    layout = _Layout(tracer, sizes)
    tracer.groups.follow(layout.group_made)
    return layout.remove


class _Layout:
    def __init__(self, tracer: Tracer, sizes: Mapping[str, int]) -> None:
        self._tracer = tracer
        self._sizes = sizes
        self._is_told = False
        self._is_off = False

    def remove(self) -> None:
        self._tracer.groups.unfollow(self.group_made)

    def group_made(self, process_group: ProcessGroup, state: GroupState) -> None:
        """Tell the place with the first group, when the number of ranks is known; give a role to each."""
        try:
            if not self._is_off:
                self._group_made(process_group, state)
        except Exception as error:
            self._is_off = True
            self._tracer.failed("the layout of COMMTRACE_LAYOUT", error)

    def _group_made(self, process_group: ProcessGroup, state: GroupState) -> None:
        world = self._tracer.groups.place
        if world is None:
            return
        if not self._is_told:
            self._tell_place(world.rank, world.world_size)
        dimension = "" if self._is_off else self._dimension(state.group.ranks)
        if dimension:
            self._tracer.groups.name_dimension(process_group, dimension)

    def _tell_place(self, rank: int, world_size: int) -> None:
        num_ranks = prod(self._sizes.values())
        if num_ranks != world_size:
            self._is_off = True
            sizes = ",".join(f"{name}={size}" for name, size in self._sizes.items())
            _logger.warning(
                "commtrace: COMMTRACE_LAYOUT=%s is of %d ranks, but the job has %d: it is ignored",
                sizes,
                num_ranks,
                world_size,
            )
            return
        self._is_told = True
        _, known = self._tracer.topology()
        coordinates = place_in(self._sizes, rank)
        self._tracer.set_topology(
            {
                "coordinates": {**coordinates, **known.get("coordinates", {})},
                "parallel": {**self._sizes, **known.get("parallel", {})},
            }
        )

    def _dimension(self, ranks: tuple[int, ...]) -> str:
        """Return the only dimension in which these ranks differ; empty if there are several, or none."""
        places = [place_in(self._sizes, rank) for rank in ranks]
        dimensions = [name for name in self._sizes if len({coordinates[name] for coordinates in places}) > 1]
        return dimensions[0] if len(dimensions) == 1 else ""
