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
from commtrace.analysis.clocks.align import Alignment, ClockKey, apply
from commtrace.analysis.matched import Context, Matched, matches_of, of_ranks
from commtrace.analysis.matching.match import match
from commtrace.analysis.matching.operations import communication_rows
from commtrace.analysis.matching.roles import find_roles
from commtrace.analysis.steps.choice import StepChoice, contiguous, select
from commtrace.analysis.windows.step_axis import StepAxis
from commtrace.analysis.windows.survey import RankSurvey, Survey, with_last_attempts
from commtrace.trace import schema
from commtrace.trace.blocks import blocks_of
from commtrace.trace.files.decoding import RankMarks
from commtrace.trace.files.locate import Segment
from commtrace.trace.files.segment_index import Extent, read_extents
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64, Spans

MOST_ROWS: Final = 500_000
"""Rows of a window, over all ranks, unless a single step has more."""


class RankPart(NamedTuple):
    """The part of a rank in a window."""

    trace: RankTrace  # its rows are steps
    segments: tuple[Segment, ...]
    extents: tuple[Extent, ...]  # of the rows in the segments
    repeated: Mapping[int, int]  # by step number, end of the last attempt but one
    places: tuple[tuple[int, int], ...]  # ranges of the trace's steps whose rows are read, inclusive
    far: Spans  # rows of other steps that reach into these


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Steps that are analysed together, and all that a worker needs to read them."""

    steps: tuple[int, ...]  # numbers of those that count, ascending
    steps_of_run: tuple[int, ...]  # the same of the whole run
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
    times = _StepTimes.of(survey)
    for steps in _parts(choice.used, survey.rows_of_step, most_rows):
        yield _window(survey, choice, times, (steps,))


def window_of(survey: Survey, choice: StepChoice, steps: Sequence[int]) -> StepWindow:
    """Return one window of some of the steps that count; steps between them are not read."""
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
    """Return the steps that all of these ranks still have: files may have been deleted meanwhile."""
    spans = [recorded.ranks[rank].spans for rank in ranks]
    numbers = [set(own.step[own.kind == schema.STEP].tolist()) for own in spans]
    return tuple(step for step in steps if all(step in own for own in numbers))


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


def _parts(steps: Sequence[int], rows_of_step: Mapping[int, int], most_rows: int) -> list[tuple[int, ...]]:
    """Return consecutive steps with at most so many rows, or one step."""
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
    """The times of the steps of each rank."""

    axes: Mapping[int, StepAxis]
    clocks: Mapping[int, ClockKey | None]  # equal for ranks whose times can be compared

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
    """Return the part of a rank; ``groups`` pairs steps with the rank's places while any rank was in these."""
    axis, far = StepAxis.of(one.trace.spans), one.far
    reach = axis.reach(far)
    ranges = []
    for steps, meanwhile in groups:
        own = axis.places(np.array(steps))
        # A rank without recorded steps is read whole.
        around = [*own.tolist(), *meanwhile.tolist()] or ([] if len(axis.number) else [-1])
        if around:
            # Two steps before and one after: an operation may be waited for in the next step, ranks may number one
            # communication with different steps, and the cause of a wait began in the step before. The hidden part
            # of a communication is known once all stalls until its end are.
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
