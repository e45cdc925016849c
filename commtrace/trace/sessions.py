"""Which of the segments in a directory are the run that is asked for: the newest launch, once for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace.trace.metadata import RankMetadata
from commtrace.trace.run import RankTrace
from commtrace.trace.writer import rank_directory


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of a rank, how many bytes it has, and what its header says."""

    path: Path
    metadata: RankMetadata
    first_step: int
    size: int


_MARGIN_NS: Final = 30_000_000_000
"""The ranks of a job begin within seconds of each other; one of them may have to wait for its disk."""
_MARGIN_OF_CLOCKS_NS: Final = 3_600_000_000_000

_OVERLAP_NS: Final = 1_000_000_000
"""So long two processes must have recorded as one rank before they are taken for two jobs."""


def newest_session(segments: list[Segment], problems: list[str]) -> dict[int, list[Segment]]:
    """Of what may be several runs in one directory, the segments of the newest run and attempt, by rank."""
    if not segments:
        return {}
    newest = max(segments, key=lambda segment: segment.metadata.session).metadata
    chosen: dict[int, list[Segment]] = {}
    for segment in segments:
        metadata = segment.metadata
        if _launch(metadata) == _launch(newest):
            chosen.setdefault(metadata.rank, []).append(segment)
    for rank, own in chosen.items():
        session = max(segment.metadata.session for segment in own)
        chosen[rank] = [segment for segment in own if segment.metadata.session == session]
    _leave_out_copies(chosen, problems)
    _leave_out_an_earlier_job(chosen, problems)
    others = len(segments) - sum(map(len, chosen.values()))
    if others:
        problems.append(
            f"{others} segments of earlier runs or attempts in the same directory were left out; "
            f"shown is run {newest.run_id}, attempt {newest.attempt}."
        )
    return chosen


def _leave_out_copies(chosen: dict[int, list[Segment]], problems: list[str]) -> None:
    """A rank's folder that somebody copied to another name beside it: every row would count twice."""
    for rank, own in chosen.items():
        folders = sorted({segment.path.parent for segment in own})
        if len(folders) < 2:
            continue
        read = next(
            (folder for folder in folders if folder.name == rank_directory(folder.parent, rank).name), folders[0]
        )
        chosen[rank] = [segment for segment in own if segment.path.parent == read]
        copies = ", ".join(folder.name for folder in folders if folder != read)
        problems.append(f"{copies}: left out, holds rank {rank} as {read.name} does. Was a folder copied or renamed?")


def _leave_out_an_earlier_job(chosen: dict[int, list[Segment]], problems: list[str]) -> None:
    """A second job under the name of the first one, of as many ranks, some of which have written nothing (yet): what
    lies in their folders is of the first job, and its communications would be matched with those of the second one.

    Told by the time of their last write, which was before the others began. On another host, or before a restart of
    it, clocks may differ.
    """
    newest = max((own[-1].metadata for own in chosen.values()), key=lambda metadata: metadata.session)
    left_out = []
    for rank, own in chosen.items():
        margin_ns = _MARGIN_NS if own[-1].metadata.boot_id == newest.boot_id else _MARGIN_OF_CLOCKS_NS
        if own[-1].metadata.session >= newest.session - margin_ns:
            continue
        try:
            written_ns = max(segment.path.stat().st_mtime_ns for segment in own)
        except FileNotFoundError:  # a running job deletes to keep to its budget
            continue
        if written_ns < newest.session - margin_ns:
            left_out.append(rank)
    for rank in left_out:
        del chosen[rank]
    if left_out:
        ranks = "rank" if len(left_out) == 1 else "ranks"
        problems.append(
            f"{ranks} {', '.join(map(str, sorted(left_out)))} left out: recorded by an earlier job of the same name, "
            f"{newest.run_id}, which had ended before this one began."
        )


def two_at_once(
    found: list[Segment], chosen: Mapping[int, list[Segment]], recorded_until: Callable[[Path], int]
) -> list[str]:
    """Jobs that ran at the same time under one name: which ranks are of which cannot be told any more.

    Surely two jobs only where two processes of one host recorded as the same rank, one of them still when the other had
    begun. Whoever restarts a job, or records twice in one process, has no such files.
    """
    ranks = []
    for rank, own in sorted(chosen.items()):
        shown = own[0].metadata
        others = {
            segment.metadata.session: segment  # the last one of each session
            for segment in found
            if segment.metadata.session != shown.session
            and segment.metadata.pid != shown.pid
            and (segment.metadata.rank, *_launch(segment.metadata)) == (rank, *_launch(shown))
            and (segment.metadata.host, segment.metadata.boot_id) == (shown.host, shown.boot_id)
        }
        if any(recorded_until(other.path) > shown.anchor.monotonic_ns + _OVERLAP_NS for other in others.values()):
            ranks.append(rank)
    if not ranks:
        return []
    listed = f"{'rank' if len(ranks) == 1 else 'ranks'} {_abbreviated(ranks)}"
    name = chosen[ranks[0]][0].metadata.run_id
    return [
        f"{listed}: another process recorded the same at the same time: two jobs ran under the name {name}, and what "
        "is shown may be of both. Give each a COMMTRACE_RUN_ID or COMMTRACE_DIR of its own."
    ]


def _launch(metadata: RankMetadata) -> tuple[str, int, int]:
    """What the ranks of one launch have in common, also when a run is repeated under its old name with fewer ranks."""
    return metadata.run_id, metadata.attempt, metadata.world_size


def missing_ranks(ranks: dict[int, RankTrace]) -> list[str]:
    """A sentence about the ranks of which nothing was found, if there are any."""
    world_size = max(trace.metadata.world_size for trace in ranks.values())
    missing = sorted(set(range(world_size)) - set(ranks))
    if not missing:
        return []
    source = next(iter(ranks.values())).metadata.versions.get("imported from")
    hint = (
        f"Import again with their {source} files as well, if there are any."
        if source
        else "Copy their rank-NNNNN folders from their nodes into the run directory, or use a shared file system."
    )
    return [f"{len(missing)} of {world_size} ranks have no readable files: {_abbreviated(missing)}. {hint}"]


def _abbreviated(ranks: Iterable[int], most: int = 16) -> str:
    listed = list(ranks)
    return ", ".join(map(str, listed[:most])) + (" …" if len(listed) > most else "")
