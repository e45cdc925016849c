"""Load the steps that a user asks for, and choose those of them that count.

Their neighbours are loaded as well: communication begins in one step and ends in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.analysis.matching.match import Matches
from commtrace.analysis.steps.attempts import is_earlier
from commtrace.analysis.steps.inference import infer_steps
from commtrace.errors import ConfigurationError
from commtrace.trace import schema
from commtrace.trace.blocks import Block, bounds_of, rows_in_steps
from commtrace.trace.files.reader import load_run
from commtrace.trace.json_values import JsonObject, to_json
from commtrace.trace.quiet import quiet_steps
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.selection import StepRange
from commtrace.trace.spans import Bool, Int32, Spans

_ENOUGH_STEPS_FOR_A_WARM_UP: Final = 3
_NO_STEP: Final = -1
_BETWEEN_STEPS: Final = (schema.DATA, schema.GC, schema.CHECKPOINT, schema.EVALUATION)
"""Work between two steps, for which others may wait in the second one."""

WARM_UP: Final = "warm-up"
DURATION_ONLY: Final = "not in detail"
QUIET: Final = "not recorded, to measure what recording costs"
AFTER_QUIET: Final = "behind steps that were not recorded"
"""Whatever such a step waits for that was launched before it is not known: the wait would pass for its own work."""
LENGTH_KNOWN: Final = (DURATION_ONLY, QUIET, AFTER_QUIET)
"""Reasons of steps of which nothing but the length, and perhaps sums, is known well, on purpose."""
TORN: Final = "a clock was stepped back in it"


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """Some steps of a run."""

    recorded: Run
    context: Run  # with a step on either side, where communication may end or have another number
    wanted: StepRange | None = None  # None for all

    @classmethod
    def of(cls, context: Run, wanted: StepRange) -> ChosenSteps:
        """Return these steps of a run that was loaded with their neighbours."""
        return cls(_selected(context, wanted), context, wanted)


def load_window(source: str | Path | Run, steps: str | None = None) -> ChosenSteps:
    """Load the steps asked for from a run directory, or take them from a loaded run.

    Args:
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``; None for all.

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
    """
    if steps is None:
        run = _with_steps(source if isinstance(source, Run) else load_run(source))
        return ChosenSteps(run, run)
    wanted = StepRange.parse(steps)
    around = StepRange(wanted.first - 1, wanted.end + 1)
    if isinstance(source, Run):
        source = _with_steps(source)
    context = _selected(source, around) if isinstance(source, Run) else load_run(source, around)
    window = ChosenSteps.of(context, wanted)
    if not recorded_steps(window.recorded) and not isinstance(source, Run):
        # Nothing of these steps was recorded, or nothing marked steps: then they follow from the whole run.
        whole = _with_steps(load_run(source))
        if whole.steps_inferred:
            return load_window(whole, steps)
    if not recorded_steps(window.recorded):
        raise ConfigurationError(f"no step in {steps}; {_what_is_recorded(source)}")
    return window


def _with_steps(run: Run) -> Run:
    return infer_steps(run) or run


def _selected(run: Run, steps: StepRange) -> Run:
    ranks = {
        rank: replace(trace, spans=trace.spans.take(contiguous(rows_in_steps(_block_of(trace), steps))))
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def _block_of(trace: RankTrace) -> Block:
    return Block((trace.rank,), bounds_of([len(trace.spans)]), trace.spans)


def recorded_steps(run: Run) -> list[int]:
    """Return the numbers of the steps that any rank has recorded, ascending."""
    of_ranks = [trace.spans.step[trace.spans.kind == schema.STEP] for trace in run.ranks.values()]
    return [int(step) for step in np.unique(np.concatenate(of_ranks))] if of_ranks else []


def _what_is_recorded(source: str | Path | Run) -> str:
    steps = recorded_steps(source if isinstance(source, Run) else load_run(source))
    if not steps:
        return "the run has no steps at all. Mark them with `with commtrace.step(i):`"
    return f"recorded are {steps[0]}–{steps[-1]}" if len(steps) > 1 else f"recorded is only {steps[0]}"


@dataclass(frozen=True, slots=True)
class LeftOutSteps:
    """Consecutive steps that are left out for the same reason; ``last`` is inclusive."""

    first: int
    last: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The steps that count."""

    used: tuple[int, ...]  # ascending; empty if none was recorded: the whole recording then counts as one
    left_out: Mapping[int, str]  # the reason for each other step
    ranks: tuple[int, ...]  # those that recorded the steps

    def to_json(self) -> JsonObject:
        return {
            "first": self.used[0] if self.used else None,
            "last": self.used[-1] if self.used else None,
            "count": len(self.used),
            "left_out": to_json(self.ranges_left_out()),
        }

    def ranges_left_out(self) -> list[LeftOutSteps]:
        """Return the steps that are left out, without those that were recorded without detail, or not, on purpose."""
        left_out = [step for step, reason in self.left_out.items() if reason not in LENGTH_KNOWN]
        return [
            LeftOutSteps(steps[0], steps[-1], len(steps), reason)
            for reason, group in groupby(left_out, key=lambda step: self.left_out[step])
            if (steps := list(group))
        ]


