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
from commtrace.analysis.roles import Roles, find_roles, select_roles
from commtrace.analysis.step_choice import (
    WHOLE_RECORDING,
    StepChoice,
    choose_steps,
    rows_of_steps,
    select,
    whole_recording_as_step,
)
from commtrace.analysis.window import load_window
from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class Context:
    """The steps that count with those around them: of communication that crosses into them, both ends are here.

    Attributes:
        run: on one clock, the ranks that count.
        matches, roles: of this run.
        steps: the numbers of the steps that count.
    """

    run: Run
    matches: Matches
    roles: Roles
    steps: tuple[int, ...]

    @classmethod
    def of(cls, run: Run, matches: Matches, choice: StepChoice) -> Context:
        if set(choice.ranks) != set(run.ranks):
            run = replace(run, ranks={rank: run.ranks[rank] for rank in choice.ranks})
            matches = replace(matches, ranks={rank: matches.ranks[rank] for rank in choice.ranks})
        return cls(run, matches, find_roles(run), choice.used)


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
        partition: where the time of every step that counts went; its ``stalled_ns`` are of the rows of the context.
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


def analyse(source: str | Path | Run, steps: str | None = None) -> Analysis:
    """Run the chain.

    Args:
        source: a run directory or a loaded run.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``. Without, all but the first.

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
    """
    window = load_window(source, steps)
    choice = choose_steps(window.recorded, keep_warm_up=steps is not None)
    whole = not choice.used and not choice.left_out
    alignment = align(window.context)
    aligned = apply(whole_recording_as_step(window.context) if whole else window.context, alignment)
    wanted = replace(choice, used=WHOLE_RECORDING) if whole else choice
    all_matches = match(aligned, clocks_agree=alignment.refused is None)
    context = Context.of(aligned, all_matches, wanted)
    rows = rows_of_steps(aligned, wanted)
    run, matches = select(aligned, all_matches, rows)
    times = partition(context.run, context.matches, context.roles, wanted.used)
    return Analysis(window.recorded, run, alignment, choice, matches, select_roles(context.roles, rows), times, context)
