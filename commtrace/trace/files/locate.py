"""Find the run directory that a path means, and in it the segments of the newest launch, each rank once."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

from commtrace.errors import RunNotFoundError
from commtrace.trace.files.rank_files import (
    LATEST,
    RANK_DIRECTORY_PATTERN,
    rank_directory,
    segment_number,
    segment_paths,
)
from commtrace.trace.inputs import printable
from commtrace.trace.metadata import IMPORTED_FROM, RankMetadata
from commtrace.trace.run import RankTrace

RUNS: Final = Path("commtrace-runs")

NEWEST_RUN: Final = RUNS / LATEST
"""The run that commands read by default."""

_MOST_RUNS: Final = 12
_MOST_INSTEAD: Final = 5

OF_OTHER_RUNS: Final = "of other runs or attempts in the same directory"
"""Words of a problem that is no fault: a directory may hold more than what is shown."""


_MARGIN_NS: Final = 30_000_000_000
"""Ranks of a job begin within seconds of each other, but one may have to wait for its disk."""
_MARGIN_OF_CLOCKS_NS: Final = 3_600_000_000_000
_MOST_NAMES: Final = 4

_OVERLAP_NS: Final = 1_000_000_000
"""Two processes that recorded as the same rank at once for this long belong to two jobs."""


_MOST_ALIKE: Final = 10


def find_run_directory(path: Path) -> Path:
    """Return ``path`` if it has folders of ranks, else the only run directory below it; for ``…/latest`` the newest.

    Raises:
        RunNotFoundError: there is no run, or more than one; the message says what to pass.
    """
    if path.is_file():
        raise RunNotFoundError(f"{path} is a file; pass the run directory{_around(path)}.")
    if path.name == LATEST and (path.is_symlink() or not path.is_dir()):
        return _latest(path)  # The link is for shells: it is of the run that began last, on the host that wrote it.
    if not path.is_dir() and not path.is_absolute() and (RUNS / path).is_dir():
        path = RUNS / path  # a name as `commtrace list` prints it
    if not path.is_dir():
        raise RunNotFoundError(f"{path}: no such directory. {_instead(path)}")
    if rank_directories(path):
        return path
    if RANK_DIRECTORY_PATTERN.match(path.absolute().name):
        raise RunNotFoundError(f"{path} is the folder of one rank; pass the run directory{_around(path)}.")
    below = runs_below(path)
    if len(below) == 1:
        return below[0]
    if below:
        raise RunNotFoundError(
            f"{path} holds {len(below)} runs, the one that was written last at the end:\n{_listing(below)}\n"
            f"Pass one of them, or {path / LATEST} for the last one."
        )
    some = any(path.iterdir())
    none = "holds no recorded run (no rank-NNNNN folders)" if some else "is empty: it holds no recorded run"
    raise RunNotFoundError(
        f"{path} {none}. Was the job started with `import commtrace.auto` or `commtrace run`, and did it call "
        "torch.distributed.init_process_group?"
    )


def runs_below(path: Path) -> list[Path]:
    """Return the run directories directly below ``path``, the last written one at the end."""
    runs = [
        child
        for child in path.iterdir()
        if child.is_dir() and not (child.name == LATEST and child.is_symlink()) and _holds_ranks(child)
    ]
    return sorted(runs, key=lambda run: (_written_at(run), run.name))


def rank_directories(directory: Path) -> list[Path]:
    """Return the folders of the ranks by name, without dangling links."""
    with os.scandir(directory) as entries:  # which knows of most what is a folder, without a look at each
        names = [entry.name for entry in entries if RANK_DIRECTORY_PATTERN.match(entry.name) and entry.is_dir()]
    return [directory / name for name in sorted(names)]


def _holds_ranks(directory: Path) -> bool:
    try:
        return bool(rank_directories(directory))
    except OSError:  # a folder of somebody else, such as lost+found
        return False


def _latest(path: Path) -> Path:
    below = runs_below(path.parent) if path.parent.is_dir() else []
    if not below:
        raise RunNotFoundError(f"{path}: no such directory. {_instead(path)}")
    return below[-1]


def _instead(wanted: Path) -> str:
    here = runs_below(RUNS) if RUNS.is_dir() else []
    named = {**_alike(wanted), **{run.name: run for run in here}}
    alike = get_close_matches(wanted.name, named, n=1)
    if alike:
        return f"Did you mean {named[alike[0]]}?"
    if not here:
        return (
            f"There is no run below ./{RUNS} either. Pass the directory that COMMTRACE_DIR gave, or that "
            "`commtrace run` named at its end."
        )
    return f"Runs below ./{RUNS}, the one that was written last at the end:\n{_listing(here, _MOST_INSTEAD)}"


def _alike(wanted: Path) -> dict[str, Path]:
    """Return the runs with about this name where it should be."""
    try:
        names = get_close_matches(wanted.name, os.listdir(wanted.parent), n=_MOST_ALIKE)
    except OSError:
        return {}
    paths = [wanted.parent / name for name in names]
    return {path.name: path for path in paths if path.is_dir() and _holds_ranks(path)}


def _around(path: Path) -> str:
    for folder in (path.absolute(), path.absolute().parent):
        if RANK_DIRECTORY_PATTERN.match(folder.name):
            return f" around it, {folder.parent}"
    return ""


def _written_at(run: Path) -> float:
    times = [run.stat().st_mtime]
    for path in rank_directories(run)[0].iterdir():
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)


def _listing(runs: Sequence[Path], most: int = _MOST_RUNS) -> str:
    left_out = [f"  ({len(runs) - most} older ones)"] if len(runs) > most else []
    lines = [
        f"  {printable(str(run))}  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(_written_at(run)))}, "
        f"{len(rank_directories(run))} rank{'s' * (len(rank_directories(run)) != 1)}"
        for run in runs[-most:]
    ]
    return "\n".join([*left_out, *lines])


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of a rank, its size in bytes, and its header."""

    path: Path
    metadata: RankMetadata
    first_step: int
    size: int
    number: int | None = None  # in its name when written; None in files of older versions
    first_number: int | None = None  # of the first segment of the recording; None in files of older versions
    room: int = 0  # its share of what the files of the run may take beyond the usual when unpacked, bytes


