"""What the newest steps of a run lose time to, for those that look at a run for another reason."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from commtrace.analysis.judged_run import JudgedRun, judge_run, measure_job
from commtrace.analysis.windows.run import open_run
from commtrace.history.facts import read_facts

_STEPS_OF_RANKS: Final = 2_000
_FEWEST_STEPS: Final = 12
"""Of a large job the newest steps are judged: so many of all ranks together, and at least so many of each."""


def judge_newest_steps(directory: Path) -> JudgedRun:
    """Judge a run by its newest steps, by all of them if it is small.

    Raises:
        CommtraceError: nothing was recorded there, or no whole step.
        OSError: it cannot be read.
    """
    run = open_run(directory, _newest_steps(directory))
    return judge_run(run, run.measure(measure_job).result)


def _newest_steps(directory: Path) -> str | None:
    """Return which steps to judge; None for all of them."""
    facts = read_facts(directory, now_ns=time.time_ns())
    most = max(_STEPS_OF_RANKS // max(facts.world_size, 1), _FEWEST_STEPS)
    if facts.last_step is None or (facts.steps or 0) <= most:
        return None
    return f"{facts.last_step - most + 1}:{facts.last_step + 1}"
