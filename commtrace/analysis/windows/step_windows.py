"""Cuts a run into windows of consecutive steps, and reads one: its rows, and those that reach into it.

>>> for window in cut_windows(survey, choice):                                          # doctest: +SKIP
...     analysis = analyse_window(window.read(), survey.alignment, choice.ranks, window.steps, choice.used)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis, analysis_of
from commtrace.analysis.clocks.align import Alignment, ClockKey, apply
from commtrace.analysis.matched import Context, Matched, matches_of, of_ranks
from commtrace.analysis.matching.match import match
from commtrace.analysis.matching.operations import communication_rows
from commtrace.analysis.matching.roles import find_roles
from commtrace.analysis.steps.choice import StepChoice, contiguous, select
from commtrace.analysis.windows.step_axis import StepAxis
from commtrace.analysis.windows.survey import RankSurvey, Survey, with_last_attempts
from commtrace.trace import schema
from commtrace.trace.files.decoding import RankMarks
from commtrace.trace.files.locate import Segment
from commtrace.trace.files.segment_index import Extent, read_extents
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64, Spans

MOST_ROWS: Final = 500_000
"""Of a window, over all ranks, unless a single step has more."""


class RankPart(NamedTuple):
    """What a window holds of one rank.

    Attributes:
        trace: the rank, with its steps for rows.
        segments, extents: its files, and where in them the rows lie.
        repeated: by number, until when its step was done for the last time but one.
        first_place, last_place: of the rows that are read, among the steps of the trace.
        far: rows of other steps that reach into these.
    """

    trace: RankTrace
    segments: tuple[Segment, ...]
    extents: tuple[Extent, ...]
    repeated: Mapping[int, int]
    first_place: int
    last_place: int
    far: Spans


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Steps that are analysed together, and all that it takes to read them: it can be sent anywhere.

    Attributes:
        steps: their numbers, ascending; those that count.
        steps_of_run: all of those of its run.
        ranks: by rank.
        outline: the run that it is part of, without its ranks.
    """

    steps: tuple[int, ...]
    steps_of_run: tuple[int, ...]
    ranks: Mapping[int, RankPart]
    outline: Run

    @property
    def num_rows(self) -> int:
        """How many rows are looked at to read it."""
        return sum(extent.num_rows for part in self.ranks.values() for extent in part.extents)

    def read(self) -> Run:
        """Read the rows of these steps and those around them, as they were recorded.

        Every rank has what its steps need: all that overlaps them, and the communications that they meet.
        """
        names, problems = list(self.outline.names), list[str]()
        ranks = {rank: _read_rank(part, names, problems) for rank, part in self.ranks.items()}
        new = tuple(sentence for sentence in dict.fromkeys(problems) if sentence not in self.outline.problems)
        return replace(self.outline, ranks=ranks, names=names, problems=new)


def cut_windows(survey: Survey, choice: StepChoice, most_rows: int = MOST_ROWS) -> Iterator[StepWindow]:
    """Cut the steps that count into windows, one after the other.

    Args:
        survey: of the run.
        choice: which steps count.
        most_rows: of a window; it has at least one step.
    """
    alignment = survey.alignment
    aligned = apply(survey.outline, alignment)
    axes = {rank: StepAxis.of(trace.spans) for rank, trace in aligned.ranks.items()}
    # Times on clocks that were not brought together are not compared.
    clocks = {rank: trace.clock_key if alignment.refused else None for rank, trace in aligned.ranks.items()}
    bare = replace(survey.outline, ranks={})
    for steps in _parts(choice.used, survey.rows_of_step, most_rows):
        extents = _extents(clocks, axes, steps)
        meanwhile = {rank: axis.overlapping(*extents[clocks[rank]]) for rank, axis in axes.items()}
        ranks = {rank: _part(one, steps, meanwhile[rank]) for rank, one in survey.ranks.items()}
        yield StepWindow(steps, choice.used, ranks, bare)


