"""What a recording lacks and where its ranks differ: the resource ``health.json`` of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Final

from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.files.locate import rank_directories
from commtrace.trace.files.side_files import read_last_hang
from commtrace.trace.hang_report import InFlight, WrittenHang
from commtrace.trace.metadata import NODE_VARIABLES
from commtrace.trace.run import RankTrace, Run
from commtrace.viewer.data import Resources, encode_json

MOST_RANKS: Final = 1024
"""Ranks of which stacks are read."""


def health_resources(run: Run) -> Resources:
    """Return what of a run, as it was recorded, makes its numbers doubtful."""
    problems: list[str] = []
    hangs = list(_hangs(run, problems))
    health = {
        "differing": list(_differing(run)),
        "dropped": [
            {"rank": trace.rank, "kinds": dict(trace.dropped)} for trace in run.ranks.values() if trace.dropped
        ],
        "failed": [
            {"rank": trace.rank, "exception": what, "frames": list(frames)}
            for trace in run.ranks.values()
            for what, frames in _failures(trace)
        ],
        "hangs": hangs,
        "problems": problems,
    }
    return {"health.json": encode_json(health)}


def _failures(trace: RankTrace) -> Iterator[tuple[str, Sequence[str]]]:
    if trace.exception:
        yield trace.exception, trace.exception_frames
    if trace.exit is not None:
        while_handling = f" while it handled a {trace.exit.exception}" if trace.exit.exception else ""
        yield f"{trace.exit.call}{while_handling}", trace.exit.frames


_Facts = Callable[[RankTrace], Iterable[tuple[str, str]]]

_FACTS: Final[tuple[tuple[str, _Facts], ...]] = (
    ("version", lambda trace: trace.metadata.versions.items()),
    ("variable", lambda trace: trace.metadata.environment.items()),
    ("device", lambda trace: [("device", trace.metadata.device), ("backend", trace.metadata.backend)]),
)


def _differing(run: Run) -> Iterator[dict[str, object]]:
    """Yield the versions, variables and devices that are not the same on all ranks, with the ranks of each value."""
    for kind, facts in _FACTS:
        found: dict[str, dict[str, list[int]]] = {}
        for trace in run.ranks.values():
            for name, value in facts(trace):
                found.setdefault(name, {}).setdefault(value, []).append(trace.rank)
        for name, values in sorted(found.items()):
            missing = [rank for rank in run.ranks if not any(rank in ranks for ranks in values.values())]
            if name in NODE_VARIABLES or len(values) + bool(missing) < 2:
                continue
            parts = [{"value": value, "ranks": ranks} for value, ranks in values.items()]
            none = [{"value": None, "ranks": missing}] if missing else []
            yield {"kind": kind, "name": name, "values": [*parts, *none]}


def _hangs(run: Run, problems: list[str]) -> Iterator[dict[str, object]]:
    """Yield the last reports of ranks that made no progress; ranks with the same stacks are one."""
    directories = {folder.name: folder for folder in rank_directories(run.path)} if run.path.is_dir() else {}
    found: dict[object, list[tuple[int, WrittenHang]]] = {}
    for rank, trace in list(run.ranks.items())[:MOST_RANKS]:
        folder = directories.get(f"rank-{rank:05}")
        report = read_last_hang(folder, trace.metadata.session, problems) if folder else None
        if report:
            blocking = [(one.operation, one.group) for one in report.in_flight[:1]]
            found.setdefault((report.threads, tuple(blocking)), []).append((rank, report))
    for members in found.values():
        _, first = members[0]
        yield {
            "ranks": [rank for rank, _ in members],
            "utc": datetime.fromtimestamp(first.time, timezone.utc).isoformat(),
            "no_progress_ns": max(report.no_progress_ns for _, report in members),
            "in_flight": [_described(run, one) for one in first.in_flight],
            "threads": [{"thread": one.thread, "frames": list(one.frames)} for one in first.threads],
        }


def _described(run: Run, communication: InFlight) -> str:
    groups = (trace.groups.get(communication.group) for trace in run.ranks.values())
    group = next((one for one in groups if one), None)
    role = f" of {group.role}" if group else ""
    number = communication.peer
    peer = "" if number < 0 else f" with rank {number}" if number < OUTSIDE else " with a rank of another world"
    return f"{communication.operation}{role}{peer}"
