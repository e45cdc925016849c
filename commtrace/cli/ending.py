"""What a job that has ended says unasked: its state and the findings that cost most, in three lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Final

from commtrace.errors import CommtraceError

_SECONDS: Final = 1.0
"""The most computing that a job's end waits for; whoever wants to wait longer asks for the summary."""

_MOST_SECONDS: Final = 5.0
"""The most that it waits on a host whose cores are busy, or for files that are slow to read."""

_LOOK_SECONDS: Final = 0.02

_STEPS_OF_RANKS: Final = 2_000
_FEWEST_STEPS: Final = 12
"""Of a large job the newest steps are judged: so many of all ranks together, and at least so many of each."""

_MOST_FINDINGS: Final = 2


def ending_lines(directory: Path, seconds: float = _SECONDS) -> Sequence[str]:
    """Return at most three lines on a run that has ended; none if that computes for longer, or it cannot be read."""
    import_module("commtrace.analysis.judged_run")  # before the clock runs

    lines: list[str] = []
    thread = Thread(target=_judge, args=(directory, lines), daemon=True)
    computed, began = time.process_time(), time.monotonic()
    thread.start()
    while thread.is_alive() and time.process_time() - computed < seconds and time.monotonic() - began < _MOST_SECONDS:
        thread.join(_LOOK_SECONDS)
    return [] if thread.is_alive() else lines


def _judge(directory: Path, lines: list[str]) -> None:
    # Imported here: this process reads no run if nothing was recorded.
    from commtrace.analysis.judged_run import judge_run, measure_job
    from commtrace.analysis.windows.run import open_run
    from commtrace.findings.finding import NOT_JUDGED, NOTHING_COSTS, worth_naming

    try:
        run = open_run(directory, _newest_steps(directory))
        judged = judge_run(run, run.measure(measure_job).result)
    except (CommtraceError, OSError):
        return  # the command that is named next says what is wrong
    named = worth_naming(judged.findings)
    found = [f"{number}. {finding.line()}" for number, finding in enumerate(named[:_MOST_FINDINGS], 1)]
    if not found:
        not_judged = [finding.line() for finding in judged.findings if finding.kind == NOT_JUDGED]
        found = not_judged[:1] or [NOTHING_COSTS]
    elif len(named) > len(found):
        found[-1] += f" ({len(named) - len(found)} more)"
    lines += [judged.title.words, *found]


def _newest_steps(directory: Path) -> str | None:
    """Return which steps to judge; None for all of them."""
    from commtrace.history.facts import read_facts

    facts = read_facts(directory, now_ns=time.time_ns())
    most = max(_STEPS_OF_RANKS // max(facts.world_size, 1), _FEWEST_STEPS)
    if facts.last_step is None or (facts.steps or 0) <= most:
        return None
    return f"{facts.last_step - most + 1}:{facts.last_step + 1}"
