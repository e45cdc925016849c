"""Survey a run: read each rank forward in batches, and keep only what is small and the places of all other rows.

Memory grows with the number of steps, not with the rows in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.align import Alignment, ClockKey, align, apply
from commtrace.analysis.clocks.causality import MOST_MESSAGES
from commtrace.analysis.clocks.fit import MOST_ENDS, Thinned, least_power, multiples
from commtrace.analysis.matching.coverage import RowCounts
from commtrace.analysis.matching.operations import SYNCHRONISING, replayed_rows, unfinished_ids
from commtrace.analysis.matching.stages import Flow, FlowFinder, with_classes
from commtrace.analysis.steps.attempts import Repetitions
from commtrace.analysis.windows.step_axis import StepAxis
from commtrace.errors import RunNotFoundError
from commtrace.trace import schema
from commtrace.trace.files.decoding import RankMarks
from commtrace.trace.files.locate import Segment, missing_ranks, missing_segments
from commtrace.trace.files.reader import RunFiles
from commtrace.trace.files.segment_index import Extent, Extents, read_forward
from commtrace.trace.files.side_files import with_side_files
from commtrace.trace.inputs import printable
from commtrace.trace.run import DiscardedSegments, RankTrace, Run
from commtrace.trace.spans import Bool, Int64, Spans

_RECENT_STEPS: Final = 64
"""The steps before those that are read, among which most rows can be placed."""

_OUTLINE: Final = (schema.STEP, schema.EVALUATION, schema.CHECKPOINT)


class RowsOfSteps(NamedTuple):
    """How many rows steps have."""

    step: Int64  # numbers, ascending
    num_rows: Int64

    @classmethod
    def none(cls) -> RowsOfSteps:
        return cls.of(Spans.empty())

    @classmethod
    def of(cls, spans: Spans) -> RowsOfSteps:
        step, count = np.unique(spans.step, return_counts=True)
        return cls(step.astype(np.int64), count.astype(np.int64))

    @classmethod
    def sum(cls, parts: Sequence[RowsOfSteps]) -> RowsOfSteps:
        if not parts:
            return cls.none()
        step, which = np.unique(np.concatenate([part.step for part in parts]), return_inverse=True)
        count = np.zeros(len(step), np.int64)
        np.add.at(count, which.reshape(-1), np.concatenate([part.num_rows for part in parts]))
        return cls(step, count)

    def of_steps(self, steps: Int64) -> Int64:
        """Return the number of rows of each of these steps."""
        at = np.minimum(np.searchsorted(self.step, steps), len(self.step) - 1)
        return np.where(self.step[at] == steps, self.num_rows[at], 0)


@dataclass(frozen=True, slots=True)
class RankSurvey:
    """A first look at a rank."""

    segments: tuple[Segment, ...]  # oldest first
    extents: Extents  # of the rows of each step in the segments
    # Its rows are the *outline*: steps, evaluations, checkpoints, waits for input outside of steps, and the first row.
    trace: RankTrace
    far: Spans  # rows that touch a step more than one away from their own
    ends: Thinned  # rows that clocks are fitted by; none if all ranks share a clock
    messages: Thinned  # likewise
    rows_of_step: RowsOfSteps
    counts: RowCounts
    flow: Flow
    repeated: Repetitions
    names: list[str]  # by code
    problems: tuple[str, ...]

    def narrowed(self) -> RankSurvey:
        """Return the same with less memory: most of the outline are steps, which differ in three columns of twenty."""
        return replace(self, trace=replace(self.trace, spans=self.trace.spans.narrowed()))

    def for_windows(self) -> RankSurvey:
        """Return the survey without what only the survey of the run needs: the rows that clocks are fitted by."""
        return replace(self, ends=Thinned.none(), messages=Thinned.none(), rows_of_step=RowsOfSteps.none())


@dataclass(frozen=True, slots=True)
class Survey:
    """A first look at a run."""

    outline: Run  # every rank with the rows of its outline
    ranks: Mapping[int, RankSurvey]  # with the codes of the outline
    alignment: Alignment
    rows_of_step: RowsOfSteps  # of all ranks

    @property
    def aligned(self) -> Run:
        """Return the outline on the clock of the reference host."""
        moved = apply(self.outline, self.alignment)
        if moved is self.outline:
            return moved
        ranks = {rank: replace(trace, spans=trace.spans.narrowed()) for rank, trace in moved.ranks.items()}
        return replace(moved, ranks=ranks)


def survey_run(files: RunFiles, executor: Executor | None = None) -> Survey:
    """Survey every rank of a run.

    Raises:
        RunNotFoundError: no rank has rows that can be read, or a worker does not see the files.
        TraceFormatError: the files were written by an incompatible commtrace.
    """
    directory, segments, problems = files.directory, files.segments, [*files.problems]
    clocks = {
        rank: (segments_of_rank[0].metadata.node, segments_of_rank[0].metadata.boot_id)
        for rank, segments_of_rank in segments.items()
    }
    look, every = partial(survey_rank, clocks=clocks), executor.map if executor else map
    surveys = {
        rank_survey.trace.rank: rank_survey.narrowed()
        for rank_survey in every(look, [*segments.values()])
        if len(rank_survey.extents)
    }
    if not surveys:
        raise RunNotFoundError(f"{directory}: no readable spans. " + " ".join(problems))
    names: list[str] = []
    ranks = {rank: _recoded(surveys[rank], names).narrowed() for rank in sorted(surveys)}
    problems += [sentence for rank_survey in ranks.values() for sentence in rank_survey.problems]
    traces = {rank: rank_survey.trace for rank, rank_survey in ranks.items()}
    problems += missing_ranks(traces, directory)
    problems += [
        sentence
        for rank_survey in ranks.values()
        for sentence in missing_segments([*rank_survey.segments], rank_survey.trace)
    ]
    outline = Run(directory, traces, names, tuple(map(printable, problems)))
    outline = with_classes(outline, {rank: rank_survey.flow for rank, rank_survey in ranks.items()})
    ranks = {rank: replace(rank_survey, trace=outline.ranks[rank]) for rank, rank_survey in ranks.items()}
    return Survey(
        outline=outline,
        ranks={rank: rank_survey.for_windows() for rank, rank_survey in ranks.items()},
        alignment=align(_clock_run(outline, ranks) if len(set(clocks.values())) > 1 else outline),
        rows_of_step=RowsOfSteps.sum([rank_survey.rows_of_step for rank_survey in ranks.values()]),
    )


def survey_rank(segments: Sequence[Segment], clocks: Mapping[int, ClockKey]) -> RankSurvey:
    """Survey one rank. ``segments`` are oldest first, ``clocks`` are of all ranks."""
    rank, marks, problems = segments[0].metadata.rank, RankMarks.none(), list[str]()
    if segments[0].number != segments[0].first_number:
        marks.marks.discarded = _discarded(segments[-1:])  # what is left of a step is in segments before its mark
    collected = _Collected(rank, clocks)
    trace: RankTrace | None = None
    for extent, decoded in read_forward(segments, marks, problems):
        decoded.rename(collected.names)
        trace = decoded.ranks[rank]
        collected.add(extent, decoded.block.spans, trace)
        problems += [sentence for sentence in decoded.problems if sentence not in problems]
    if trace is None:
        trace = RankTrace(segments[0].metadata, Spans.empty())
    return collected.survey(tuple(segments), with_side_files(trace, segments[0].path.parent), problems)


def _discarded(segments: Sequence[Segment]) -> DiscardedSegments | None:
    marks = RankMarks.none()
    for _ in read_forward(segments, marks, []):
        pass
    return marks.marks.discarded


@dataclass(slots=True)
class _Collected:
    """Rows of a rank that were seen so far."""

    rank: int
    clocks: Mapping[int, ClockKey]
    names: list[str] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    recent: StepAxis = field(default_factory=StepAxis.none)  # the last steps: to look in all would take ever longer
    since_ns: int = int(np.iinfo(np.int64).min)  # begin of the first of these; before the first step if they are all
    highest_before: int = -1  # number of a step before these
    outline: list[Spans] = field(default_factory=list)
    first: Spans = field(default_factory=Spans.empty)
    far: list[Spans] = field(default_factory=list)
    # Rows that end after the last known step wait: a step is written when it has ended.
    waiting: Spans = field(default_factory=Spans.empty)
    unplaced: list[Spans] = field(default_factory=list)  # rows that recent steps do not place: few
    ends: Thinned = field(default_factory=Thinned.none)
    messages: Thinned = field(default_factory=Thinned.none)
    rows_of_step: list[RowsOfSteps] = field(default_factory=list)
    counts: RowCounts = field(default_factory=lambda: RowCounts({}, 0))
    flow: FlowFinder = field(default_factory=FlowFinder)
    details: dict[int, str] = field(default_factory=dict)
    last_written_ns: int | None = None

    def add(self, extent: Extent, spans: Spans, trace: RankTrace) -> None:
        if trace.last_written_ns is not None:
            self.last_written_ns = max(trace.last_written_ns, self.last_written_ns or trace.last_written_ns)
        self.extents.append(extent)
        if not len(spans):
            return
        if not len(self.first) or spans.start[0] < self.first.start[0]:
            self.first = spans.take(slice(0, 1))
        outline = spans.take(np.isin(spans.kind, _OUTLINE))
        self.recent = self.recent.plus(StepAxis.of(outline.take(outline.start >= self.since_ns)))
        _append(self.outline, outline)
        self.rows_of_step.append(RowsOfSteps.of(spans))
        self.counts += RowCounts.of(spans)
        self.flow.add(spans, self.names)
        self._keep_for_clocks(spans, trace)
        self.details.update(trace.details)
        self._place(Spans.concatenate([self.waiting, spans]))

    def survey(self, segments: tuple[Segment, ...], trace: RankTrace, problems: Sequence[str]) -> RankSurvey:
        self._keep(Spans.concatenate([*self.unplaced, self.waiting]), StepAxis.of(Spans.concatenate(self.outline)))
        far = _in_order(Spans.concatenate(self.far))
        outline = [*self.outline] if len(self.first) and self.first.kind[0] in _OUTLINE else [self.first, *self.outline]
        spans = _in_order(Spans.concatenate(outline))
        kept = {*far.id.tolist(), *self.ends.spans.id.tolist(), *self.messages.spans.id.tolist()}
        repeated = Repetitions.of(spans)
        return RankSurvey(
            segments=segments,
            extents=Extents.of(self.extents),
            trace=replace(
                trace,
                spans=repeated.renumber(spans),
                last_written_ns=self.last_written_ns,
                details={number: text for number, text in self.details.items() if number in kept},
            ),
            far=repeated.renumber(far),
            ends=replace(self.ends, spans=repeated.renumber(self.ends.spans)),
            messages=replace(self.messages, spans=repeated.renumber(self.messages.spans)),
            rows_of_step=RowsOfSteps.sum(self.rows_of_step),
            counts=self.counts,
            flow=self.flow.found,
            repeated=repeated,
            names=self.names,
            problems=tuple(problems),
        )

    def _place(self, spans: Spans) -> None:
        """Place rows among the recent steps; put off those that these cannot place, or not yet."""
        known = np.zeros(len(spans), np.bool_)
        if len(self.recent.start):
            known = np.asarray(spans.end <= self.recent.start[-1])
        self.waiting = spans.take(~known)
        spans = spans.take(known)
        reach = self.recent.reach(spans)
        is_only_recent = (reach.place <= reach.first) | (spans.step > self.highest_before)
        by_number = np.isin(spans.step, self.recent.number) & is_only_recent
        placed = (spans.start >= self.since_ns) & ((spans.step < 0) | by_number)
        _append(self.unplaced, spans.take(~placed))
        self._keep(spans.take(placed), self.recent)
        if len(self.recent.start) > _RECENT_STEPS:
            before, self.recent = self.recent.split(-_RECENT_STEPS)
            self.highest_before = max(self.highest_before, int(before.number.max()))
            self.since_ns = int(self.recent.start[0])

    def _keep(self, spans: Spans, axis: StepAxis) -> None:
        """Keep rows that reach far, or wait for input between steps."""
        reach = axis.reach(spans)
        is_no_step = spans.kind != schema.STEP
        _append(self.far, spans.take(is_no_step & ((reach.last - reach.place > 1) | (reach.place - reach.first > 1))))
        _append(self.outline, spans.take((spans.kind == schema.DATA) & ~_within_a_step(axis, spans)))

    def _keep_for_clocks(self, spans: Spans, trace: RankTrace) -> None:
        if len(set(self.clocks.values())) < 2:
            return
        known = (spans.group >= 0) & ~replayed_rows(spans)
        synchronising = np.isin(spans.name, [self._code(name) for name in SYNCHRONISING])
        self.ends = self.ends.plus(
            spans.take(
                known
                & (spans.seq >= 0)
                & (spans.kind == schema.COLLECTIVE)
                & synchronising
                & (spans.self_bytes < 0)
                & ~np.isin(spans.id, unfinished_ids(trace))
            ),
            MOST_ENDS,
        )
        clock_of_rank = self.clocks[self.rank]
        elsewhere = np.array([rank for rank, clock in self.clocks.items() if clock != clock_of_rank])
        self.messages = self.messages.plus(
            spans.take(known & (spans.kind == schema.P2P) & np.isin(spans.peer, elsewhere)), MOST_MESSAGES
        )

    def _code(self, name: str) -> int:
        return self.names.index(name) if name in self.names else -2


def _append(parts: list[Spans], spans: Spans) -> None:
    if len(spans):
        parts.append(spans)


def _in_order(spans: Spans) -> Spans:
    return spans.take(np.lexsort((spans.start - spans.end, spans.start)))


def _within_a_step(axis: StepAxis, spans: Spans) -> Bool:
    if not len(axis.number):
        return np.zeros(len(spans), np.bool_)
    at = np.searchsorted(axis.start, spans.start, side="right") - 1
    return (at >= 0) & (spans.end <= axis.end[np.maximum(at, 0)])


def _recoded(rank_survey: RankSurvey, names: list[str]) -> RankSurvey:
    """Return the survey with codes that index ``names``, to which new names are added."""
    position = {name: code for code, name in enumerate(names)}
    for name in rank_survey.names:
        if name not in position:
            position[name] = len(names)
            names.append(name)
    code = np.array([*(position[name] for name in rank_survey.names), schema.NOT_APPLICABLE], np.int32)

    def recoded(spans: Spans) -> Spans:
        return spans.replace(name=code[spans.name], dtype=code[spans.dtype])  # −1 reads the last entry

    return replace(
        rank_survey,
        trace=replace(rank_survey.trace, spans=recoded(rank_survey.trace.spans)),
        far=recoded(rank_survey.far),
        ends=replace(rank_survey.ends, spans=recoded(rank_survey.ends.spans)),
        messages=replace(rank_survey.messages, spans=recoded(rank_survey.messages.spans)),
        names=names,
    )


def _clock_run(outline: Run, ranks: Mapping[int, RankSurvey]) -> Run:
    """Return the run with the rows that clocks are fitted by, and the first row of each rank."""
    ends = _together([rank_survey.ends for rank_survey in ranks.values()], MOST_ENDS)
    messages = _together([rank_survey.messages for rank_survey in ranks.values()], MOST_MESSAGES)
    traces = {
        rank: replace(trace, spans=Spans.concatenate([trace.spans.take(slice(0, 1)), *further_rows]))
        for (rank, trace), *further_rows in zip(outline.ranks.items(), ends, messages, strict=True)
    }
    return replace(outline, ranks=traces)


def _together(parts: Sequence[Thinned], fewer_than: int) -> list[Spans]:
    """Return the rows of each part, thinned so that all together are fewer than the limit."""
    power = max(part.power for part in parts)
    seq = np.concatenate([part.spans.seq for part in parts])
    power = least_power(seq, fewer_than, power)
    return [part.spans.take(multiples(part.spans.seq, power)) for part in parts]