Described = Callable[[list[Segment]], "RankTrace | None"]
"""Reads a rank's process groups and its last instant from segments."""


def newest_session(segments: list[Segment], problems: list[str], described: Described) -> dict[int, list[Segment]]:
    """Return the segments of the newest run and attempt by rank, also those that its job recorded under other names."""
    if not segments:
        return {}
    launches = sorted(_launches(segments), key=lambda launch: launch.session, reverse=True)
    newest = launches[0]
    read = sum(map(len, newest.ranks.values()))  # the functions below report what they leave out
    _report_folders_of_another_write(newest.ranks, problems)
    _leave_out_copies(newest.ranks, problems)
    _leave_out_copied_segments(newest.ranks, problems)
    _leave_out_an_earlier_job(newest.ranks, problems)
    joined = _joined(launches, described)
    chosen = {rank: segments_of_rank for launch in joined for rank, segments_of_rank in launch.ranks.items()}
    if len(joined) > 1:
        problems.append(
            "One job was recorded under several names, and is shown as one: "
            + "; ".join(f"{launch.name} holds {_format_ranks(launch.ranks)}" for launch in joined)
            + ". Give all nodes the same COMMTRACE_RUN_ID."
        )
    num_left_out = (
        len(segments)
        - read
        - sum(len(segments_of_rank) for launch in joined[1:] for segments_of_rank in launch.ranks.values())
    )
    if num_left_out:
        named = [launch.name for launch in launches if launch not in joined and launch.name != newest.name]
        which = f" ({_abbreviated(named, _MOST_NAMES)})" if named else ""
        counted, were = ("1 segment", "was") if num_left_out == 1 else (f"{num_left_out} segments", "were")
        problems.append(f"{counted} {OF_OTHER_RUNS} {were} left out{which}; shown is {newest.name}.")
    return dict(sorted(chosen.items()))


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """The recording of one name, attempt, world size and world, with the newest session of each rank."""

    run_id: str
    attempt: int
    world_size: int
    world: str  # empty if unknown
    ranks: dict[int, list[Segment]]

    @property
    def name(self) -> str:
        return f"run {self.run_id}, attempt {self.attempt + 1}"

    @property
    def session(self) -> int:
        """Return the start of its last rank, epoch ns."""
        return max(segments[-1].metadata.session for segments in self.ranks.values())


def newest_launch(segments: list[Segment]) -> RecordedLaunch | None:
    return max(_launches(segments), key=lambda launch: launch.session, default=None)


