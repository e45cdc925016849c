"""The chain of the analysis in one call: load, align, match, choose the steps, partition.

>>> analysis = analyse("commtrace-runs/my-run", steps="10:20")  # doctest: +SKIP
>>> analysis.partition.total("bubble")                          # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from commtrace.analysis.align import Alignment, align, apply
from commtrace.analysis.match import Matches, match
from commtrace.analysis.partition import Partition, partition
from commtrace.analysis.roles import Roles, find_roles
from commtrace.analysis.step_choice import (
    WHOLE_RECORDING,
    StepChoice,
    choose_steps,
    restrict,
    whole_recording_as_step,
)
from commtrace.trace.reader import load_run
from commtrace.trace.run import Run
from commtrace.trace.step_range import StepRange


@dataclass(frozen=True, slots=True)
class Analysis:
    """A run, understood.

    Attributes:
        recorded: everything that was loaded, as it was recorded.
        run: on one clock, only the steps that count; the following are of this run.
        alignment: how the clocks were brought together.
        steps: which steps count, and why the others do not.
        matches: the communications joined across ranks.
        roles: what they are for.
        partition: where the time of every step went.
    """

    recorded: Run
    run: Run
    alignment: Alignment
    steps: StepChoice
    matches: Matches
    roles: Roles
    partition: Partition


def analyse(source: str | Path | Run, steps: str | None = None) -> Analysis:
    """Run the chain.

    Args:
        source: a run directory or a loaded run.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``. Without, all but the first.

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed.
    """
    recorded = _selected(source, steps) if isinstance(source, Run) else load_run(source, steps)
    choice = choose_steps(recorded, keep_warm_up=steps is not None)
    whole = not choice.used and not choice.left_out
    alignment = align(recorded)
    aligned = apply(whole_recording_as_step(recorded) if whole else recorded, alignment)
    all_matches = match(aligned, clocks_agree=alignment.refused is None)
    wanted = replace(choice, used=WHOLE_RECORDING) if whole else choice
    run, matches = restrict(aligned, all_matches, wanted)
    roles = find_roles(run)
    return Analysis(recorded, run, alignment, choice, matches, roles, partition(run, matches, roles))


def _selected(run: Run, steps: str | None) -> Run:
    if steps is None:
        return run
    wanted = StepRange.parse(steps)
    return replace(
        run,
        ranks={
            rank: replace(trace, spans=trace.spans.take(wanted.mask(trace.spans.step)))
            for rank, trace in run.ranks.items()
        },
    )