def steps_read(recorded: Run, ranks: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """Return those of these steps that all of these ranks still have: files may have been deleted meanwhile."""
    spans = [recorded.ranks[rank].spans for rank in ranks]
    numbers = [set(own.step[own.kind == schema.STEP].tolist()) for own in spans]
    return tuple(step for step in steps if all(step in own for own in numbers))


def analyse_window(
    recorded: Run, alignment: Alignment, ranks: Sequence[int], steps: Sequence[int], steps_of_run: Sequence[int]
) -> Analysis:
    """Run the chain of the analysis on some steps.

    Args:
        recorded: what was read of them, with what reaches into them.
        alignment: of the clocks of the whole run.
        ranks: those that count.
        steps: their numbers.
        steps_of_run: numbers of all steps of the run that count.
    """
    aligned = apply(recorded, alignment)
    counted = of_ranks(aligned, ranks)
    all_matches = match(aligned, clocks_agree=alignment.refused is None)
    context = Context(counted, matches_of(all_matches, ranks), find_roles(counted), tuple(steps))
    rows: dict[int, Bool | slice] = {rank: contiguous(np.isin(counted.ranks[rank].spans.step, steps)) for rank in ranks}
    run, matches = select(aligned, all_matches, rows)
    choice = StepChoice(tuple(steps), {}, tuple(ranks))
    return analysis_of(Matched(recorded, run, alignment, choice, matches, rows, context), tuple(steps_of_run))


def _parts(steps: Sequence[int], rows_of_step: Mapping[int, int], most_rows: int) -> list[tuple[int, ...]]:
    """Consecutive steps with at most so many rows, or one."""
    parts: list[list[int]] = []
    rows = 0
    for step in steps:
        rows += rows_of_step.get(step, 0)
        if not parts or rows > most_rows:
            parts.append([])
            rows = rows_of_step.get(step, 0)
        parts[-1].append(step)
    return [tuple(part) for part in parts]


def _extents(
    clocks: Mapping[int, ClockKey | None], axes: Mapping[int, StepAxis], steps: tuple[int, ...]
) -> dict[ClockKey | None, tuple[int, int]]:
    """By clock: from the first begin of these steps on any rank to their last end; (0, 0) where none recorded them."""
    extents: dict[ClockKey | None, tuple[int, int]] = dict.fromkeys(clocks.values(), (0, 0))
    for rank, axis in axes.items():
        own = np.isin(axis.number, steps)
        if own.any():
            begin, end = int(axis.start[own].min()), int(axis.end[own].max())
            known = extents[clocks[rank]]
            extents[clocks[rank]] = (begin, end) if known == (0, 0) else (min(begin, known[0]), max(end, known[1]))
    return extents


def _part(one: RankSurvey, steps: tuple[int, ...], meanwhile: Int64) -> RankPart:
    """What a window needs of a rank, which was at the places ``meanwhile`` while any rank was in the window's steps.

    One step more on either side: an operation launched in one step may be waited for in the next, and ranks may number
    one communication with different steps.
    """
    axis, far = StepAxis.of(one.trace.spans), one.far
    reach, own = axis.reach(far), axis.places(np.array(steps))
    # Of a rank that recorded no step at all, everything is needed.
    around = [*own.tolist(), *meanwhile.tolist()] or ([] if len(axis.number) else [-1])
    if not around:
        bare = replace(one.trace, spans=Spans.empty())
        return RankPart(bare, one.segments, (), one.repeated, first_place=0, last_place=-1, far=Spans.empty())
    # How much of a communication was hidden is known when all that the rank stood still for until its end is.
    launched = communication_rows(far) & np.isin(reach.place, own)
    first = min([min(around) - 2, *reach.first[launched].tolist()])
    last = max([max(around) + 1, *reach.last[launched].tolist()])
    numbers, times = axis.numbers(first, last), axis.times(first, last)
    inside = (reach.place >= first) & (reach.place <= last)
    begin = max(first - 1, 0)
    steps_around = np.flatnonzero(one.trace.spans.kind == schema.STEP)[begin : last + 2]
    return RankPart(
        trace=replace(one.trace, spans=one.trace.spans.take(steps_around)),
        segments=one.segments,
        extents=tuple(extent for extent in one.extents if extent.holds(*numbers, *times)),
        repeated=one.repeated,
        first_place=first - begin,
        last_place=last - begin,
        far=far.take((reach.first <= last) & (reach.last >= first) & ~inside),
    )


def _read_rank(part: RankPart, names: list[str], problems: list[str]) -> RankTrace:
    trace = part.trace
    axis = StepAxis.of(trace.spans)
    marks = RankMarks.none()
    marks.marks.discarded = trace.discarded
    rows = [part.far] if len(part.far) else []
    details = dict(trace.details)
    for decoded in read_extents(part.segments, part.extents, marks, problems):
        decoded.rename(names)
        spans = with_last_attempts(decoded.block.spans, part.repeated)
        place = axis.reach(spans).place
        rows.append(spans.take((place >= part.first_place) & (place <= part.last_place)))
        details.update(decoded.ranks[trace.rank].details)
    spans = Spans.concatenate(rows)
    if len(rows) > 1:  # each part is in order
        spans = spans.take(np.lexsort((spans.start - spans.end, spans.start)))
    return replace(trace, spans=spans, details=details)
