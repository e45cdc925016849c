"""How a job, or one of its attempts, ended: in one word, and in words about the ranks that did not end well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from commtrace.analysis.hangs.rank_state import DUMPED, SILENT, Ending, find_endings
from commtrace.analysis.hangs.rank_state import ENDED as RANK_ENDED
from commtrace.analysis.hangs.rank_state import RUNNING as RANK_RUNNING
from commtrace.findings.formatting import format_ranks
from commtrace.trace import schema
from commtrace.trace.files.reader import load_earlier_attempts
from commtrace.trace.processes import GONE, AskProcess, unknown_process
from commtrace.trace.run import RankTrace, Run

RUNNING: Final = "running"
ENDED: Final = "ended"
FAILED: Final = "failed"
CUT_OFF: Final = "cut_off"

STATES: Final = (RUNNING, ENDED, FAILED, CUT_OFF, DUMPED)
"""``ended``: all recorded ranks closed their files, or ended well without that; ``failed``: some of them ended with an
uncaught exception, or by os._exit with another status than 0; ``cut_off``: some did not close theirs, as after SIGKILL;
``dumped``: imported from dumps, which say nothing about the end."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


def how_it_ended(endings: Mapping[int, Ending]) -> tuple[str, str]:
    """Return one of :data:`STATES`, and in words to follow it, which ranks failed, were cut off or are silent."""
    silent = [rank for rank, one in endings.items() if one.state == SILENT]
    goes_on = any(one.state == RANK_RUNNING for one in endings.values()) or any(
        endings[rank].process not in (None, GONE) for rank in silent
    )
    if any(one.state == DUMPED for one in endings.values()):
        return DUMPED, ""
    if goes_on:
        return RUNNING, f"{format_ranks(silent)} silent" if silent else ""
    raised: dict[str, list[int]] = {}
    for rank, one in endings.items():
        if one.failure:
            raised.setdefault(one.failure, []).append(rank)
    cut_off = [rank for rank, one in endings.items() if one.state != RANK_ENDED and one.exit is None]
    if cut_off and not raised:
        return CUT_OFF, format_ranks(cut_off)
    parts = [f"{format_ranks(cut_off)} cut off"] if cut_off else []
    parts += [f"{exception} on {format_ranks(ranks)}" for exception, ranks in raised.items()]
    return FAILED if raised else ENDED, "; ".join(parts)


def end_words(state: str, ending: str) -> str:
    """Return ``failed: RuntimeError on rank 1``, ``ended``."""
    words = state.replace("_", " ")
    return f"{words}: {ending}" if ending else words


@dataclass(frozen=True, slots=True)
class WentOn:
    """A process that is in two attempts, one after the other."""

    rank: int  # in the earlier one
    next_rank: int
    host: str
    pid: Count


@dataclass(frozen=True, slots=True)
class EarlierAttempt:
    """An attempt of a job before the newest one. Steps are None if none ended."""

    attempt: Count  # from 0
    world_size: Count
    first_step: Count | None
    last_step: Count | None
    state: str  # one of STATES
    ending: str  # the ranks that did not end well, in words
    went_on: tuple[WentOn, ...]  # its processes that are in the next attempt too

    @property
    def words(self) -> str:
        """Return ``failed: RuntimeError on rank 1``."""
        return end_words(self.state, self.ending)


def earlier_attempts(run: Run, *, now_ns: int, ask: AskProcess = unknown_process) -> tuple[EarlierAttempt, ...]:
    """Return how the attempts before a loaded one ended, oldest first; only the ends of their files are read."""
    if not run.any_metadata.attempt:
        return ()
    runs = [*load_earlier_attempts(run, only_ends=True), run]
    return tuple(_of(earlier, later, now_ns, ask) for earlier, later in pairwise(runs))


def _of(run: Run, following: Run, now_ns: int, ask: AskProcess) -> EarlierAttempt:
    steps = np.concatenate([trace.spans.step[trace.spans.kind == schema.STEP] for trace in run.ranks.values()])
    last = int(steps.max(initial=-1))
    first = min(trace.first_step for trace in run.ranks.values())
    went_on = tuple(_went_on(run, following))
    # What a process left as it joined the next one has ended.
    state, ending = how_it_ended(find_endings(run, now_ns, ask, goes_on=False))
    return EarlierAttempt(
        attempt=run.any_metadata.attempt,
        world_size=run.world_size,
        first_step=None if last < 0 else min(first, last),
        last_step=None if last < 0 else last,
        state=state,
        ending=ending,
        went_on=went_on,
    )


def _went_on(run: Run, following: Run) -> Iterator[WentOn]:
    there = {_process(trace): rank for rank, trace in following.ranks.items()}
    for rank, trace in run.ranks.items():
        next_rank = there.get(_process(trace))
        if next_rank is not None:
            yield WentOn(rank, next_rank, trace.metadata.node, trace.metadata.pid)


def _process(trace: RankTrace) -> tuple[str, str, int]:
    return trace.metadata.host, trace.metadata.boot_id, trace.metadata.pid
