"""Find the ranks that made others wait, and what they were doing meanwhile.

A wait is due to what the last rank to arrive did for longer than the waiting rank, since the communication before it
ended or the step before began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.intervals import paint
from commtrace.analysis.keys import grouped, pack, sort_groups
from commtrace.analysis.matched import Context
from commtrace.analysis.matching.operations import communication_rows, timed_rows
from commtrace.analysis.replay.scenarios import Replay, Scenario
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.costs import cost_of, occurrence
from commtrace.analysis.stragglers.slow_ranks import (
    WORK,
    SlowRanks,
    least_share_of_work,
    normal_speed,
    share_of_longer_steps,
)
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import CHECKPOINT, DATA, EVALUATION, GC, LOSSES, Cause, cause_or_loss
from commtrace.findings.finding import Occurrence
from commtrace.trace import schema
from commtrace.trace.blocks import Block, end_to_end
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.spans import Bool, Int8, Int32, Int64, Spans

COMPUTE, COMMUNICATION, MEMORY, USER, IDLE, NOTHING = (
    "compute", "communication", "memory", "user", "idle", "nothing",
)  # fmt: skip

_ACTIVITY_OF_KIND: Final[Mapping[int, str]] = {
    schema.USER: USER,
    schema.COLLECTIVE: COMMUNICATION,  # only as kernels: see _is_activity
    schema.P2P: COMMUNICATION,
    schema.MEMORY: MEMORY,
    schema.KERNEL: COMPUTE,
    schema.PHASE: COMPUTE,
    schema.FORWARD: COMPUTE,
    schema.BACKWARD: COMPUTE,
    schema.RECOMPUTE: COMPUTE,
    schema.OPTIMIZER: COMPUTE,
    schema.EVALUATION: EVALUATION,
    schema.DATA: DATA,
    schema.CHECKPOINT: CHECKPOINT,
    schema.STALL: COMMUNICATION,
    schema.GC: GC,
}
"""In ascending priority where spans overlap."""

_ACTIVITIES: Final = (*dict.fromkeys(_ACTIVITY_OF_KIND.values()), IDLE, NOTHING)
_IDLE, _NOTHING = _ACTIVITIES.index(IDLE), _ACTIVITIES.index(NOTHING)
_PRIORITY_OF_KIND: Final = np.full(len(schema.KINDS), -1)
_PRIORITY_OF_KIND[[*_ACTIVITY_OF_KIND]] = np.arange(len(_ACTIVITY_OF_KIND))
_ACTIVITY_OF_PRIORITY: Final = np.array([_ACTIVITIES.index(activity) for activity in _ACTIVITY_OF_KIND.values()])
_UNKNOWN: Final = -1
"""The activity of a rank whose clock cannot be compared with that of the waiting rank."""

_CAUSE_OF_ACTIVITY: Final = {COMPUTE: "imbalance", COMMUNICATION: "waiting", NOTHING: "unknown"}
"""What a rank that others wait for is to blame for, if that is called otherwise than its activity."""

_STANDS_OUT: Final = 1.5
"""Multiple of the share that each rank would have if all were waited for equally."""

_MOST_RANKS: Final = 3

_MOST_EXACT: Final = 500_000
"""Activities of ranks in steps, 17 bytes each, that are kept. Of more, only the longest steps are."""

_LONGEST_STEPS: Final = 1_024
"""Steps that are then kept of each activity of each rank."""

_WORTH_A_WORD: Final = 0.1

_WAITS_AT_ONCE: Final = 100_000
"""Of a step of 16,384 ranks there are eight million."""


@dataclass(frozen=True, slots=True)
class AwaitedActivity:
    """An activity of a rank in some steps while others waited for it; ``wait_ns`` is summed over them."""

    activity: str
    wait_ns: int
    when: Occurrence

    @property
    def cause(self) -> Cause:
        return cause_or_loss(_CAUSE_OF_ACTIVITY.get(self.activity, self.activity))


@dataclass(frozen=True, slots=True)
class AwaitedRank:
    """A rank that others waited for."""

    rank: int
    wait_ns: int  # summed over the waiting ranks and the steps that count
    share: float  # of all waiting
    stands_out: bool  # waited for clearly more than if all ranks were waited for equally
    activities: tuple[AwaitedActivity, ...]  # done for longer than the waiting ranks did, longest first; sum: wait_ns
    because: str = ""  # id of the finding that names it
    advice: str = ""  # of that finding

    def describe(self) -> str:
        """Return ``rank 0 (92 % of all waiting), which was evaluating (88 %, once, in step 9: 11 s, …)``."""
        texts = [
            f"{activity.cause.activity} ({activity.wait_ns / self.wait_ns:.0%}"
            + (f", {activity.when.describe()}, summed over ranks)" if activity.when.is_rare else ")")
            for activity in self.activities
            if activity.wait_ns >= _WORTH_A_WORD * self.wait_ns
        ]
        joined = " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
        which = f", which was {joined}" if texts else ""
        return f"rank {self.rank} ({self.share:.0%} of all waiting){which}"

    @property
    def next_step(self) -> str:
        if self.advice:
            return self.advice
        return self.activities[0].cause.advice if self.activities else LOSSES["unaligned_clock"].advice

    def to_json(self) -> JsonObject:
        return {
            "rank": self.rank,
            "text": self.describe(),
            "stands_out": self.stands_out,
            "next_step": self.next_step,
            "because": self.because,
            "wait_ns": self.wait_ns,
            "share": self.share,
            "activities": [
                {"activity": activity.activity, "wait_ns": activity.wait_ns, **fields_to_json(activity.when)}
                for activity in self.activities
            ],
        }


@dataclass(frozen=True, slots=True)
class _Dues:
    """Waits, summed by awaited rank, its activity (index into ``_ACTIVITIES``, or ``_UNKNOWN``) and step."""

    last_rank: Int32
    activity: Int8
    step: Int32
    ns: Int64

    @classmethod
    def joined(cls, parts: Sequence[_Dues]) -> _Dues:
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def take(self, rows: Int64) -> _Dues:
        return _Dues(*(getattr(self, field.name)[rows] for field in fields(self)))

    def sums(self) -> Counter[tuple[int, int]]:
        """Return the sum over the steps, by rank and activity."""
        first, which = grouped(pack((self.last_rank, self.activity)))
        ns = np.zeros(len(first), np.int64)
        np.add.at(ns, which, self.ns)
        keys = zip(self.last_rank[first].tolist(), self.activity[first].tolist(), strict=True)
        return Counter(dict(zip(keys, ns.tolist(), strict=True)))

    def longest_steps(self) -> tuple[_Dues, _Dues]:
        """Return the longest steps of each activity of each rank, and all others."""
        order = np.lexsort((self.step, -self.ns, self.activity, self.last_rank))
        activity, last_rank = self.activity[order], self.last_rank[order]
        begins = np.flatnonzero(np.append(True, (activity[1:] != activity[:-1]) | (last_rank[1:] != last_rank[:-1])))
        place_in_order = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
        return self.take(order[place_in_order < _LONGEST_STEPS]), self.take(order[place_in_order >= _LONGEST_STEPS])


@dataclass(frozen=True, slots=True)
class AwaitedTotals:
    """Waits in some steps. Totals of consecutive windows of a run add up to those of the run.

    Of a long run only the longest steps of each activity of each rank are kept, and the sum over its others.
    """

    parts: tuple[_Dues, ...]  # of consecutive steps, or in any order if there are others
    others_ns: Mapping[tuple[int, int], int]  # sum over the other steps, by rank and activity
    steps: tuple[Int64, ...]  # of each window
    ranks: frozenset[int]  # those that count

    def __add__(self, later: AwaitedTotals) -> AwaitedTotals:
        parts, steps, ranks = self.parts + later.parts, self.steps + later.steps, self.ranks | later.ranks
        others_ns = Counter(self.others_ns) + Counter(later.others_ns)
        if not others_ns and sum(len(part.ns) for part in parts) <= _MOST_EXACT:
            return AwaitedTotals(parts, others_ns, steps, ranks)
        kept, new = _Dues.joined(parts).longest_steps()
        return AwaitedTotals((kept,), others_ns + new.sums(), steps, ranks)

    def longest(self, *, names_ranks: bool = True) -> list[AwaitedRank]:
        """Return the ranks that others waited longest for, at most three.

        None of them stands out unless ``names_ranks``: of too few steps, who is waited for may be chance.
        """
        dues = _Dues.joined(self.parts)
        ranks, which = np.unique(dues.last_rank, return_inverse=True)
        waited = np.zeros(len(ranks), np.int64)
        np.add.at(waited, which, dues.ns)
        for (rank, _), ns in self.others_ns.items():
            waited[np.searchsorted(ranks, rank)] += ns
        total = int(waited.sum())
        steps = np.concatenate(self.steps).tolist()
        longest = [at for at in np.argsort(-waited, kind="stable").tolist() if int(ranks[at]) in self.ranks]
        longest = [
            self._awaited(int(ranks[at]), int(waited[at]), dues.take(np.flatnonzero(which == at)), steps, total)
            for at in longest[:_MOST_RANKS]
        ]
        return longest if names_ranks else [replace(awaited, stands_out=False) for awaited in longest]

    def _awaited(self, rank: int, wait_ns: int, dues: _Dues, steps: Sequence[int], total: int) -> AwaitedRank:
        by_step = np.zeros((len(_ACTIVITIES), len(steps)), np.int64)
        known = np.flatnonzero(dues.activity != _UNKNOWN)
        np.add.at(by_step, (dues.activity[known], np.searchsorted(steps, dues.step[known])), dues.ns[known])
        others_ns = np.array([self.others_ns.get((rank, activity), 0) for activity in range(len(_ACTIVITIES))])
        # Waits with an unknown activity are divided like the others.
        share_of_known = wait_ns / max(int(by_step.sum() + others_ns.sum()), 1)
        activities = []
        for activity, steps_ns, more in zip(
            _ACTIVITIES, by_step * share_of_known, others_ns * share_of_known, strict=True
        ):
            if steps_ns.any():
                when = occurrence(steps, steps_ns, float(more))
                activities.append(AwaitedActivity(activity, round(float(steps_ns.sum() + more)), when))
        share = wait_ns / total
        stands_out = share * len(self.ranks) >= _STANDS_OUT
        return AwaitedRank(
            rank, wait_ns, share, stands_out, tuple(sorted(activities, key=lambda awaited: -awaited.wait_ns))
        )


def awaited_totals(context: Context) -> AwaitedTotals:
    """Add up waits by awaited rank and activity. The context must hold two more steps before each that counts."""
    waits = _Waits.of(context)
    longer = _done_for_longer(waits, context)
    first, which = grouped(pack((waits.last_rank, waits.step)))
    total = np.zeros((len(_ACTIVITIES) + 1, len(first)), np.int64)  # the last one is of unknown activities
    for begin in range(0, len(which), _WAITS_AT_ONCE):
        rows = slice(begin, begin + _WAITS_AT_ONCE)
        due = _divided(waits.ns[rows], longer[rows])
        due[~waits.is_comparable[rows]] = 0
        for of_activity, ns in zip(total, due.T, strict=False):
            np.add.at(of_activity, which[rows], ns)
    unknown = ~waits.is_comparable
    np.add.at(total[_UNKNOWN], which[unknown], waits.ns[unknown])
    row, group = np.nonzero(total)
    activity = np.where(row == len(_ACTIVITIES), _UNKNOWN, row)
    last_rank, step = waits.last_rank[first[group]], waits.step[first[group]]
    order = np.lexsort((step, activity, last_rank))
    dues = _Dues(
        last_rank=last_rank[order],
        activity=activity[order].astype(np.int8),
        step=step[order],
        ns=total[row, group][order],
    )
    return AwaitedTotals((dues,), {}, (np.array(context.steps, np.int64),), frozenset(context.run.ranks))


@dataclass(frozen=True, slots=True)
class _Waits:
    """Waits of ranks for the last participant of a communication."""

    rank: Int32
    last_rank: Int32
    step: Int32
    # Until then no rank was late: the end of the previous communication of the group, or, if that began earlier, the
    # later begin of the step before on the two ranks.
    since: Int64
    start: Int64
    ns: Int64
    is_comparable: Bool  # both ranks count, and their clocks are aligned

    @classmethod
    def of(cls, context: Context) -> _Waits:
        blocks = [_BlockWaits.of(context, block) for block in context.run.blocks]
        waits = _BlockWaits(*map(np.concatenate, zip(*blocks, strict=True)))
        ranks = context.run.ranks
        clocks = {key: number for number, key in enumerate(dict.fromkeys(trace.clock_key for trace in ranks.values()))}
        clock = np.full(int(max(waits.last_rank.max(initial=0), *ranks)) + 1, -1)
        for rank, trace in ranks.items():
            clock[rank] = clocks[trace.clock_key]
        of_last = clock[waits.last_rank]
        is_comparable = (of_last >= 0) & ((of_last == clock[waits.rank]) | context.matches.clocks_agree)

        times = {rank: _StepTimes.of(trace.spans) for rank, trace in ranks.items()}
        begin, earliest = np.empty((2, len(waits.step)), np.int64)
        for rank, rows in _rows_of_ranks(waits.rank):
            begin[rows] = times[rank].begins(waits.step[rows])
            earliest[rows] = times[rank].begins_before(begin[rows])
        for rank, rows in _rows_of_ranks(np.where(is_comparable, waits.last_rank, -1)):
            if rank >= 0:
                earliest[rows] = np.maximum(earliest[rows], times[rank].begins_before(begin[rows]))
        since = np.where(waits.before_start >= earliest, waits.before_end, earliest)
        return cls(
            rank=waits.rank,
            last_rank=waits.last_rank,
            step=waits.step,
            since=np.minimum(since, waits.start),
            start=waits.start,
            ns=waits.ns,
            is_comparable=is_comparable,
        )


def _rows_of_ranks(rank: Int32) -> Iterator[tuple[int, Int64]]:
    """Yield each rank that occurs, and its rows."""
    order, begins = sort_groups(rank)
    for rows in np.split(order, begins)[1:]:
        yield int(rank[rows[0]]), rows


_NONE_BEFORE: Final = np.iinfo(np.int64).min


class _BlockWaits(NamedTuple):
    """Waits of the ranks of a block for others."""

    rank: Int32
    last_rank: Int32
    step: Int32
    start: Int64
    ns: Int64
    before_start: Int64  # of the communication of the group before this one, on the same rank
    before_end: Int64

    @classmethod
    def of(cls, context: Context, block: Block) -> _BlockWaits:
        spans, rank, matches = block.spans, block.rank(), context.matches.ranks
        ready, last_rank = (
            block.together({rank: getattr(matches[rank], column) for rank in block.ranks})
            for column in ("ready", "last_rank")
        )
        late = (last_rank >= 0) & (last_rank != rank) & (ready > spans.start) & np.isin(spans.step, context.steps)
        late &= timed_rows(spans)
        communication = np.flatnonzero(communication_rows(spans))
        # By group, then by start; of those of one time by what they are, as the order of their rows means nothing.
        keys = (spans.peer, spans.op_in_seq, spans.seq, spans.kind, -spans.end, spans.start, spans.group, rank)
        order = communication[np.lexsort([key[communication] for key in keys])]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = (spans.group[order[1:]] != spans.group[order[:-1]]) | (rank[order[1:]] != rank[order[:-1]])
        late_rows = np.flatnonzero(late[order])
        chosen, before = order[late_rows], order[late_rows - 1]
        return cls(
            rank[chosen],
            last_rank[chosen],
            spans.step[chosen],
            spans.start[chosen],
            ready[chosen] - spans.start[chosen],
            np.where(is_first[late_rows], _NONE_BEFORE, spans.start[before]),
            spans.end[before],
        )


class _StepTimes(NamedTuple):
    """The steps of a rank, by start."""

    number: Int32
    start: Int64
    until: Int64  # until each step and those before it have ended

    @classmethod
    def of(cls, spans: Spans) -> _StepTimes:
        rows = np.flatnonzero(spans.kind == schema.STEP)
        rows = rows[np.argsort(spans.start[rows], kind="stable")]
        return cls(spans.step[rows], spans.start[rows], np.maximum.accumulate(spans.end[rows]))

    def begins(self, numbers: Int32) -> Int64:
        """Return the starts of the steps with these numbers."""
        order = np.argsort(self.number, kind="stable")
        return np.asarray(self.start[order[np.searchsorted(self.number[order], numbers)]])

    def begins_before(self, times: Int64) -> Int64:
        """Return the start of the step before the first one that ends after each time; of the first step, its own."""
        following = np.searchsorted(self.until, times, side="right")
        return np.asarray(self.start[np.maximum(following - 1, 0)])


def _done_for_longer(waits: _Waits, context: Context) -> Int64:
    """Return for how much longer the last rank did each activity, ns, shape (waits, activities).

    At least 0; 0 where the ranks cannot be compared.
    """
    arrival = waits.start + waits.ns
    longer = np.zeros((len(waits.ns), len(_ACTIVITIES)), np.int64)
    known = np.flatnonzero(waits.is_comparable)
    sides = []
    for rank, until, sign in ((waits.last_rank, arrival, 1), (waits.rank, waits.start, -1)):
        rows = known[np.argsort(rank[known], kind="stable")]
        sides.append((rows, rank[rows], until, sign))
    for block in context.run.blocks:
        courses, ranks = _Courses.of(block), np.array(block.ranks, np.int32)  # no copy in another type
        is_traced = _has_kernels(block)
        for rows, rank, until, sign in sides:
            near = slice(np.searchsorted(rank, ranks[0]), np.searchsorted(rank, ranks[-1], side="right"))
            places = np.searchsorted(ranks, rank[near])
            is_near = ranks[places] == rank[near]
            own_rows = rows[near][is_near]
            lasted = courses.between(places[is_near], waits.since[own_rows], until[own_rows])
            idle = np.flatnonzero(is_traced[places[is_near]])
            lasted[idle, _IDLE], lasted[idle, _NOTHING] = lasted[idle, _NOTHING], 0
            longer[own_rows] += sign * lasted
    return np.maximum(longer, 0, out=longer)


def _has_kernels(block: Block) -> Bool:
    """Return, by place in the block, whether the rank's kernels were traced: it idles where none ran."""
    before = np.append(0, np.cumsum(block.spans.kind == schema.KERNEL))
    has: Bool = np.diff(before[block.bounds]) > 0
    return has