def choose_steps(run: Run, *, keep_warm_up: bool) -> StepChoice:
    """Return the steps that every rank recorded in detail and in full.

    The first of at least three is left out as warm-up, unless ``keep_warm_up``: the user chose the steps.
    """
    of_rank = {rank: _recorded_steps(trace) for rank, trace in run.ranks.items()}
    reporting = tuple(rank for rank, steps in of_rank.items() if len(steps))
    if not reporting:
        return StepChoice((), {}, tuple(of_rank))
    recorded = common = of_rank[reporting[0]]
    for rank in reporting[1:]:
        steps_of_rank = of_rank[rank]
        if not (np.array_equal(steps_of_rank, recorded) and np.array_equal(steps_of_rank, common)):
            recorded, common = np.union1d(recorded, steps_of_rank), np.intersect1d(common, steps_of_rank)
    summed = {step for rank in reporting for step in run.ranks[rank].aggregates}
    quiet = frozenset[int]().union(*(quiet_steps(run.ranks[rank].quiet) for rank in reporting))
    after_quiet = {step + 1 for step in quiet} - quiet
    complete = common[~np.isin(common, [*summed, *quiet, *after_quiet])]
    rest = recorded[~np.isin(recorded, complete)]
    left_out = {
        step: ("not recorded in full by every rank" if not is_common else _why_unknown(step, quiet, after_quiet))
        for step, is_common in zip(rest.tolist(), np.isin(rest, common).tolist(), strict=True)
    }
    begins_here = np.array_equal(complete[:1], recorded[:1]) and not any(
        trace.discarded for trace in run.ranks.values()
    )
    if not keep_warm_up and begins_here and len(complete) >= _ENOUGH_STEPS_FOR_A_WARM_UP:
        left_out[int(complete[0])] = WARM_UP
        complete = complete[1:]
    return StepChoice(tuple(complete.tolist()), dict(sorted(left_out.items())), reporting)


def _why_unknown(step: int, quiet: Set[int], after_quiet: Set[int]) -> str:
    return QUIET if step in quiet else AFTER_QUIET if step in after_quiet else DURATION_ONLY


def _recorded_steps(trace: RankTrace) -> Int32:
    spans = trace.spans
    steps = np.unique(spans.step[np.flatnonzero(spans.kind == schema.STEP)])
    return steps[~is_earlier(steps)]


def without_torn_steps(choice: StepChoice, run: Run) -> StepChoice:
    """Return the choice without steps that overlap or end before they begin, as a clock was stepped back in them."""
    torn = set[int]().union(*(_torn(run.ranks[rank].spans, choice.used) for rank in choice.ranks))
    if not torn:
        return choice
    used = tuple(step for step in choice.used if step not in torn)
    return replace(choice, used=used, left_out=dict(sorted({**choice.left_out, **dict.fromkeys(torn, TORN)}.items())))


def _torn(spans: Spans, used: Sequence[int]) -> set[int]:
    rows = np.flatnonzero((spans.kind == schema.STEP) & np.isin(spans.step, used))
    rows = rows[np.argsort(spans.step[rows], kind="stable")]
    step, start, end = spans.step[rows], spans.start[rows], spans.end[rows]
    overlap = np.flatnonzero(start[1:] < end[:-1])
    return {*step[end < start].tolist(), *step[overlap].tolist(), *step[overlap + 1].tolist()}


def rows_of_steps(run: Run, choice: StepChoice) -> dict[int, Bool | slice]:
    """Return, by rank that counts, the rows of the chosen steps, or of work that holds up the next one of them."""
    rows_by_rank: dict[int, Bool | slice] = {}
    for block in run.blocks:
        spans = block.spans
        in_steps = np.isin(spans.step, choice.used)
        between = (spans.step == _NO_STEP) & np.isin(spans.kind, _BETWEEN_STEPS)
        for rank, rows in block.slices().items():
            chosen = in_steps[rows]
            if between[rows].any() and chosen.any():
                start, end = spans.start[rows], spans.end[rows]
                chosen |= between[rows] & (start >= start[chosen].min()) & (end <= end[chosen].max())
            rows_by_rank[rank] = contiguous(chosen)
    return {rank: rows_by_rank[rank] for rank in choice.ranks}


def select(run: Run, matches: Matches, rows: Mapping[int, Bool | slice]) -> tuple[Run, Matches]:
    """Return only these rows of these ranks, matched as before."""
    taken = {rank: chosen if isinstance(chosen, slice) else contiguous(chosen) for rank, chosen in rows.items()}
    if [*taken] == [*run.ranks] and all(
        isinstance(rows_of_rank, slice) and rows_of_rank == slice(0, len(run.ranks[rank].spans))
        for rank, rows_of_rank in taken.items()
    ):
        return run, matches
    ranks = {
        rank: replace(run.ranks[rank], spans=run.ranks[rank].spans.take(rows_of_rank))
        for rank, rows_of_rank in taken.items()
    }
    matched = {rank: matches.ranks[rank].take(rows_of_rank) for rank, rows_of_rank in taken.items()}
    return replace(run, ranks=ranks), replace(matches, ranks=matched)


def contiguous(rows: Bool) -> Bool | slice:
    """Return a slice in place of a mask if the chosen rows are adjacent, to avoid a copy."""
    chosen = np.flatnonzero(rows)
    if len(chosen) and chosen[-1] - chosen[0] + 1 == len(chosen):
        return slice(int(chosen[0]), int(chosen[-1]) + 1)
    return rows


def whole_recording_as_step(run: Run) -> Run:
    """Return a run without steps with one, numbered −1, over everything that each rank recorded."""
    return replace(run, ranks={rank: _with_step(run, trace) for rank, trace in run.ranks.items()})


def _with_step(run: Run, trace: RankTrace) -> RankTrace:
    spans = trace.spans
    if not len(spans):
        return trace
    begin, end = int(spans.start.min()), int(spans.end.max())
    step = Spans.from_rows([{"kind": "step", "start": begin, "end": end, "step": _NO_STEP}], run.names)
    whole = Spans.concatenate([step, spans.replace(step=np.full(len(spans), _NO_STEP, np.int32))])
    return replace(trace, spans=whole)


WHOLE_RECORDING: Final = (_NO_STEP,)
"""The value of :attr:`StepChoice.used` for a run made by :func:`whole_recording_as_step`."""
