"""The chain of the analysis in one call: load, align, match, choose the steps, partition.

>>> analysis = analyse("commtrace-runs/my-run", steps="10:20")  # doctest: +SKIP
>>> analysis.partition.total("bubble")                          # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from commtrace.analysis.breakdown.partition import Partition, partition
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.matched import Context, Matched, match_run
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.roles import Roles
from commtrace.analysis.steps.choice import StepChoice
from commtrace.analysis.steps.window import Window
from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class Analysis:
    """An analysed run.

    Attributes:
        recorded: everything that was loaded, as it was recorded.
        run: on one clock, only the steps that count; ``matches``, ``roles`` and ``partition`` are of this run.
        steps: which steps count, and why the others do not.
        partition: its ``stalled_ns`` are of the rows of the context.
        context: these steps with their neighbours.
    """

    recorded: Run
    run: Run
    alignment: Alignment
    steps: StepChoice
    matches: Matches
    roles: Roles
    partition: Partition
    context: Context


def analyse(source: str | Path | Run | Window, steps: str | None = None) -> Analysis:
    """Run the chain.

    Args:
        source: a run directory, a loaded run, or some steps of one as they were loaded.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``. Without, all but the first.

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
    """
    return analysis_of(match_run(source, steps))


def analysis_of(matched: Matched) -> Analysis:
    """Partition the steps of a matched run."""
    context = matched.context
    return Analysis(
        recorded=matched.recorded,
        run=matched.run,
        alignment=matched.alignment,
        steps=matched.steps,
        matches=matched.matches,
        roles=matched.roles,
        partition=partition(context.run, context.matches, context.roles, context.steps),
        context=context,
    )
