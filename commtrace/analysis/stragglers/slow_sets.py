"""Group the slow ranks of a run by what they share, with the cost of each group and the share of each rank.

The cost is the time that a replay saves if all of the group works normally: of two equally slow ranks, each alone
costs nothing. A member without which the group costs as much is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from commtrace.analysis.replay.scenarios import MEASURED, Replay, Scenario
from commtrace.analysis.stragglers.costs import TotalCost, cost_of, finding_of, makes_steps_long, mean_ns, total_cost
from commtrace.analysis.stragglers.evidence import (
    THROTTLED,
    DeviceEvidence,
    are_throttled,
    device_evidence,
    evidence_of,
    main_cause,
    slow_phase,
)
from commtrace.analysis.stragglers.late_hosts import LATE, launches_of, least
from commtrace.analysis.stragglers.mended import MendedFinding, costliest_first
from commtrace.analysis.stragglers.microbatches import SEQUENCES, format_replicas, replica_of_ranks
from commtrace.analysis.stragglers.places import format_place, group_by_place, places_of
from commtrace.analysis.stragglers.slow_ranks import SELDOM, SlowRank, SlowRanks, between_saved_ns, normal_speed
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import CAUSES, MEANT, NOW_AND_THEN, RANKS, advice
from commtrace.findings.finding import Finding, Member
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

MOST_SHARES: Final = 16
"""Most slow ranks of which shares are computed: each share takes a replay or two."""


class _SetKey(NamedTuple):
    """The key of one finding, in any steps; see :class:`.places.PlacedRanks`."""

    place: str
    what: str
    is_rare: bool  # what strikes now and then is told apart from what lasts, also on the same ranks
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _SetStretch:
    """The members of one finding in one stretch."""

    stretch: int
    members: tuple[SlowRank, ...]


class SlowSets(NamedTuple):
    """Findings on ranks, costliest first."""

    mended: list[MendedFinding]
    together_ns: float  # saved per step without all of them: a median if they are slow all the time, else a mean
    normal: Scenario  # all of them work normally

    @property
    def findings(self) -> list[Finding]:
        return [each.finding for each in self.mended]


_RankAspect = tuple[int, str]
_Names = tuple[tuple[_RankAspect, ...], ...]


def _rank_aspect(one: SlowRank) -> _RankAspect:
    return one.rank, one.beyond


def judge_sets(
    whole: WorkStatistics, replay: Replay, stretches: Sequence[SlowRanks], others: Scenario = MEASURED
) -> SlowSets:
    """Compute the cost of the slow ranks of all stretches, and name them, on top of the scenario ``others``."""
    costs = _Costs(replay, stretches, others)
    costs.replay(_each([one.slow for one in stretches]))
    slow = _without_idle_members(costs, [one.slow for one in stretches])
    parts = _parts(whole.run, slow)
    costs.replay([slow, *_each(slow), *(_less(slow, own) for own in parts.values())])
    all_of_them = costs.saved_ns(slow)
    mended: list[MendedFinding] = []
    named: set[_RankAspect] = set()
    for key, own in parts.items():
        saved = all_of_them if len(parts) == 1 else all_of_them - costs.saved_ns(_less(slow, own))
        cost = total_cost(
            whole,
            [one.work for one in stretches],
            [part.stretch for part in own],
            saved,
            rare=all(member.is_rare for part in own for member in part.members),
            meant=key.what in MEANT,
        )
        if cost is not None:
            part = next(part for part in own if part.stretch == cost.costliest)
            members = tuple(sorted(part.members, key=lambda member: -member.total_ns))
            shares = _shares(costs, part.stretch, members, slow)
            finding = _finding(stretches, key, part.stretch, members, cost, shares)
            mended.append(MendedFinding(finding, costs.normal(_members_of(slow, own))))
            named.update(_rank_aspect(member) for part in own for member in part.members)
    left = [tuple(one for one in own if _rank_aspect(one) in named) for own in slow]
    seldom = len(stretches) > 1 or any(one.is_rare for one in left[0])
    together = cost_of(whole, costs.saved_ns(left), rare=seldom).ns if named else 0.0
    return SlowSets(costliest_first(mended), together, costs.normal(left))


def _names(slow: Sequence[Sequence[SlowRank]]) -> _Names:
    """Return the slow ranks of each stretch, with what each stands out in."""
    return tuple(tuple(sorted(map(_rank_aspect, own))) for own in slow)


class _Costs:
    """Time that steps would save if some ranks of some stretches worked normally; replays are cached."""

    def __init__(self, replay: Replay, stretches: Sequence[SlowRanks], others: Scenario) -> None:
        self.stretches = stretches
        self._replay = replay
        self._others = others
        self._known: dict[_Names, Int64] = {}

    def replay(self, sets: Iterable[Sequence[Sequence[SlowRank]]]) -> None:
        """Replay the steps without each of these sets at once, for later calls."""
        new = {key: slow for slow in sets if (key := _names(slow)) not in self._known}
        if new:
            scenarios = [self._others, *(self.normal(slow) + self._others for slow in new.values())]
            actual, *mended = self._replay.steps_ns(scenarios)
            between = [self._between_ns(slow) for slow in new.values()]
            saved = [actual - one + more for one, more in zip(mended, between, strict=True)]
            self._known.update(zip(new, saved, strict=True))

    def saved_ns(self, slow: Sequence[Sequence[SlowRank]]) -> Int64:
        self.replay([slow])
        return self._known[_names(slow)]

    def mean_saved_ns(self, stretch: int, slow: Sequence[Sequence[SlowRank]], which: frozenset[_RankAspect]) -> float:
        return mean_ns(self.stretches[stretch].work.steady, self.saved_ns(_only(slow, which)))

    def normal(self, slow: Sequence[Sequence[SlowRank]]) -> Scenario:
        rules = [normal_speed(found, causes) for found, causes in self._causes(slow)]
        return Scenario(work=tuple(rules))

    def _between_ns(self, slow: Sequence[Sequence[SlowRank]]) -> Int64:
        """Return what is saved between the steps, where nothing is replayed."""
        saved = np.zeros(len(self.stretches[0].work.steady))
        for found, causes in self._causes(slow):
            saved += between_saved_ns(found, causes)
        return np.rint(saved).astype(np.int64)

    def _causes(self, slow: Sequence[Sequence[SlowRank]]) -> Iterator[tuple[SlowRanks, dict[int, list[str]]]]:
        """Yield the stretches with slow ranks, and what each stands out in."""
        for found, own in zip(self.stretches, slow, strict=True):
            causes: dict[int, list[str]] = {}
            for one in own:
                causes.setdefault(one.rank, []).append(one.beyond)
            if causes:
                yield found, causes


def _only(slow: Sequence[Sequence[SlowRank]], which: Collection[_RankAspect]) -> list[tuple[SlowRank, ...]]:
    return [tuple(one for one in own if _rank_aspect(one) in which) for own in slow]


def _less(slow: Sequence[Sequence[SlowRank]], parts: Sequence[_SetStretch]) -> list[tuple[SlowRank, ...]]:
    gone = {(part.stretch, _rank_aspect(member)) for part in parts for member in part.members}
    return [tuple(one for one in own if (number, _rank_aspect(one)) not in gone) for number, own in enumerate(slow)]


def _members_of(slow: Sequence[Sequence[SlowRank]], parts: Sequence[_SetStretch]) -> list[tuple[SlowRank, ...]]:
    """Return the slow ranks of each stretch that are members of one finding."""
    members = {part.stretch: part.members for part in parts}
    return [members.get(stretch, ()) for stretch in range(len(slow))]


def _each(slow: Sequence[tuple[SlowRank, ...]]) -> Iterator[Sequence[tuple[SlowRank, ...]]]:
    """Yield all slow ranks, all but each, and each alone, unless these are too many to try."""
    yield slow
    everybody = {_rank_aspect(one) for own in slow for one in own}
    if len(everybody) <= MOST_SHARES:
        for one in sorted(everybody):
            yield _only(slow, everybody - {one})
            yield _only(slow, {one})


def _without_idle_members(costs: _Costs, slow: Sequence[tuple[SlowRank, ...]]) -> list[tuple[SlowRank, ...]]:
    """Drop the ranks without which a set costs as much, smallest excess first."""
    left = list(slow)
    excess: dict[_RankAspect, float] = {}
    for one in (one for own in slow for one in own):
        excess[_rank_aspect(one)] = excess.get(_rank_aspect(one), 0.0) + one.total_ns
    if len(excess) > MOST_SHARES:
        return left
    for smallest in sorted(excess, key=lambda one: excess[one]):
        without = [tuple(one for one in own if _rank_aspect(one) != smallest) for own in left]
        lost = costs.saved_ns(left) - costs.saved_ns(without)
        for number, own in enumerate(left):
            work = costs.stretches[number].work
            limits = work.thresholds
            least_ns = max(limits.cost_ms * 1e6, limits.share_of_step * work.step_ns) / max(len(own), 1)
            is_rare = all(one.is_rare for one in own if _rank_aspect(one) == smallest)
            if is_rare and makes_steps_long(work, cost_of(work, lost, rare=True)):
                continue
            if float(lost[work.steady].mean()) < least_ns:
                left[number] = without[number]
    return left


def _parts(run: Run, slow: Sequence[Sequence[SlowRank]]) -> dict[_SetKey, list[_SetStretch]]:
    """Return the parts of each finding: ranks that share a host, a group or a cause, slow in the same stretches."""
    when: dict[tuple[int, str, bool], list[int]] = {}
    for number, own in enumerate(slow):
        for one in own:
            when.setdefault((one.rank, one.cause, one.is_rare), []).append(number)
    parts: dict[_SetKey, list[_SetStretch]] = {}
    places = places_of(run)
    for number, own in enumerate(slow):
        for sharing in group_by_place(places, own):
            together: dict[tuple[int, ...], list[SlowRank]] = {}
            for one in sharing.members:
                stretches = tuple(when[one.rank, one.cause, one.is_rare]) if sharing.place == RANKS else ()
                together.setdefault(stretches, []).append(one)
            for members in together.values():
                ranks = tuple(sorted(one.rank for one in members))
                key = _SetKey(sharing.place, sharing.what, members[0].is_rare, ranks)
                parts.setdefault(key, []).append(_SetStretch(number, tuple(members)))
    return parts


class _Share(NamedTuple):
    """The cost of one member, as in a finding; None if there are too many to try."""

    beside_others_ns: float | None = None
    alone_ns: float | None = None


def _shares(
    costs: _Costs, stretch: int, members: Iterable[SlowRank], slow: Sequence[Sequence[SlowRank]]
) -> list[_Share]:
    everybody = frozenset(_rank_aspect(one) for own in slow for one in own)
    if len(everybody) > MOST_SHARES:
        return [_Share() for _ in members]
    all_ns = costs.mean_saved_ns(stretch, slow, everybody)
    shares = []
    for one in members:
        own = frozenset([_rank_aspect(one)])
        shares.append(
            _Share(
                all_ns - costs.mean_saved_ns(stretch, slow, everybody - own), costs.mean_saved_ns(stretch, slow, own)
            )
        )
    return shares


def _finding(
    stretches: Sequence[SlowRanks],
    key: _SetKey,
    stretch: int,
    members: Sequence[SlowRank],
    cost: TotalCost,
    shares: Sequence[_Share],
) -> Finding:
    found, first = stretches[stretch], members[0]
    run = found.work.run
    is_rare = all(member.is_rare for member in members)
    time_of_day = None if len(stretches) == 1 else _time_of(found.work)
    devices = [] if is_rare else [device_evidence(run, member.rank, time_of_day) for member in members]
    cause = _cause(found.work, members, devices)
    slow = {one.rank for one in found.slow}
    compared = (cause in ("compute", LATE) or CAUSES[cause].phase) and not is_rare
    launches = least(launches_of(found.work, member.rank, slow) for member in members) if compared else None
    persistence = cost.cost.persistence if is_rare or len(members) > 1 else first.persistence
    found_there = finding_of(
        key.place,
        cause,
        _who(run, key),
        cost,
        members=tuple(
            Member(
                one.rank,
                run.ranks[one.rank].metadata.node,
                one.total_ns,
                share.beside_others_ns,
                share.alone_ns,
            )
            for one, share in zip(members, shares, strict=True)
        ),
        norm=first.norm_source,
        evidence=evidence_of(
            found,
            key.place,
            cause,
            members,
            _how_often(found.work, persistence, cost),
            devices[0] if devices else None,
            launches,
        ),
        advice=NOW_AND_THEN if first.beyond == SELDOM else advice(cause, len(members), key.place),
    )
    if cost.is_of_some_steps:
        found_there = replace(found_there, occurrence=cost.when)
    return replace(found_there, persistence=persistence, sigmas=None if is_rare else found_there.sigmas)


def _cause(work: WorkStatistics, members: Sequence[SlowRank], devices: Sequence[DeviceEvidence | None]) -> str:
    cause = main_cause(members)
    if cause != "compute" or not devices:  # without devices: what strikes now and then
        return cause
    if are_throttled(devices):
        return THROTTLED
    return slow_phase(work, {member.rank for member in members}) or cause


def _time_of(work: WorkStatistics) -> tuple[int, int] | None:
    begins, ends = [], []
    for trace in work.run.ranks.values():
        step = trace.spans.step
        own = (trace.spans.kind == schema.STEP) & (step >= work.steps[0]) & (step <= work.steps[-1])
        begins.extend(trace.spans.start[own].tolist())
        ends.extend(trace.spans.end[own].tolist())
    return (min(begins), max(ends)) if begins else None


def _who(run: Run, key: _SetKey) -> str:
    if key.what == SEQUENCES:
        return format_replicas(replica_of_ranks(run), key.ranks)
    return format_place(places_of(run), key.place, key.ranks)


def _how_often(work: WorkStatistics, persistence: float, cost: TotalCost) -> str:
    """Return ``in all 9 steps``, ``in 5 of 9 steps``."""
    if cost.is_of_some_steps:
        return f"in {len(cost.when.steps)} of {cost.when.num_steps} steps"
    first, last = int(work.steps[0]), int(work.steps[-1])
    often = round(persistence * work.num_steps)
    steps = f"in {'all' if often == work.num_steps else f'{often} of'} {work.num_steps} steps"
    whole = not cost.stretches or any((one.first, one.last) == (first, last) for one in cost.stretches)
    return steps if whole else f"{steps} from {first} to {last}"
