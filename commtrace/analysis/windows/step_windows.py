"""Cut a run into windows of consecutive steps, and read one: its rows, and those that reach into it.

>>> for window in cut_windows(survey, choice):                                          # doctest: +SKIP
...     analysis = analyse_window(window.read(), survey.alignment, choice.ranks, window.steps, choice.used)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis, analysis_of
from commtrace.analysis.clocks.align import Alignment, apply
from commtrace.analysis.matched import Context, Matched, matches_of, of_ranks
from commtrace.analysis.matching.match import match
from commtrace.analysis.matching.operations import communication_rows
from commtrace.analysis.matching.roles import find_roles
from commtrace.analysis.steps.attempts import Repetitions
from commtrace.analysis.steps.choice import StepChoice, contiguous, select
from commtrace.analysis.windows.step_axis import Reach, StepAxis
from commtrace.analysis.windows.survey import RankSurvey, RowsOfSteps, Survey
from commtrace.trace import schema
from commtrace.trace.blocks import blocks_of
from commtrace.trace.files.decoding import RankMarks
from commtrace.trace.files.locate import Segment
from commtrace.trace.files.segment_index import Extent, read_extents
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

MOST_ROWS: Final = 250_000
"""Rows of a window, over all ranks, unless a single step has more."""


class RankPart(NamedTuple):
    """The part of a rank in a window."""

    trace: RankTrace  # its rows are steps
    segments: tuple[Segment, ...]
    extents: tuple[Extent, ...]  # of the rows in the segments
    repeated: Repetitions
    places: tuple[tuple[int, int], ...]  # ranges of the trace's steps whose rows are read, inclusive
    far: Spans  # rows of other steps that reach into these


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Steps that are analysed together, and all that a worker needs to read them."""

    steps: tuple[int, ...]  # numbers of those that count, ascending
    steps_of_run: tuple[int, ...]  # the same of the run, as far as rows that are read belong to them
    ranks: Mapping[int, RankPart]
    outline: Run  # without its ranks

    @property
    def num_rows(self) -> int:
        """Return the number of rows that must be looked at."""
        return sum(extent.num_rows for part in self.ranks.values() for extent in part.extents)

    def read(self) -> Run:
        """Read all rows that overlap these steps, and all communications that these meet, as recorded."""
        names, problems = list(self.outline.names), list[str]()
        ranks: dict[int, RankTrace] = {}

        def rows() -> Iterator[tuple[int, Spans]]:
            for rank, part in self.ranks.items():
                trace = _read_rank(part, names, problems)
                ranks[rank] = replace(trace, spans=Spans.empty())
                yield rank, trace.spans

        blocks = [*blocks_of(rows())]  # one rank after the other: what was read of a rank goes once it is in a block
        new = tuple(sentence for sentence in dict.fromkeys(problems) if sentence not in self.outline.problems)
        return replace(self.outline, ranks=ranks, names=names, problems=new).with_blocks(blocks)


def cut_windows(survey: Survey, choice: StepChoice, most_rows: int = MOST_ROWS) -> Iterator[StepWindow]:
    """Cut the steps that count into windows of at most so many rows, but at least one step."""
    parts = _parts(choice.used, survey.rows_of_step, most_rows)
    cutter = _Cutter.of(survey, choice, parts)
    for number in range(len(parts)):
        yield cutter.window([number])


def window_of(survey: Survey, choice: StepChoice, steps: Sequence[int]) -> StepWindow:
    """Return one window of some of the steps that count; steps between them are not read."""
    parts = [(step,) for step in sorted(steps)]
    return _Cutter.of(survey, choice, parts).window(range(len(parts)))


