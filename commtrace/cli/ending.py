"""What a job that has ended says unasked: its state and the findings that cost most, in three lines.

``commtrace run`` says it, else rank 0 of the job, by a process beside it (commtrace/recording/findings_at_end.py).
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError
from commtrace.trace.inputs import printable

if TYPE_CHECKING:
    from commtrace.analysis.judged_run import JudgedRun

_SECONDS: Final = 1.0
"""The most computing that a job's end waits for; whoever wants to wait longer asks for the summary."""

_MOST_SECONDS: Final = 5.0
"""The most that it waits on a host whose cores are busy, or for files that are slow to read."""

_LOOK_SECONDS: Final = 0.02

_CLOSING_SECONDS: Final = 0.4
"""Ranks that end together close their files within this time."""

_MOST_FINDINGS: Final = 2


def main(descriptor: int, parent: int) -> None:
    """Send rank 0, over a connection, what there is to say of its job, once it has sent where that is."""
    connection = Connection(descriptor)
    _import()  # while the rank still closes its files
    directory, seconds, command = connection.recv()
    # Whatever becomes of the rank, and of the file system, this process does not go on.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + _MOST_SECONDS)
    connection.send(lines_of_rank_0(directory, command))


def lines_of_rank_0(directory: Path, command: str) -> list[str]:
    """Return three lines on a job whose rank 0 ends, and how to read on; none if it was too short, or a rank failed.

    Args:
        command: how a shell calls commtrace.
    """
    lines: list[str] = []
    _judge(directory, lines, wait_for_ranks=True, tells=lambda judged: not judged.stops and _is_long_enough(judged))
    if not lines:
        return []
    return [f"commtrace: {lines[0]}", *lines[1:], f"Next: {command} summary {shlex.quote(str(directory))}"]


def ending_lines(directory: Path, seconds: float = _SECONDS, *, wait_for_ranks: bool = False) -> Sequence[str]:
    """Return at most three lines on a run that has ended; none if that computes for longer, or it cannot be read.

    Args:
        wait_for_ranks: some may still close their files.
    """
    _import()  # before the clock runs

    lines: list[str] = []
    thread = Thread(target=_judge, args=(directory, lines), kwargs={"wait_for_ranks": wait_for_ranks}, daemon=True)
    computed, began = time.process_time(), time.monotonic()
    thread.start()
    while thread.is_alive() and time.process_time() - computed < seconds and time.monotonic() - began < _MOST_SECONDS:
        thread.join(_LOOK_SECONDS)
    return [] if thread.is_alive() else lines


def _import() -> None:
    import_module("commtrace.cli.newest_steps")


def _judge(
    directory: Path,
    lines: list[str],
    *,
    wait_for_ranks: bool = False,
    tells: Callable[[JudgedRun], bool] = lambda judged: True,
) -> None:
    # Imported here: this process reads no run if nothing was recorded.
    from commtrace.analysis.hangs.job_end import RUNNING
    from commtrace.cli.newest_steps import judge_newest_steps
    from commtrace.findings.finding import NOT_JUDGED, NOTHING_COSTS, advised, worth_naming

    try:
        ended = _ended_ranks(directory, _CLOSING_SECONDS) if wait_for_ranks else 0
        judged = judge_newest_steps(directory)
    except (CommtraceError, OSError):
        return  # the command that is named next says what is wrong
    if not tells(judged):
        return
    title = judged.title
    if wait_for_ranks and judged.job.state == RUNNING:
        title = title._replace(state=f"ended on {ended} of {title.world_size} ranks so far")
    named = worth_naming(judged.findings)
    numbered = [*enumerate(named, 1)]
    # The fault that costs most has its place also if the job loses more to how it is built.
    first = [*dict.fromkeys((*advised(named), *named))][:_MOST_FINDINGS]
    found = [f"{number}. {finding.line()}" for number, finding in numbered if finding in first]
    if not found:
        not_judged = [finding.line() for finding in judged.findings if finding.kind == NOT_JUDGED]
        found = not_judged[:1] or [NOTHING_COSTS]
    elif len(named) > len(found):
        found[-1] += f" ({len(named) - len(found)} more)"
    lines += map(printable, [title.words, *found])


def _is_long_enough(judged: JudgedRun) -> bool:
    return not judged.judgement.are_too_few_steps and bool(judged.title.num_steps)


def _ended_ranks(directory: Path, seconds: float) -> int:
    """Return how many ranks have ended, after waiting for so many seconds at most for the others."""
    from commtrace.analysis.hangs.rank_state import ENDED, find_endings
    from commtrace.trace.files.tail import RunTail
    from commtrace.trace.processes import process_state

    deadline = time.monotonic() + seconds
    while True:
        run = RunTail(directory).read(1).run
        endings = find_endings(run, time.time_ns(), process_state)
        ended = sum(ending.state == ENDED for ending in endings.values())
        if ended == run.world_size or time.monotonic() >= deadline:
            return ended
        time.sleep(_LOOK_SECONDS)