def attempts_of_newest_run(segments: list[Segment]) -> list[int]:
    """Return the numbers of the attempts of the run that was recorded last."""
    newest = newest_launch(segments)
    return sorted(
        {segment.metadata.attempt for segment in segments if newest and segment.metadata.run_id == newest.run_id}
    )


def until_attempt(segments: list[Segment], attempt: int) -> list[Segment]:
    """Return the segments that were there when an attempt of the run that was recorded last had ended."""
    newest = newest_launch(segments)
    run_id = None if newest is None else newest.run_id
    later = {
        segment.path for segment in segments if segment.metadata.run_id == run_id and segment.metadata.attempt > attempt
    }
    began = min((segment.metadata.session for segment in segments if segment.path in later), default=None)
    return [
        segment
        for segment in segments
        if segment.path not in later
        and (began is None or segment.metadata.run_id == run_id or segment.metadata.session < began)
    ]


def why_not_one_job(first: RecordedLaunch, second: RecordedLaunch, described: Described) -> str:
    """Return why the recordings of two names are not one job; empty if they are.

    One job has one world size, each rank once, and overlapping recordings. Process groups with members in both must
    agree: only one side may have groups that the other lacks.
    """
    if first.world and second.world and first.world != second.world:
        return "they are two worlds, whose ranks were joined by two calls of init_process_group"
    if first.world_size != second.world_size:
        return f"one is of {first.world_size} ranks and the other of {second.world_size}"
    both = first.ranks.keys() & second.ranks.keys()
    if both:
        return f"both hold {_format_ranks(both)}"
    traces = [
        [
            trace
            for segments in launch.ranks.values()
            if (trace := described([segments[0], *segments[1:][-1:]])) is not None
        ]
        for launch in (first, second)
    ]
    (first_began, first_ended), (second_began, second_ended) = map(_recorded_between, traces)
    if first_ended + _MARGIN_NS < second_began or second_ended + _MARGIN_NS < first_began:
        return "one had ended before the other began"
    groups_of_first, groups_of_second = (
        _groups_with_members_in_both(traces_of_launch, first.ranks, second.ranks) for traces_of_launch in traces
    )
    if groups_of_first - groups_of_second and groups_of_second - groups_of_first:
        return "their process groups have other members"
    return ""


def _launches(segments: list[Segment]) -> list[RecordedLaunch]:
    worlds: dict[tuple[str, int, int], set[str]] = {}
    for segment in segments:
        worlds.setdefault(_launch(segment.metadata), set()).add(segment.metadata.world)
    by_name: dict[tuple[tuple[str, int, int], str], RecordedLaunch] = {}
    for segment in segments:
        key, world = _launch(segment.metadata), segment.metadata.world
        known = worlds[key] - {""}
        if not world and len(known) == 1:  # a rank that has not got as far as to learn it
            (world,) = known
        launch = by_name.setdefault((key, world), RecordedLaunch(*key, world, {}))
        launch.ranks.setdefault(segment.metadata.rank, []).append(segment)
    launches = list(by_name.values())
    for launch in launches:
        for rank, segments_of_rank in launch.ranks.items():
            session = max(segment.metadata.session for segment in segments_of_rank)
            launch.ranks[rank] = [segment for segment in segments_of_rank if segment.metadata.session == session]
    return launches


def _joined(launches: Sequence[RecordedLaunch], described: Described) -> list[RecordedLaunch]:
    joined = [launches[0]]
    for launch in launches[1:]:
        held = {rank for earlier in joined for rank in earlier.ranks}
        is_whole = len(held) >= launches[0].world_size
        if not is_whole and held.isdisjoint(launch.ranks) and not why_not_one_job(launches[0], launch, described):
            joined.append(launch)
    return joined


def _recorded_between(traces: Iterable[RankTrace]) -> tuple[int, int]:
    """Return the first and last recorded instant, epoch ns."""
    began, ended = [], []
    for trace in traces:
        anchor = trace.metadata.anchor
        last = anchor.monotonic_ns if trace.last_written_ns is None else trace.last_written_ns
        began.append(anchor.realtime_ns)
        ended.append(anchor.realtime_ns + last - anchor.monotonic_ns)
    return min(began, default=0), max(ended, default=0)


def _groups_with_members_in_both(
    traces: Iterable[RankTrace], first: Collection[int], second: Collection[int]
) -> set[tuple[int, tuple[int, ...]]]:
    return {
        (group.ordinal, group.ranks)
        for trace in traces
        for group in trace.groups.values()
        if not (set(first).isdisjoint(group.ranks) or set(second).isdisjoint(group.ranks))
    }


