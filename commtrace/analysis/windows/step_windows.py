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
        places: ranges of the steps of the trace of which rows are read; both ends inclusive.
        far: rows of other steps that reach into these.
    """

    trace: RankTrace
    segments: tuple[Segment, ...]
    extents: tuple[Extent, ...]
    repeated: Mapping[int, int]
    places: tuple[tuple[int, int], ...]
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
    times = _StepTimes.of(survey)
    for steps in _parts(choice.used, survey.rows_of_step, most_rows):
        yield _window(survey, choice, times, (steps,))


def window_of(survey: Survey, choice: StepChoice, steps: Sequence[int]) -> StepWindow:
    """Return one window of some of the steps that count, which may lie far apart: what is between them is not read."""
    return _window(survey, choice, _StepTimes.of(survey), [(step,) for step in sorted(steps)])


def _window(survey: Survey, choice: StepChoice, times: _StepTimes, groups: Sequence[tuple[int, ...]]) -> StepWindow:
    meanwhile = [times.meanwhile(steps) for steps in groups]
    ranks = {
        rank: _part(one, [(steps, at[rank]) for steps, at in zip(groups, meanwhile, strict=True)])
        for rank, one in survey.ranks.items()
    }
    own = tuple(step for steps in groups for step in steps)
    return StepWindow(own, choice.used, ranks, replace(survey.outline, ranks={}))


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


class _StepTimes(NamedTuple):
    """When the ranks did which steps.

    Attributes:
        axes: by rank, its steps.
        clocks: by rank, a key that is equal for ranks whose times can be compared.
    """

    axes: Mapping[int, StepAxis]
    clocks: Mapping[int, ClockKey | None]

    @classmethod
    def of(cls, survey: Survey) -> _StepTimes:
        aligned = apply(survey.outline, survey.alignment)
        return cls(
            {rank: StepAxis.of(trace.spans) for rank, trace in aligned.ranks.items()},
            {rank: trace.clock_key if survey.alignment.refused else None for rank, trace in aligned.ranks.items()},
        )

    def meanwhile(self, steps: tuple[int, ...]) -> dict[int, Int64]:
        """Return the places of each rank from the first begin of these steps on any rank to their last end."""
        extents: dict[ClockKey | None, tuple[int, int]] = dict.fromkeys(self.clocks.values(), (0, 0))
        for rank, axis in self.axes.items():
            own = np.isin(axis.number, steps)
            if own.any():
                begin, end = int(axis.start[own].min()), int(axis.end[own].max())
                known = extents[self.clocks[rank]]
                extents[self.clocks[rank]] = (
                    (begin, end) if known == (0, 0) else (min(begin, known[0]), max(end, known[1]))
                )
        return {rank: axis.overlapping(*extents[self.clocks[rank]]) for rank, axis in self.axes.items()}


def _part(one: RankSurvey, groups: Sequence[tuple[tuple[int, ...], Int64]]) -> RankPart:
    """What a window needs of a rank.

    Two steps before and one after each of its steps: an operation launched in one step may be waited for in the next,
    ranks may number one communication with different steps, and what a wait is due to began in the step before.

    Args:
        one: the rank.
        groups: steps that follow each other, with the places at which the rank was while any rank was in them.
    """
    axis, far = StepAxis.of(one.trace.spans), one.far
    reach = axis.reach(far)
    ranges = []
    for steps, meanwhile in groups:
        own = axis.places(np.array(steps))
        # Of a rank that recorded no step at all, everything is needed.
        around = [*own.tolist(), *meanwhile.tolist()] or ([] if len(axis.number) else [-1])
        if around:
            # How much of a communication was hidden is known when all that the rank stood still for until its end is.
            launched = communication_rows(far) & np.isin(reach.place, own)
            first = min([min(around) - 2, *reach.first[launched].tolist()])
            last = max([max(around) + 1, *reach.last[launched].tolist()])
            ranges.append((first, last))
    if not ranges:
        bare = replace(one.trace, spans=Spans.empty())
        return RankPart(bare, one.segments, (), one.repeated, places=(), far=Spans.empty())
    bounds = [(axis.numbers(*places), axis.times(*places)) for places in ranges]
    inside = _within(reach.place, ranges)
    touching = np.any([(reach.first <= last) & (reach.last >= first) for first, last in ranges], axis=0)
    begin, end = max(min(first for first, _ in ranges) - 1, 0), max(last for _, last in ranges) + 2
    steps_around = np.flatnonzero(one.trace.spans.kind == schema.STEP)[begin:end]
    return RankPart(
        trace=replace(one.trace, spans=one.trace.spans.take(steps_around)),
        segments=one.segments,
        extents=tuple(
            extent for extent in one.extents if any(extent.holds(*numbers, *times) for numbers, times in bounds)
        ),
        repeated=one.repeated,
        places=tuple((first - begin, last - begin) for first, last in ranges),
        far=far.take(touching & ~inside),
    )


def _within(places: Int64, ranges: Sequence[tuple[int, int]]) -> Bool:
    """Return which of these places lie in one of the ranges."""
    return np.asarray(np.any([(places >= first) & (places <= last) for first, last in ranges], axis=0))


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
        rows.append(spans.take(_within(place, part.places)))
        details.update(decoded.ranks[trace.rank].details)
    spans = Spans.concatenate(rows)
    if len(rows) > 1:  # each part is in order
        spans = spans.take(np.lexsort((spans.start - spans.end, spans.start)))
    return replace(trace, spans=spans, details=details)
