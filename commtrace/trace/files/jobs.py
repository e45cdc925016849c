"""Find the worlds of a job: runs beside a run that were recorded together with it, each in a directory of its own.

Worlds are of one job if they share its name and were recorded at the same time or by one `commtrace run`, or if a
process group joins them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from commtrace.trace.files.claims import holder_of
from commtrace.trace.files.locate import rank_directories, runs_below
from commtrace.trace.files.reader import newest_recording
from commtrace.trace.inputs import printable
from commtrace.trace.metadata import Group, RankMetadata

_MOST_READ: Final = 64
"""Of the runs beside a run, so many are looked into whatever they are called."""

_MARGIN_NS: Final = 30_000_000_000
"""Worlds of a job begin within seconds of each other, but one may be short."""


@dataclass(frozen=True, slots=True)
class World:
    """A world with files, described by those of its lowest rank."""

    path: Path
    metadata: RankMetadata
    num_ranks: int  # with folders
    ended_ns: int  # last write, epoch ns
    launch: str  # equal for the worlds that one `commtrace run` recorded; empty if unknown
    groups: Mapping[int, Group] = field(default_factory=dict)  # of that rank

    @property
    def joined(self) -> frozenset[str]:
        """Return the keys of the worlds that its groups join, as far as they are known."""
        members = (member for group in self.groups.values() for member in group.members)
        return frozenset(member.world for member in members if member is not None and member.world)


def read_world(directory: Path) -> World | None:
    """Return the world in a run directory; None if it cannot be read, or an older version has recorded it."""
    try:
        folders = rank_directories(directory)
        # Any rank may be in a group with other worlds: often it is the first one.
        traces = [trace for folder in folders[:1] if (trace := newest_recording(folder)) is not None]
        if not traces or not traces[0].metadata.world:
            return None
        ended = max(path.stat().st_mtime_ns for path in folders[0].iterdir())
        holder = holder_of(directory)
    except OSError:  # a folder of somebody else, or deleted meanwhile
        return None
    return World(
        path=directory,
        metadata=traces[0].metadata,
        num_ranks=len(folders),
        ended_ns=ended,
        launch="" if holder is None else holder.launch,
        groups=traces[0].groups,
    )


def are_of_one_job(first: World, second: World) -> bool:
    """Return whether two worlds were recorded as parts of one job."""
    if first.metadata.world == second.metadata.world:
        return False
    if first.metadata.world in second.joined or second.metadata.world in first.joined:
        return True
    if first.metadata.job != second.metadata.job:
        return False
    if first.launch and first.launch == second.launch:
        return True
    began = max(world.metadata.anchor.realtime_ns for world in (first, second))
    return began <= min(first.ended_ns, second.ended_ns) + _MARGIN_NS


def other_worlds(directory: Path, groups: Iterable[Group] = ()) -> list[World]:
    """Return the other worlds of the job of a run; ``groups`` are further groups of its ranks."""
    run_world = read_world(directory)
    if run_world is None:
        return []
    further = {group.id: group for group in groups if group.is_over_worlds}
    run_world = replace(run_world, groups={**run_world.groups, **further})
    worlds = [world for path in _candidates(run_world) if (world := read_world(path)) is not None]
    return sorted((world for world in worlds if are_of_one_job(run_world, world)), key=lambda world: str(world.path))


def worlds_in(directory: Path) -> list[World]:
    """Return the worlds of a job whose runs are all that a directory holds; none if it holds something else."""
    if not directory.is_dir() or rank_directories(directory):
        return []
    runs = runs_below(directory)
    if not 2 <= len(runs) <= _MOST_READ:
        return []
    worlds = [world for run in sorted(runs) if (world := read_world(run)) is not None]
    if len(worlds) < len(runs):
        return []
    joined, waiting = [worlds[0]], worlds[1:]
    while more := [world for world in waiting if any(are_of_one_job(world, member) for member in joined)]:
        joined += more
        waiting = [world for world in waiting if world not in more]
    return [] if waiting else worlds


def nested_worlds(directory: Path) -> list[Path]:
    """Return the run directories in a run directory: of worlds that found it taken, where its name is fixed."""
    return [run for run in runs_below(directory) if re.match(r"world-\d", run.name)]


def world_words(world: World) -> str:
    """Return ``runs/a-world-2 (2 ranks on node1)``."""
    ranks = f"{world.num_ranks} rank{'s' * (world.num_ranks != 1)}"
    return printable(f"{world.path} ({ranks}, the first on {world.metadata.node})")


def _candidates(world: World) -> list[Path]:
    """Return the directories in which other worlds of the job may be."""
    directory = world.path.absolute()
    paths = [*nested_worlds(directory)]
    around = directory.parent
    if rank_directories(around):  # it is one of a run that has the fixed name
        paths += [around, *nested_worlds(around)]
    else:
        beside = [run for run in runs_below(around) if run != directory]
        paths += beside if len(beside) <= _MOST_READ else [run for run in beside if run.name in _names(world, beside)]
    paths += _of_deeper_names(world, directory)
    return [path for path in dict.fromkeys(paths) if path != directory]


def _names(world: World, runs: Iterable[Path]) -> set[str]:
    members = (member for group in world.groups.values() for member in group.members if member is not None)
    of_job = re.compile(rf"{re.escape(world.metadata.job)}(-world-\d+)?(-[0-9a-f]{{16}})?")
    return {member.run_id for member in members} | {run.name for run in runs if of_job.fullmatch(run.name)}


def _of_deeper_names(world: World, directory: Path) -> list[Path]:
    """Return directories like this one that are named after other runs above their last folder."""
    for folder in directory.parents:
        if folder.name == world.metadata.run_id:
            below = directory.relative_to(folder)
            siblings = [child for child in folder.parent.iterdir() if child.is_dir() and child != folder]
            names = _names(world, siblings)
            return [child / below for child in siblings if child.name in names and (child / below).is_dir()]
    return []