def _report_folders_of_another_write(chosen: Mapping[int, list[Segment]], problems: list[str]) -> None:
    # Ranks that were imported or made up are written by one call, which gives them one session; processes that record
    # have one each.
    ranks_of = Counter(segments[-1].metadata.session for segments in chosen.values())
    session, count = ranks_of.most_common(1)[0]
    if count > 1 and len(ranks_of) > 1:
        ranks = [rank for rank, segments in chosen.items() if segments[-1].metadata.session != session]
        problems.append(
            f"{_format_ranks(ranks)}: not written together with the others, though under the same name. Is what is "
            "shown of two runs? Copy the folders of one run again."
        )


def _leave_out_copies(chosen: dict[int, list[Segment]], problems: list[str]) -> None:
    """Leave out copies of another rank's folder: every row would count twice."""
    for rank, segments in chosen.items():
        folders = sorted({segment.path.parent for segment in segments})
        if len(folders) < 2:
            continue
        read = next(
            (folder for folder in folders if folder.name == rank_directory(folder.parent, rank).name), folders[0]
        )
        chosen[rank] = [segment for segment in segments if segment.path.parent == read]
        own_folders = {rank_directory(read.parent, rank_of_folder).name for rank_of_folder in chosen}
        moved = [
            segment.path
            for segment in segments
            if segment.path.parent != read and segment.path.parent.name in own_folders
        ]
        copies = [folder.name for folder in folders if folder != read and folder.name not in own_folders]
        if copies:
            problems.append(
                f"{', '.join(copies)}: left out, holds rank {rank} as {read.name} does. Was a folder copied or renamed?"
            )
        if moved:
            listed = _abbreviated(f"{path.parent.name}/{path.name}" for path in moved)
            problems.append(f"{listed}: left out, of rank {rank} by the header. Was a file moved or copied there?")


def _leave_out_copied_segments(chosen: dict[int, list[Segment]], problems: list[str]) -> None:
    """Leave out copies of segments: every row would count twice."""
    for rank, segments in chosen.items():
        by_number: dict[int, Segment] = {}
        for segment in segments:
            number = segment_number(segment.path) if segment.number is None else segment.number
            there = by_number.setdefault(number, segment)
            if there is segment:
                continue
            kept, left_out = there, segment
            if segment_number(segment.path) == number:
                kept, left_out = segment, there
            by_number[number] = kept
            problems.append(f"{left_out.path}: left out, it is a copy of {kept.path.name}.")
        chosen[rank] = [by_number[number] for number in sorted(by_number)]


def missing_segments(segments: Sequence[Segment], trace: RankTrace) -> list[str]:
    """Describe the segments that are missing between others of a rank, or before them."""
    numbered = [(segment.number, segment) for segment in segments if segment.number is not None]
    if not numbered:
        return []
    folder = segments[0].path.parent
    there: set[int] = set()
    if any(after - before > 1 for (before, _), (after, _) in pairwise(numbered)):
        # Segments of other recordings in the folder, and those without a readable header, have their own numbers.
        there = {segment_number(path) for path in segment_paths(folder) if path.exists()}  # a link may point nowhere
    sentences = []
    for (before, earlier), (after, later) in pairwise(numbered):
        absent = after - before - 1 - sum(before < number < after for number in there)
        if absent:
            sentences.append(
                f"rank {trace.rank}: {_files(absent)} missing in {folder} between {earlier.path.name} and "
                f"{later.path.name}, from about step {earlier.first_step} to {later.first_step}: its numbers are lower "
                "bounds there. Copy the folder again."
            )
    first, discarded = numbered[0][1].first_number, trace.discarded.segments if trace.discarded else 0
    # A budget deletes the first segments. How many is only certain when the recording has ended, and a rank that loses
    # spans may have deleted files without recording it.
    keeps_all = not (trace.recording.get("keep_steps") or trace.recording.get("keep_bytes"))
    absent_first = 0 if first is None else numbered[0][0] - first - discarded
    if absent_first > 0 and (keeps_all or (trace.closed and not trace.dropped)):
        sentences.append(
            f"rank {trace.rank}: {_files(absent_first)} missing in {folder} before {numbered[0][1].path.name}, which "
            f"begins with step {numbered[0][1].first_step}. Copy the folder again."
        )
    return sentences


def _files(count: int) -> str:
    return f"{count} file{'s are' if count > 1 else ' is'}"


