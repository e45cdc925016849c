"""From what ranks in a hang say of themselves to who did not arrive where."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from commtrace.analysis.doctor import examine
from commtrace.analysis.doing import own_frame
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.exporters.monitor.board import Board
from commtrace.live.watch import LiveEvent
from commtrace.trace.groups import Group
from commtrace.trace.metadata import ClockAnchor, RankMetadata
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Spans

_logger = logging.getLogger("commtrace")

HUNG = "hang"
_GATHER_SECONDS = 6.0
"""A window and a half: so long a rank that does not hang has to show that it goes on."""

_NOT_PUBLISHED = "threads"
"""Stacks stay in the rank's own file: they are long, and of interest for the root only."""


class Word(NamedTuple):
    """A sign of life of a rank.

    Attributes:
        phase: what it is in in which no step ends, see :class:`commtrace.live.window.WindowReport`; else empty.
        at: epoch seconds.
        ended: it was the last one, as the rank has ended in order.
    """

    phase: str
    at: float
    ended: bool = False


_MOST_PLACES = 3

NOBODY: Mapping[int, Word] = {}


def packed(report: Mapping[str, Any]) -> bytes:
    """A report for the board. Every rank tells its groups: of many ranks, in ranges."""
    told = {name: value for name, value in report.items() if name != _NOT_PUBLISHED}
    groups = [{**group, "ranks": _as_range(group["ranks"])} for group in report["groups"]]
    return zlib.compress(json.dumps({**told, "groups": groups}).encode())


def unpacked(told: bytes) -> dict[str, Any]:
    """What :func:`packed` made.

    Raises:
        ValueError: it is something else.
    """
    try:
        report: dict[str, Any] = json.loads(zlib.decompress(told))
    except zlib.error as error:
        raise ValueError(f"not a report: {error}") from error
    return {**report, "groups": [{**group, "ranks": _from_range(group["ranks"])} for group in report["groups"]]}


def _as_range(ranks: Sequence[int]) -> Any:
    """``{"range": [begin, end, step]}`` where that says the same."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    regular = range(ranks[0], ranks[-1] + 1, step) if step > 0 else ()
    return {"range": [ranks[0], ranks[-1] + 1, step]} if list(regular) == list(ranks) != [] else list(ranks)


def _from_range(told: Any) -> tuple[int, ...]:
    return _ranks(*told["range"]) if isinstance(told, dict) else tuple(told)


@lru_cache(maxsize=10_000)
def _ranks(begin: int, end: int, step: int) -> tuple[int, ...]:
    """The same object for all ranks that tell the same group: thousands have thousands of members."""
    return tuple(range(begin, end, step))


def hang_event(
    reports: Sequence[Mapping[str, Any]],
    world_size: int,
    now: float,
    unreadable: Sequence[int] = (),
    reporting: Collection[int] = (),
    ended: Collection[int] = (),
) -> LiveEvent:
    """What the reports of the ranks, put together, say: the same analysis that reads the files of a hung job.

    Args:
        reports: at least one.
        world_size: ranks of the job.
        now: epoch seconds.
        unreadable: ranks that have said something that is not understood; they are not silent.
        reporting: ranks whose windows still come: those that say nothing of a hang go on.
        ended: ranks that have ended in order.
    """
    run = run_of(reports)
    # Every rank that speaks has stood still for longer than is usual: judged like a job that will not go on.
    told = examine(run, now_ns=time.time_ns(), alive=lambda metadata: False)
    others = set(range(world_size)) - set(run.ranks) - set(unreadable)
    gone = sorted(others.intersection(ended))
    silent, going_on = sorted(others.difference(reporting, gone)), sorted(others.intersection(reporting))
    roots = [root["rank"] for root in told["hang"]["chains"]["roots"]]
    sentences = [
        f"Training has stopped: {len(run.ranks)} of {world_size} ranks say so.",
        *(
            [f"No word from {ranks_in_words(silent)}: dead, or stuck in code that lets no thread run."]
            if silent
            else []
        ),
        *([f"{ranks_in_words(gone).capitalize()} ended in order."] if gone else []),
        *([f"{ranks_in_words(going_on).capitalize()}: something still moves there."] if going_on else []),
        *([f"What {ranks_in_words(unreadable)} says cannot be read, and is left out."] if unreadable else []),
        *(told["hang"]["sentences"] or _places(reports)),
    ]
    roots = [rank for rank in roots if rank not in unreadable] or roots
    rank = next(iter([*roots, *silent, *going_on, *gone]), -1)
    host = run.ranks[rank].metadata.node if rank in run.ranks else ""
    return LiveEvent(HUNG, now, rank, host, " ".join(sentence.strip() for sentence in sentences))


def _places(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where ranks are that stand still, though none waits in a communication for another one."""
    ranks: dict[str, list[int]] = {}
    for report in reports:
        frames = report["activity"]["frames"]
        place = own_frame(frames) or next(iter(frames), "a place that is not known")
        ranks.setdefault(place, []).append(report["metadata"]["rank"])
    return [
        f"{ranks_in_words(own).capitalize()} in no communication, at {place}."
        for place, own in sorted(ranks.items(), key=lambda item: -len(item[1]))[:_MOST_PLACES]
    ]


