"""From what ranks in a hang say of themselves to who did not arrive where."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commtrace.analysis.doctor import examine
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.exporters.monitor.board import Board
from commtrace.live.watch import LiveEvent
from commtrace.trace.groups import Group
from commtrace.trace.metadata import ClockAnchor, RankMetadata
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Spans

HUNG = "hang"
_GATHER_SECONDS = 4.0
_NOT_PUBLISHED = "threads"
"""Stacks stay in the rank's own file: they are long, and of interest for the root only."""


def packed(report: Mapping[str, Any]) -> bytes:
    """A report for the board."""
    told = {name: value for name, value in report.items() if name != _NOT_PUBLISHED}
    return zlib.compress(json.dumps(told).encode())


def unpacked(told: bytes) -> dict[str, Any]:
    """What :func:`packed` made.

    Raises:
        ValueError: it is something else.
    """
    try:
        report: dict[str, Any] = json.loads(zlib.decompress(told))
    except zlib.error as error:
        raise ValueError(f"not a report: {error}") from error
    return report


def hang_event(reports: Sequence[Mapping[str, Any]], world_size: int, now: float) -> LiveEvent:
    """What the reports of the ranks, put together, say: the same analysis that reads the files of a hung job."""
    run = run_of(reports)
    # Every rank that speaks has stood still for longer than is usual: judged like a job that will not go on.
    told = examine(run, now_ns=time.time_ns(), alive=lambda metadata: False)
    silent = sorted(set(range(world_size)) - set(run.ranks))
    roots = [root["rank"] for root in told["hang"]["chains"]["roots"]]
    sentences = [
        f"Training has stopped: {len(run.ranks)} of {world_size} ranks say so.",
        *(
            [f"No word from {ranks_in_words(silent)}: dead, or stuck in code that lets no thread run."]
            if silent
            else []
        ),
        *told["hang"]["sentences"],
    ]
    rank = roots[0] if roots else silent[0] if silent else -1
    host = run.ranks[rank].metadata.node if rank in run.ranks else ""
    return LiveEvent(HUNG, now, rank, host, " ".join(sentence.strip() for sentence in sentences))


def run_of(reports: Sequence[Mapping[str, Any]]) -> Run:
    """A run without rows, of what each rank was doing."""
    ranks = {}
    for report in reports:
        metadata = RankMetadata(**{**report["metadata"], "anchor": ClockAnchor(**report["metadata"]["anchor"])})
        ranks[metadata.rank] = RankTrace(
            metadata=metadata,
            spans=Spans.empty(),
            groups={one["id"]: Group(**{**one, "ranks": tuple(one["ranks"])}) for one in report["groups"]},
            coordinates=report["topology"].get("coordinates", {}),
            parallel=report["topology"].get("parallel", {}),
            anchors=(ClockAnchor(report["monotonic_ns"], round(report["time"] * 1e9)),),
            in_flight=tuple(report["in_flight"]),
            activity={**report["activity"], "quiet_ns": report["quiet_ns"]},
            activity_ns=report["monotonic_ns"],
            last_written_ns=report["monotonic_ns"],
            closed=False,
        )
    return Run(Path("running job"), dict(sorted(ranks.items())), [])


class HangJoiner:
    """Puts together what the ranks of a hung job say, once they have had time to say it.

    A rank that says nothing is the most interesting one, so nobody is waited for: the finding is told after a few
    seconds, and again when more ranks have spoken.

    Args:
        world_size: ranks of the job.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._first_heard = 0.0
        self._told_at = 0.0
        self._told_count = 0

    def look(self, board: Board, now: float) -> list[LiveEvent]:
        """Who is in a hang, if that is news.

        Args:
            board: on which ranks say so.
            now: epoch seconds.

        Raises:
            BoardError: the store does not answer.
        """
        if not board.hangs_told():
            return []
        reports = [unpacked(one) for one in board.hangs(range(self._world_size))]
        if not reports:
            self._first_heard, self._told_count = 0.0, 0
            return []
        self._first_heard = self._first_heard or now
        news = len(reports) > self._told_count
        waited = now - (self._told_at if self._told_count else self._first_heard) >= _GATHER_SECONDS
        if not (news and (waited or len(reports) == self._world_size)):
            return []
        self._told_at, self._told_count = now, len(reports)
        return [hang_event(reports, self._world_size, now)]
