"""Load, align and match a run, and choose its steps: all that a replay needs.

>>> match_run("commtrace-runs/my-run", steps="10:20")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commtrace.analysis.clocks.align import Alignment, align, apply
from commtrace.analysis.matching.match import Matches, match
from commtrace.analysis.matching.roles import Roles, find_roles, select_roles
from commtrace.analysis.matching.stages import with_classes
from commtrace.analysis.steps.attempts import separate_attempts
from commtrace.analysis.steps.choice import (
    WHOLE_RECORDING,
    ChosenSteps,
    StepChoice,
    choose_steps,
    load_window,
    rows_of_steps,
    select,
    whole_recording_as_step,
    without_torn_steps,
)
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool


@dataclass(frozen=True, slots=True)
class Context:
    """The steps that count with their neighbours, which hold the other end of communication that crosses steps."""

    run: Run  # on one clock, the ranks that count
    matches: Matches
    roles: Roles
    steps: tuple[int, ...]  # numbers of the steps that count


@dataclass(frozen=True, slots=True)
class Matched:
    """A run whose communications are joined across ranks."""

    recorded: Run  # everything that was loaded, as it was recorded
    run: Run  # on one clock, only the steps that count
    alignment: Alignment
    steps: StepChoice
    matches: Matches  # of ``run``
    rows: dict[int, Bool | slice]  # by rank of the context, its rows in the steps that count
    context: Context  # without steps, the whole recording is its only step

    @property
    def roles(self) -> Roles:
        """Return the roles of the communications of ``run``."""
        return select_roles(self.context.roles, self.rows)


def match_run(source: str | Path | Run | ChosenSteps, steps: str | None = None) -> Matched:
    """Match a run; arguments and errors are those of :func:`commtrace.analysis.chain.analyse`."""
    window = _with_classes(
        _with_last_attempts(source if isinstance(source, ChosenSteps) else load_window(source, steps))
    )
    choice = choose_steps(window.recorded, keep_warm_up=steps is not None)
    whole = not choice.used and not choice.left_out
    read = whole_recording_as_step(window.context) if whole else window.context
    wanted = replace(choice, used=WHOLE_RECORDING) if whole else choice
    alignment = align(window.context)
    aligned = apply(read, alignment)
    counted = of_ranks(aligned, choice.ranks)
    roles = find_roles(counted)
    if not alignment.keeps_order and not whole:
        choice = wanted = without_torn_steps(choice, counted)
    all_matches = match(aligned, clocks_agree=alignment.refused is None)
    context = Context(counted, matches_of(all_matches, choice.ranks), roles, wanted.used)
    rows = rows_of_steps(aligned, wanted)
    run, matches = select(aligned, all_matches, rows)
    return Matched(window.recorded, run, alignment, choice, matches, rows, context)


def _with_last_attempts(window: ChosenSteps) -> ChosenSteps:
    context = separate_attempts(window.context)
    recorded = context if window.recorded is window.context else separate_attempts(window.recorded)
    return replace(window, context=context, recorded=recorded)


def _with_classes(window: ChosenSteps) -> ChosenSteps:
    context = with_classes(window.context)
    if context is window.context:
        return window
    classes = {rank: trace.work_class for rank, trace in context.ranks.items() if trace.work_class is not None}
    return replace(window, context=context, recorded=window.recorded.with_classes(classes))


def of_ranks(run: Run, ranks: Sequence[int]) -> Run:
    """Return the run with these ranks only."""
    return run if set(ranks) == set(run.ranks) else replace(run, ranks={rank: run.ranks[rank] for rank in ranks})


def matches_of(matches: Matches, ranks: Sequence[int]) -> Matches:
    if set(ranks) == set(matches.ranks):
        return matches
    return replace(matches, ranks={rank: matches.ranks[rank] for rank in ranks})