def _leave_out_an_earlier_job(chosen: dict[int, list[Segment]], problems: list[str]) -> None:
    # Their communications would be matched with those of the second job. They are recognised by their last write,
    # before the others began. On another host, or before its restart, clocks may differ.
    newest = max((segments[-1].metadata for segments in chosen.values()), key=lambda metadata: metadata.session)
    left_out = []
    for rank, segments in chosen.items():
        margin_ns = _MARGIN_NS if segments[-1].metadata.boot_id == newest.boot_id else _MARGIN_OF_CLOCKS_NS
        if segments[-1].metadata.session >= newest.session - margin_ns:
            continue
        try:
            written_ns = max(segment.path.stat().st_mtime_ns for segment in segments)
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
    segments: list[Segment], chosen: Mapping[int, list[Segment]], recorded_until: Callable[[Path], int]
) -> list[str]:
    """Describe jobs that ran at the same time under one name."""
    # Certain only if two processes of one host recorded as the same rank, one still running when the other began. A
    # restarted job, or two recordings in one process, have no such files.
    last_of_session: dict[tuple[int, int], Segment] = {}  # by rank and session of the other process
    for segment in segments:
        metadata = segment.metadata
        if metadata.rank in chosen and _is_another_process(metadata, chosen[metadata.rank][0].metadata):
            last_of_session[metadata.rank, metadata.session] = segment
    ranks = sorted(
        {
            rank
            for (rank, _), segment in last_of_session.items()
            if recorded_until(segment.path) > chosen[rank][0].metadata.anchor.monotonic_ns + _OVERLAP_NS
        }
    )
    if not ranks:
        return []
    listed = f"{'rank' if len(ranks) == 1 else 'ranks'} {_abbreviated(ranks)}"
    name = chosen[ranks[0]][0].metadata.run_id
    return [
        f"{listed}: another process recorded the same at the same time: two jobs ran under the name {name}, and what "
        "is shown may be of both. Give each a COMMTRACE_RUN_ID or COMMTRACE_DIR of its own."
    ]


def _is_another_process(first: RankMetadata, second: RankMetadata) -> bool:
    return (
        first.session != second.session
        and first.pid != second.pid
        and _launch(first) == _launch(second)
        and (first.host, first.boot_id) == (second.host, second.boot_id)
    )


def _launch(metadata: RankMetadata) -> tuple[str, int, int]:
    return metadata.run_id, metadata.attempt, metadata.world_size


def missing_ranks(ranks: Mapping[int, RankTrace], directory: Path) -> list[str]:
    """Describe the ranks without readable files. A damaged file may claim a million of them."""
    world_size = max(trace.metadata.world_size for trace in ranks.values())
    folders = _ranks_with_folders(directory) if len(ranks) < world_size else set()
    unreadable = sorted(rank for rank in folders - ranks.keys() if rank < world_size)
    known = folders | ranks.keys()
    num_absent = world_size - sum(rank < world_size for rank in known)
    source = next(iter(ranks.values())).metadata.versions.get(IMPORTED_FROM)
    hint = (
        f"Import again with their {source} files as well, if there are any."
        if source
        else "Bring their rank-NNNNN folders together with `commtrace merge`, or use a shared file system."
    )
    sentences = []
    if num_absent:
        absent = _abbreviated(rank for rank in range(world_size) if rank not in known)
        sentences.append(f"{num_absent} of {world_size} ranks have no readable files: {absent}. {hint}")
    if unreadable:
        sentences.append(
            f"{len(unreadable)} of {world_size} ranks have folders in which nothing of this run can be read: "
            f"{_abbreviated(unreadable)}."
        )
    return sentences


def _ranks_with_folders(directory: Path) -> set[int]:
    try:
        matches = [RANK_DIRECTORY_PATTERN.match(path.name) for path in rank_directories(directory)]
    except OSError:  # deleted while it was read
        return set()
    return {int(match[1]) for match in matches if match}


def _format_ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    if len(listed) > 2 and listed == list(range(listed[0], listed[-1] + 1)):
        return f"ranks {listed[0]}–{listed[-1]}"
    return f"rank{'s' * (len(listed) > 1)} {_abbreviated(listed)}"


def _abbreviated(words: Iterable[object], most: int = 16) -> str:
    listed = [*islice(words, most + 1)]
    return ", ".join(map(str, listed[:most])) + (" …" if len(listed) > most else "")