def _is_activity(spans: Spans) -> Bool:
    """Return which rows are an activity of their rank: communication is one only as a kernel, else its stalls are."""
    is_activity: Bool = (_PRIORITY_OF_KIND.take(spans.kind) >= 0) & (spans.end > spans.start)
    is_activity &= ~communication_rows(spans) | (spans.timing == schema.KERNEL_TIMING)
    return is_activity


def _divided(ns: Int64, longer: Int64) -> Int64:
    """Divide waits among activities in proportion to ``longer``, shape (waits, activities)."""
    longer[longer.sum(axis=1) == 0, _NOTHING] = 1
    share = longer / longer.sum(axis=1, keepdims=True)
    share *= ns[:, np.newaxis]
    due: Int64 = np.floor(share, out=share).astype(np.int64)
    due[np.arange(len(ns)), np.argmax(longer, axis=1)] += ns - due.sum(axis=1)
    return due


class _Courses(NamedTuple):
    """The activities of the ranks of a block, one after the other; they do nothing before their first and after their
    last. The ranks follow each other on one axis."""

    shift: Int64  # of each rank, from its clock to the axis
    begin: Int64  # of each rank on the axis
    end: Int64
    start: Int64  # of activities, on the axis
    activity: Int64
    total_ns: Int64  # of each activity before each start, shape (starts, activities)

    @classmethod
    def of(cls, block: Block) -> _Courses:
        spans = block.spans
        rows = np.flatnonzero(_is_activity(spans))
        bounds = np.searchsorted(rows, block.bounds)
        shift = end_to_end(spans.start[rows], spans.end[rows], bounds)
        own_shift = np.repeat(shift, np.diff(bounds))
        start, end = spans.start[rows] + own_shift, spans.end[rows] + own_shift
        begins, ends = np.zeros((2, len(shift)), np.int64)
        filled = np.diff(bounds) > 0
        if filled.any():
            begins[filled] = np.minimum.reduceat(start, bounds[:-1][filled])
            ends[filled] = np.maximum.reduceat(end, bounds[:-1][filled])
        priority = _PRIORITY_OF_KIND.take(spans.kind[rows])
        order = np.empty(len(rows), np.int64)
        order[np.argsort(priority, kind="stable")] = np.arange(len(rows))
        edges, winner = paint(start, end, order, np.zeros(1, np.int64))  # the axis begins at 0
        activity = np.append(np.append(_ACTIVITY_OF_PRIORITY.take(priority), _NOTHING)[winner], _NOTHING)
        total = np.zeros((len(edges), len(_ACTIVITIES)), np.int64)
        total[np.arange(1, len(edges)), activity[:-1]] = np.diff(edges)
        return cls(shift, begins, ends, edges, activity, np.cumsum(total, axis=0, out=total))

    def between(self, place: Int64, since: Int64, until: Int64) -> Int64:
        """Return how long the rank at each place of the block did each activity, ns, shape (times, activities)."""
        begun, begun_ns, idle_before = self._at(place, since)
        ended, ended_ns, idle_after = self._at(place, until)
        lasted = self.total_ns[ended]
        lasted -= self.total_ns[begun]
        times = np.arange(len(place))
        lasted[times, self.activity[ended]] += ended_ns
        lasted[times, self.activity[begun]] -= begun_ns
        lasted[:, _NOTHING] += idle_after - idle_before
        return lasted

    def _at(self, place: Int64, times: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the activity at each time, how long it has lasted, and how far the time is outside of the course."""
        on_axis = times + self.shift[place]
        within = np.clip(on_axis, self.begin[place], self.end[place])
        number = np.searchsorted(self.start, within, side="right") - 1
        return number, within - self.start[number], on_axis - within


_ALIKE: Final = 0.001
"""Work that is longer by at most this share counts as equal."""


def most_waited_for(slow: SlowRanks, blame: Mapping[int, int], num_steps: int, replay: Replay) -> str:
    """Say why the rank that others waited longest for is no straggler; empty if no rank waited.

    ``blame`` is, by rank, the time that others waited for it, ns summed over ``num_steps`` steps.
    """
    run = slow.work.run
    # Others also wait for ranks whose steps do not count.
    blame = {rank: ns for rank, ns in blame.items() if rank in run.ranks}
    total = sum(blame.values())
    if not total:
        return ""
    rank = max(blame, key=lambda rank_waited_for: (blame[rank_waited_for], -rank_waited_for))
    who = f"rank {rank} on {run.ranks[rank].metadata.node}"
    share = blame[rank] / total
    waiting = "all waiting" if len(run.ranks) == run.world_size else "all waiting among the ranks recorded"
    if share * len(run.ranks) < _STANDS_OUT:
        return f"No rank is waited for much more than others: for {who}, the most, {share:.1%} of {waiting}."
    return (
        f"Others waited longest for {who}: {share:.0%} of {waiting}, "
        f"{blame[rank] / num_steps / 1e6:.1f} ms per step summed over those who wait (mean). "
        f"{_why_not(slow, rank, replay)}"
    )


def _why_not(slow: SlowRanks, rank: int, replay: Replay) -> str:
    work, limits = slow.work, slow.work.thresholds
    work_of_peers = work.peers
    compared = (work_of_peers.rank == rank) & np.isfinite(work_of_peers.peer_ns) & np.isfinite(work_of_peers.own_ns)
    own_ns, peers_ns = (
        float((times * work_of_peers.per_step)[compared].sum())
        for times in (work_of_peers.own_ns, work_of_peers.peer_ns)
    )
    if not peers_ns:
        return "Whether it is slow is unknown: no other rank does the same work."
    longer, least = own_ns / peers_ns - 1, least_share_of_work(slow, rank)
    mean = _longer_in_the_mean(work, rank)
    both = f"{own_ns / 1e6:.1f} against {peers_ns / 1e6:.1f} ms per step, medians over {work.num_steps} steps"
    rare = _rarely_longer(work, rank, least)
    if rare and max(longer, mean) > least:
        return f"{rare} A straggler is slow in most steps."
    if longer <= least < mean:
        return (
            f"In most steps its own work takes as long as that of the ranks that do the same ({both}); in some it "
            f"takes longer, by {mean:.0%} on average over all steps. A straggler is slow in most steps."
        )
    if longer <= _ALIKE:
        return (
            f"It is no straggler: its own work takes no longer than that of the ranks that do the same ({both}). It "
            "comes last in few steps, by its place in the schedule, or by what it waits for itself."
        )
    compared_with = f"Its own work takes {longer:.2%} longer than that of the ranks that do the same ({both})"
    if not work.noise_is_known:
        return f"{compared_with}: of so few steps a hint, no verdict."
    if longer <= least:
        return f"{compared_with}: a straggler is named from {least:.2%} on."
    as_fast = Scenario(work=(normal_speed(slow, {rank: (WORK, DATA, GC)}),))
    cost = cost_of(work, replay.saved_ns(as_fast))
    return (
        f"{compared_with}, at least half of that in {share_of_longer_steps(work, rank):.0%} of the steps. At their "
        f"speed a step would be {cost.ns / 1e6:.1f} ms ({cost.share:.1%}) shorter (median), at least half of that in "
        f"{cost.persistence:.0%} of the steps. A straggler is named from {limits.cost_ms:g} ms and "
        f"{limits.share_of_step:.0%} on, in {limits.majority:.0%} of the steps, if it works longer in "
        f"{limits.persistence:.0%}."
    )


def _rarely_longer(work: WorkStatistics, rank: int, least: float) -> str:
    """Say in how many steps the work of a rank is longer than that of its peers, if its median over all is not."""
    beside = _work_beside_peers(work, rank)
    if beside is None:
        return ""
    own_ns, typical_ns = beside
    own_median, typical_median = float(np.median(own_ns)), float(np.median(typical_ns))
    if own_median > (1 + least) * typical_median:
        return ""
    excess_ns = own_ns - typical_ns
    longer = excess_ns > max(float(excess_ns.mean()) / 2, least * typical_median)
    if not longer.any() or excess_ns.mean() <= 0:
        return ""
    there, beside_it = float(np.median(own_ns[longer])), float(np.median(typical_ns[longer]))
    return (
        f"Its own work takes longer than that of the ranks that do the same in {longer.sum()} of {len(own_ns)} steps: "
        f"{there / 1e6:.1f} against {beside_it / 1e6:.1f} ms, medians over these steps; over all steps the medians are "
        f"{own_median / 1e6:.1f} and {typical_median / 1e6:.1f} ms."
    )


def _longer_in_the_mean(work: WorkStatistics, rank: int) -> float:
    beside = _work_beside_peers(work, rank)
    if beside is None:
        return 0.0
    own_ns, typical_ns = beside
    return float((own_ns - typical_ns).mean() / max(typical_ns.mean(), 1.0))


def _work_beside_peers(work: WorkStatistics, rank: int) -> tuple[Float64, Float64] | None:
    """Return the work of a rank in each step, ns, and the median of the others of its stage; None without others."""
    of_rank = work.ranks == rank
    of_others = ~of_rank & (work.stages == work.stage_of_rank[rank])
    if not of_others.any():
        return None
    return work.work_ns[of_rank][0], np.median(work.work_ns[of_others], axis=0)