def steps_read(recorded: Run, ranks: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """Return the steps that all of these ranks still have: files may have been deleted meanwhile."""
    spans = [recorded.ranks[rank].spans for rank in ranks]
    numbers = [set(spans_of_rank.step[spans_of_rank.kind == schema.STEP].tolist()) for spans_of_rank in spans]
    return tuple(step for step in steps if all(step in numbers_of_rank for numbers_of_rank in numbers))


def analyse_window(
    recorded: Run, alignment: Alignment, ranks: Sequence[int], steps: Sequence[int], steps_of_run: Sequence[int]
) -> Analysis:
    """Analyse some steps.

    ``recorded`` holds their rows and those that reach into them, ``steps_of_run`` are all steps that count.
    """
    aligned = apply(recorded, alignment)
    counted = of_ranks(aligned, ranks)
    all_matches = match(aligned, clocks_agree=alignment.refused is None)
    context = Context(counted, matches_of(all_matches, ranks), find_roles(counted), tuple(steps))
    rows: dict[int, Bool | slice] = {rank: contiguous(np.isin(counted.ranks[rank].spans.step, steps)) for rank in ranks}
    run, matches = select(aligned, all_matches, rows)
    choice = StepChoice(tuple(steps), {}, tuple(ranks))
    return analysis_of(Matched(recorded, run, alignment, choice, matches, rows, context), tuple(steps_of_run))


def _parts(steps: Sequence[int], rows_of_step: RowsOfSteps, most_rows: int) -> list[tuple[int, ...]]:
    """Return consecutive steps with at most so many rows, or one step."""
    parts: list[list[int]] = []
    rows = 0
    for step, count in zip(steps, rows_of_step.of_steps(np.array(steps, np.int64)).tolist(), strict=True):
        rows += count
        if not parts or rows > most_rows:
            parts.append([])
            rows = count
        parts[-1].append(step)
    return [tuple(part) for part in parts]


class _Bounds(NamedTuple):
    """A range of places or times for each part of the steps, inclusive; of an empty one the last is below the first."""

    first: Int64
    last: Int64

    @classmethod
    def of(cls, part: Int64, first: Int64, last: Int64, count: int) -> _Bounds:
        """Return the bounds of all ranges of each part."""
        bounds = cls.none(count)
        np.minimum.at(bounds.first, part, first)
        np.maximum.at(bounds.last, part, last)
        return bounds

    @classmethod
    def none(cls, count: int) -> _Bounds:
        limits = np.iinfo(np.int64)
        return cls(np.full(count, limits.max), np.full(count, limits.min))

    def around(self, other: _Bounds) -> _Bounds:
        return _Bounds(np.minimum(self.first, other.first), np.maximum(self.last, other.last))


class _RankPlaces(NamedTuple):
    """The steps of a rank, on its own clock."""

    axis: StepAxis
    around: _Bounds  # places from the first begin of the steps of a part on any rank to their last end
    far: Reach
    part_of_far: Int64  # the part with the step of each far row; −1 for none


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Parts of the steps that count; their places are found at once, as every look takes all steps."""

    survey: Survey
    used: Int64  # all steps that count
    parts: Sequence[tuple[int, ...]]
    ranks: Mapping[int, _RankPlaces]

    @classmethod
    def of(cls, survey: Survey, choice: StepChoice, parts: Sequence[tuple[int, ...]]) -> _Cutter:
        steps = np.array([step for part in parts for step in part], np.int64)
        part_of_step = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        aligned = survey.aligned.ranks
        clocks = {rank: trace.clock_key if survey.alignment.refused else None for rank, trace in aligned.items()}
        times = dict.fromkeys(clocks.values(), _Bounds.none(len(parts)))
        for rank, trace in aligned.items():
            axis = StepAxis.of(trace.spans)
            place, part = _of_parts(axis.number, steps, part_of_step)
            bounds = _Bounds.of(part, axis.start[place], axis.end[place], len(parts))
            times[clocks[rank]] = times[clocks[rank]].around(bounds)
        ranks = {}
        for rank, rank_survey in survey.ranks.items():
            axis = StepAxis.of(rank_survey.trace.spans)
            place, part = _of_parts(axis.number, steps, part_of_step)
            around = _Bounds.of(part, place, place, len(parts))
            around = around.around(_Bounds(*StepAxis.of(aligned[rank].spans).overlapping(*times[clocks[rank]])))
            if not len(axis.number):  # read whole
                around = _Bounds(*np.full((2, len(parts)), -1))
            part_of_place = np.full(len(axis.number) + 1, -1)
            part_of_place[place] = part
            reach = axis.reach(rank_survey.far)
            ranks[rank] = _RankPlaces(axis, around, reach, part_of_place[reach.place])  # −1 reads the last entry
        return cls(survey, np.array(choice.used, np.int64), parts, ranks)

    def window(self, numbers: Sequence[int]) -> StepWindow:
        """Return the window of some parts."""
        ranks = {rank: _part(rank_survey, self.ranks[rank], numbers) for rank, rank_survey in self.survey.ranks.items()}
        # Rows that are read carry the numbers of these steps, if any.
        near = np.unique(
            np.concatenate([rows.step for part in ranks.values() for rows in (part.trace.spans, part.far)])
        )
        steps_of_run = near[_occur(near, self.used)]
        steps = tuple(step for number in numbers for step in self.parts[number])
        return StepWindow(steps, tuple(steps_of_run.tolist()), ranks, replace(self.survey.outline, ranks={}))


def _of_parts(numbers: Int32, steps: Int64, part_of_step: Int64) -> tuple[Int64, Int64]:
    """Return the places of the steps with a part, and their parts; ``steps`` ascend."""
    places = np.flatnonzero(_occur(numbers, steps))
    return places, part_of_step[np.searchsorted(steps, numbers[places])]


def _occur(numbers: Int32, steps: Int64) -> Bool:
    """Return a mask of the numbers among these steps, which ascend."""
    if not len(steps):
        return np.zeros(len(numbers), np.bool_)
    return np.asarray(steps[np.minimum(np.searchsorted(steps, numbers), len(steps) - 1)] == numbers)


def _part(rank_survey: RankSurvey, places: _RankPlaces, numbers: Sequence[int]) -> RankPart:
    """Return the rows of a rank in some parts, and around them."""
    axis, far, reach = places.axis, rank_survey.far, places.far
    described = replace(rank_survey.trace, aggregates={}, anchors=(), device_states=())  # these grow with the run
    ranges = []
    for number in numbers:
        around = int(places.around.first[number]), int(places.around.last[number])
        if around[0] <= around[1]:
            # Two steps before and one after: an operation may be waited for in the next step, ranks may number one
            # communication with different steps, and the cause of a wait began in the step before. The hidden part
            # of a communication is known once all stalls until its end are.
            launched = communication_rows(far) & (places.part_of_far == number)
            first = min([around[0] - 2, *reach.first[launched].tolist()])
            last = max([around[1] + 1, *reach.last[launched].tolist()])
            ranges.append((first, last))
    if not ranges:
        return RankPart(
            replace(described, spans=Spans.empty()),
            rank_survey.segments[:1],
            (),
            rank_survey.repeated,
            places=(),
            far=Spans.empty(),
        )
    inside = _within(reach.place, ranges)
    touching = np.any([(reach.first <= last) & (reach.last >= first) for first, last in ranges], axis=0)
    begin, steps = _steps_between(
        rank_survey.trace.spans, axis, min(ranges)[0] - 1, max(last for _, last in ranges) + 2
    )
    holding = [rank_survey.extents.holding(*axis.numbers(*places), *axis.times(*places)) for places in ranges]
    extents = rank_survey.extents.take(np.unique(np.concatenate(holding)))
    first_segment = min((extent.segment for extent in extents), default=0)
    last_segment = max((extent.segment for extent in extents), default=0)
    return RankPart(
        trace=replace(described, spans=steps),
        segments=rank_survey.segments[first_segment : last_segment + 1],
        extents=tuple(extent._replace(segment=extent.segment - first_segment) for extent in extents),
        repeated=rank_survey.repeated,
        places=tuple((first - begin, last - begin) for first, last in ranges),
        far=far.take(touching & ~inside),
    )


def _steps_between(outline: Spans, axis: StepAxis, first: int, end: int) -> tuple[int, Spans]:
    """Return the steps at these places, and the place of the first one of them."""
    starts = axis.start[max(first, 0) : end]
    if not len(starts):
        return max(first, 0), Spans.empty()
    rows = slice(*np.searchsorted(outline.start, [starts[0], starts[-1] + 1]).tolist())
    between = outline.take(rows)
    return int(np.searchsorted(axis.start, starts[0])), between.take(np.flatnonzero(between.kind == schema.STEP))


def _within(places: Int64, ranges: Sequence[tuple[int, int]]) -> Bool:
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
        spans = part.repeated.renumber(decoded.block.spans)
        place = axis.reach(spans).place
        rows.append(spans.take(_within(place, part.places)))
        details.update(decoded.ranks[trace.rank].details)
    spans = Spans.concatenate(rows)
    if len(rows) > 1:  # each part is in order
        spans = spans.take(np.lexsort((spans.start - spans.end, spans.start)))
    return replace(trace, spans=spans, details=details)