def run_of(reports: Sequence[Mapping[str, Any]]) -> Run:
    """A run without rows, of what each rank was doing."""
    ranks = {trace.rank: trace for trace in map(trace_of, reports)}
    return Run(Path("running job"), dict(sorted(ranks.items())), [])


def trace_of(report: Mapping[str, Any]) -> RankTrace:
    """One rank without rows, with what it was doing.

    Raises:
        KeyError, TypeError, ValueError: the report lacks something, or is of another version.
    """
    metadata = RankMetadata(**{**report["metadata"], "anchor": ClockAnchor(**report["metadata"]["anchor"])})
    return RankTrace(
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


class HangJoiner:
    """Puts together what the ranks of a hung job say, once they have had time to say it.

    A rank that says nothing is the most interesting one, so nobody is waited for: the finding is told after a few
    seconds, and again when more ranks have spoken.

    Args:
        world_size: ranks of the job.

    Attributes:
        sentence: what was last told of the hang that the job is in; empty while it goes on.
    """

    def __init__(self, world_size: int) -> None:
        self.sentence = ""
        self._world_size = world_size
        self._first_heard = 0.0
        self._told_at = 0.0
        self._told_count = 0
        self._heard_count = 0
        self._told: Mapping[int, bytes] = {}
        self._reports: Mapping[int, dict[str, Any]] = {}
        self._unreadable_told = False

    def look(self, board: Board, now: float, words: Mapping[int, Word] = NOBODY) -> list[LiveEvent]:
        """Who is in a hang, if that is news.

        While a rank that does not hang saves a checkpoint or evaluates, the others wait for it in good order.

        Args:
            board: on which ranks say so.
            now: epoch seconds.
            words: the last ones of the ranks whose windows still come, and of those that have ended.

        Raises:
            BoardError: the store does not answer.
        """
        self._hear(board)
        told, reports = self._told, self._reports
        if not reports:
            self._first_heard, self._told_count, self.sentence = 0.0, 0, ""
            return []
        self._first_heard = self._first_heard or now
        if any(word.phase for rank, word in words.items() if rank not in told):
            return []
        ended = [rank for rank, word in words.items() if word.ended]
        if ended and not any(report["in_flight"] for report in reports.values()):
            return []  # the job comes to its end, and somebody has something left to do
        news = len(told) > self._told_count
        waited = now - (self._told_at if self._told_count else self._first_heard) >= _GATHER_SECONDS
        if not (news and (waited or len(told) == self._world_size)):
            return []
        self._told_at, self._told_count = now, len(told)
        unreadable = sorted(set(told) - set(reports))
        reporting = [rank for rank, word in words.items() if word.at > self._first_heard and not word.ended]
        event = hang_event(list(reports.values()), self._world_size, now, unreadable, reporting, ended)
        self.sentence = event.sentence
        return [event]

    def _hear(self, board: Board) -> None:
        """Read what ranks say, if any has said something since: of thousands, that takes seconds."""
        heard = board.hangs_told()
        if heard != self._heard_count:
            told = board.hangs(range(self._world_size))
            self._heard_count, self._told, self._reports = heard, told, self._readable(told)

    def _readable(self, told: Mapping[int, bytes]) -> dict[int, dict[str, Any]]:
        """What can be understood, by rank: one bad report must not hide the others."""
        found = {}
        for rank, one in told.items():
            try:
                report = unpacked(one)
                trace_of(report)
                found[rank] = report
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                if not self._unreadable_told:
                    self._unreadable_told = True
                    _logger.warning("commtrace: what rank %d says of a hang cannot be read: %r", rank, error)
        return found
