"""What the slow ranks of a run have in common, what they cost together, and the share of each.

The cost of a set is what the replay saves when all of it works as is normal: of two ranks that are equally slow side by
side, each alone costs nothing. A member without which the set costs as much is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.replay.segments import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from commtrace.analysis.stragglers.common_place import (
    by_common_place,
    compared_with,
    places_of,
    several_need_longer,
    several_pause_longer,
    who_in_words,
)
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.device_evidence import DeviceEvidence, device_evidence
from commtrace.analysis.stragglers.limits import MOST_OF_PHASE, ONE_PHASE
from commtrace.analysis.stragglers.long_microbatches import (
    SEQUENCES,
    evidence_of_longer_input,
    replica_of_ranks,
    replicas_in_words,
)
from commtrace.analysis.stragglers.normal import Float64
from commtrace.analysis.stragglers.prices import Price, mean_ms, price_of
from commtrace.analysis.stragglers.slow_ranks import (
    MEANT,
    MICROBATCHES,
    RARE,
    SELDOM,
    SlowRank,
    SlowRanks,
    at_normal_speed,
    mean_per_step,
    rare_ns,
)
from commtrace.analysis.stragglers.verdict import (
    NOW_AND_THEN,
    ONLY_PHASE,
    PHASES,
    RANKS,
    Member,
    Verdict,
    cause_in_words,
    next_step,
)
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

MOST_SHARES: Final = 16
"""Each share is a replay or two: of sets with more ranks only what they cost together is told."""

THROTTLED: Final = "throttled_device"

_PHASES: Final = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}
_DIFFERS: Final = 0.01
"""From this share on a phase is told as longer than that of the peers."""


class _Key(NamedTuple):
    """What is one verdict, in whichever steps.

    Attributes:
        place: one of PLACES.
        what: the cause that ranks have in common; of a host or a group, what they stand out in.
        ranks: which.
    """

    place: str
    what: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """The members of one verdict in one stretch."""

    stretch: int
    members: tuple[SlowRank, ...]


class SlowSets(NamedTuple):
    """Verdicts on ranks.

    Attributes:
        verdicts: dearest first.
        together_ms: what a step would save without all of these ranks: the median where they are slow all the time,
            else the mean.
        mended_ns: durations of all segments without them.
    """

    verdicts: list[Verdict]
    together_ms: float
    mended_ns: Int64


class Others(NamedTuple):
    """What else is mended where ranks are priced.

    Attributes:
        ratio: of each segment, what it lasts then, as a share of what it lasts; None for all of it.
        transfer_ns: durations of all transfers; None for the measured ones.
    """

    ratio: Float64 | None = None
    transfer_ns: Int64 | None = None


def judge_sets(whole: Bench, stretches: Sequence[SlowRanks], others: Others | None = None) -> SlowSets:
    """Price the slow ranks of all stretches, and name them.

    Args:
        whole: all steps that count.
        stretches: who was slow in each.
        others: what else is named, and mended as well.
    """
    replay = _Replay(whole, stretches, others or Others())
    slow = _without_idle_members(replay, [one.slow for one in stretches])
    parts = _parts(whole.run, slow)
    all_of_them = replay.saved_ns(slow)
    verdicts: list[Verdict] = []
    named: set[_WhoAndWhat] = set()
    for key, own in parts.items():
        saved = all_of_them if len(parts) == 1 else all_of_them - replay.saved_ns(_less(slow, own))
        verdict = _verdict(replay, key, own, saved, slow)
        if verdict is not None:
            verdicts.append(verdict)
            named.update(_who_and_what(member) for part in own for member in part.members)
    ordered = sorted(verdicts, key=lambda verdict: -verdict.cost_ms_per_step)
    left = [tuple(one for one in own if _who_and_what(one) in named) for own in slow]
    seldom = len(stretches) > 1 or any(one.is_rare for one in left[0])
    together = whole.cost_of(replay.saved_ns(left), rare=seldom).ms if named else 0.0
    return SlowSets(ordered, together, replay.mended_ns(left))


_WhoAndWhat = tuple[int, str]


def _who_and_what(one: SlowRank) -> _WhoAndWhat:
    return one.rank, one.beyond


class _Replay:
    """The whole run with some ranks of some stretches mended; what was replayed once is remembered."""

    def __init__(self, whole: Bench, stretches: Sequence[SlowRanks], others: Others) -> None:
        self.whole = whole
        self.stretches = stretches
        self._others = others
        self._actual_ns = self._step_times(whole.program.segments.total_ns)
        self._known: dict[tuple[tuple[_WhoAndWhat, ...], ...], Int64] = {}

    def saved_ns(self, slow: Sequence[Sequence[SlowRank]]) -> Int64:
        """What each step would save if these ranks of each stretch were mended."""
        key = tuple(tuple(sorted(map(_who_and_what, own))) for own in slow)
        if key not in self._known:
            self._known[key] = self._actual_ns - self._step_times(self.mended_ns(slow))
        return self._known[key]

    def _step_times(self, durations: Int64) -> Int64:
        """Replayed steps with these durations of segments, everything else that is named mended."""
        ratio, transfer_ns = self._others
        if ratio is not None:
            durations = np.asarray(np.rint(durations * ratio), np.int64)
        return self.whole.program.step_times(durations, transfer_ns)

    def mended_ns(self, slow: Sequence[Sequence[SlowRank]]) -> Int64:
        """Durations of all segments with these ranks of each stretch mended."""
        durations = self.whole.program.segments.total_ns
        for found, own in zip(self.stretches, slow, strict=True):
            if own:
                causes: dict[int, list[str]] = {}
                for one in own:
                    causes.setdefault(one.rank, []).append(one.beyond)
                mended = at_normal_speed(found, causes)
                durations = np.where(found.bench.counted, mended, durations)
        return durations


def _less(slow: Sequence[Sequence[SlowRank]], parts: Sequence[_Part]) -> list[tuple[SlowRank, ...]]:
    """The slow ranks of each stretch without these."""
    gone = {(part.stretch, _who_and_what(member)) for part in parts for member in part.members}
    return [tuple(one for one in own if (number, _who_and_what(one)) not in gone) for number, own in enumerate(slow)]


def _without_idle_members(replay: _Replay, slow: Sequence[tuple[SlowRank, ...]]) -> list[tuple[SlowRank, ...]]:
    """Drop the ranks without which a set costs as much, smallest excess first."""
    left = list(slow)
    excess: dict[_WhoAndWhat, float] = {}
    for one in (one for own in slow for one in own):
        excess[_who_and_what(one)] = excess.get(_who_and_what(one), 0.0) + one.total_ns
    if len(excess) > MOST_SHARES:
        return left
    for smallest in sorted(excess, key=lambda one: excess[one]):
        without = [tuple(one for one in own if _who_and_what(one) != smallest) for own in left]
        lost = replay.saved_ns(left) - replay.saved_ns(without)
        for number, own in enumerate(left):
            bench = replay.stretches[number].bench
            limits = bench.thresholds
            least_ns = max(limits.cost_ms * 1e6, limits.share_of_step * bench.step_ns) / max(len(own), 1)
            if float(lost[bench.steady].mean()) < least_ns:
                left[number] = without[number]
    return left


def _parts(run: Run, slow: Sequence[Sequence[SlowRank]]) -> dict[_Key, list[_Part]]:
    """What is one verdict: all ranks of a host, of a tensor-parallel group, or ranks with the same cause.

    Ranks that are not slow in the same stretches have verdicts of their own.
    """
    when: dict[tuple[int, str], list[int]] = {}
    for number, own in enumerate(slow):
        for one in own:
            when.setdefault((one.rank, one.cause), []).append(number)
    parts: dict[_Key, list[_Part]] = {}
    places = places_of(run)
    for number, own in enumerate(slow):
        for sharing in by_common_place(places, own):
            together: dict[tuple[int, ...], list[SlowRank]] = {}
            for one in sharing.members:
                stretches = tuple(when[one.rank, one.cause]) if sharing.place == RANKS else ()
                together.setdefault(stretches, []).append(one)
            for members in together.values():
                key = _Key(sharing.place, sharing.what, tuple(sorted(one.rank for one in members)))
                parts.setdefault(key, []).append(_Part(number, tuple(members)))
    return parts


def _verdict(
    replay: _Replay, key: _Key, parts: Sequence[_Part], saved_ns: Int64, slow: Sequence[Sequence[SlowRank]]
) -> Verdict | None:
    """None where it costs too little, too seldom, or does not stand out."""
    rare = all(member.is_rare for part in parts for member in part.members)
    benches = [found.bench for found in replay.stretches]
    price = price_of(
        replay.whole, benches, [part.stretch for part in parts], saved_ns, rare=rare, meant=key.what in MEANT
    )
    if price is None:
        return None
    dearest = next(part for part in parts if part.stretch == price.dearest)
    found, run = replay.stretches[dearest.stretch], replay.whole.run
    members = sorted(dearest.members, key=lambda member: -member.total_ns)
    first = members[0]
    devices = [] if rare else _devices_of(replay, found.bench, members)
    cause = _cause(found.bench, members, devices)
    persistence = price.cost.persistence if rare or len(members) > 1 else first.persistence
    in_few_steps = rare and price.cost.when.is_rare
    return Verdict(
        rank=first.rank,
        host=run.ranks[first.rank].metadata.node,
        place=key.place,
        cause=cause,
        who=_who(run, key),
        cost_ms_per_step=price.ms,
        gpu_hours_per_day=price.gpu_hours_per_day,
        persistence=persistence,
        evidence=" ".join(
            _sentences(found, key.place, cause, members, _how_often(found.bench, persistence, price), devices)
        ),
        next_step=_next_step(key.place, cause, members),
        occurrence=price.cost.when.in_words() if in_few_steps else "",
        members=_members(replay, dearest, members, slow),
        stretches=price.stretches,
        since_step=price.cost.when.steps[0] if in_few_steps else -1,
    )


def _devices_of(replay: _Replay, bench: Bench, members: Sequence[SlowRank]) -> list[DeviceEvidence | None]:
    """What the drivers of the members' devices say of these steps."""
    when = None if len(replay.stretches) == 1 else _time_of(bench)
    return [device_evidence(bench.run, member.rank, when) for member in members]


def _cause(bench: Bench, members: Sequence[SlowRank], devices: Sequence[DeviceEvidence | None]) -> str:
    """What most of the members' excess is due to; of compute, a clock that is held down or the only slow phase."""
    cause = _cause_of(members)
    if cause != "compute" or not devices:  # without devices: what strikes now and then
        return cause
    if all(one is not None and one.is_throttled for one in devices):
        return THROTTLED
    return slow_phase(bench, {member.rank for member in members}) or cause


def _sentences(
    found: SlowRanks,
    place: str,
    cause: str,
    members: Sequence[SlowRank],
    how_often: str,
    devices: Sequence[DeviceEvidence | None],
) -> Iterator[str]:
    """What speaks for a verdict: the numbers, the only slow phase, the device of the slowest member."""
    yield _evidence(found, place, cause, members, how_often)
    if cause in PHASES:
        yield ONLY_PHASE.format(phase=PHASES[cause])
    is_of_device = cause in ("compute", THROTTLED, *PHASES) or place != RANKS
    if is_of_device and devices and devices[0] is not None:
        yield _of_device(members, devices[0])


def _cause_of(members: Sequence[SlowRank]) -> str:
    """What most of their excess is due to."""
    excess: Counter[str] = Counter()
    for member in members:
        excess.update(member.excess_ns)
    return max(excess, key=lambda cause: excess[cause])


def _members(
    replay: _Replay, part: _Part, members: Sequence[SlowRank], slow: Sequence[Sequence[SlowRank]]
) -> tuple[Member, ...]:
    """The members with their shares, in the stretch that is dearest."""
    bench = replay.stretches[part.stretch].bench
    everybody = frozenset(_who_and_what(one) for own in slow for one in own)
    run, told = bench.run, []
    for one in members:
        share = alone = None
        if len(everybody) <= MOST_SHARES:
            own = frozenset([_who_and_what(one)])
            share = _saved_ms(replay, bench, slow, everybody) - _saved_ms(replay, bench, slow, everybody - own)
            alone = _saved_ms(replay, bench, slow, own)
        told.append(Member(one.rank, run.ranks[one.rank].metadata.node, one.total_ns / 1e6, share, alone))
    return tuple(told)


def _saved_ms(
    replay: _Replay, bench: Bench, slow: Sequence[Sequence[SlowRank]], mended: frozenset[_WhoAndWhat]
) -> float:
    """What a step of these saves in the mean with these of the slow ranks mended."""
    chosen = [tuple(one for one in own if _who_and_what(one) in mended) for own in slow]
    return mean_ms(bench.steady, replay.saved_ns(chosen))


def _time_of(bench: Bench) -> tuple[int, int] | None:
    """From when to when the steps that count lasted, ns; None where they were not recorded as spans."""
    steps = bench.program.steps[bench.steady]
    begins, ends = [], []
    for trace in bench.run.ranks.values():
        own = (trace.spans.kind == schema.STEP) & (trace.spans.step >= steps[0]) & (trace.spans.step <= steps[-1])
        begins.extend(trace.spans.start[own].tolist())
        ends.extend(trace.spans.end[own].tolist())
    return (min(begins), max(ends)) if begins else None


def _who(run: Run, key: _Key) -> str:
    return (
        replicas_in_words(replica_of_ranks(run), key.ranks)
        if key.what == SEQUENCES
        else who_in_words(places_of(run), key.place, key.ranks)
    )


def _how_often(bench: Bench, persistence: float, price: Price) -> str:
    """``so in 9 of 9 steps``; with their numbers where they are only some of a stretch."""
    steps = bench.program.steps[bench.steady]
    first, last = int(steps[0]), int(steps[-1])
    told = f"so in {round(persistence * len(steps))} of {len(steps)} steps"
    whole = not price.stretches or any((one.first, one.last) == (first, last) for one in price.stretches)
    return told if whole else f"{told} from {first} to {last}"


def _evidence(found: SlowRanks, place: str, cause: str, members: Sequence[SlowRank], how_often: str) -> str:
    bench, first = found.bench, members[0]
    if cause == SEQUENCES:
        ranks = [member.rank for member in members]
        more = [100 * member.total_ns / max(member.normal_ns, 1.0) for member in members]
        long = found.microbatches.in_words(ranks) if first.beyond == MICROBATCHES else ""
        return evidence_of_longer_input(ranks, more, long)
    others = compared_with(first.told_by)
    if len(members) > 1:
        ranks, excess_ms = [member.rank for member in members], [member.total_ns / 1e6 for member in members]
        places = places_of(bench.run)
        if first.is_rare:
            return several_pause_longer(places, place, cause, ranks, excess_ms)
        percent = [100 * member.total_ns / max(member.normal_ns, 1.0) for member in members]
        return several_need_longer(places, place, ranks, first.told_by, percent, excess_ms) + " (medians over steps)."
    if first.is_rare:
        return (
            f"{_place(bench.run, first.rank)} needs {_details(bench, first)} (mean), "
            f"{first.excess_ns[first.cause] / 1e6:.1f} ms more than other ranks of its stage; {how_often}."
        )
    return (
        f"{_place(bench.run, first.rank)} needs {_details(bench, first)}: {first.excess_ns[first.cause] / 1e6:.1f} ms "
        f"per step more than {others}, which need {first.normal_ns / 1e6:.1f} ms (medians over steps); {how_often}."
    )


def _of_device(members: Sequence[SlowRank], device: DeviceEvidence) -> str:
    """What its driver says; of several ranks, of the slowest one's."""
    return device.sentence if len(members) == 1 else f"Rank {members[0].rank}: {device.sentence}"


def _place(run: Run, rank: int) -> str:
    trace = run.ranks[rank]
    place = ", ".join(f"{name} {at}" for name, at in trace.coordinates.items() if trace.parallel.get(name, 2) > 1)
    return f"Rank {rank} ({place}, {trace.metadata.node})" if place else f"Rank {rank} ({trace.metadata.node})"


def _details(bench: Bench, slow: SlowRank) -> str:
    """What is slower, in numbers."""
    if slow.beyond == SELDOM:
        return f"{(slow.normal_ns + slow.total_ns) / 1e6:.1f} ms of work per step"
    if slow.cause in RARE:
        mean_ns = mean_per_step(bench, rare_ns(bench.program.segments, slow.cause))[slow.rank]
        return f"{mean_ns / 1e6:.1f} ms per step for {cause_in_words(slow.cause)}"
    if slow.cause == "late_launch":
        return f"{(slow.normal_ns + slow.total_ns) / 1e6:.1f} ms per step, more of it before its phases, in no span"
    if slow.cause == "unknown":
        return f"{(slow.normal_ns + slow.total_ns) / 1e6:.1f} ms per step, more of it outside of forward and backward"
    parts = [
        f"{own / 1e6:.1f} ms per {name} (peers {peers / 1e6:.1f})"
        for kind, phase in _PHASES.items()
        for name, own, peers in [(PHASES[phase], *_per_phase(bench, slow.rank, kind))]
        if own - peers > _DIFFERS * peers
    ]
    return ", ".join(parts) or f"{slow.excess_ns['compute'] / 1e6:.1f} ms more"


def _next_step(place: str, cause: str, members: Sequence[SlowRank]) -> str:
    return NOW_AND_THEN if members[0].beyond == SELDOM else next_step(cause, len(members), place)


def slow_phase(bench: Bench, ranks: Collection[int]) -> str:
    """Return the one phase in which all of these are slow, where the others are as fast as elsewhere; empty without.

    Args:
        bench: of the steps, its peers those whose work is normal.
        ranks: that compute for too long.
    """
    work = bench.work
    excess = work.excess_ns()
    own = np.isin(work.rank, list(ranks))
    in_phase = own & (work.kind < BETWEEN)
    typical = np.nan_to_num(work.peer_ns * work.per_step)
    all_excess, all_work = float(excess[in_phase].sum()), float(typical[in_phase].sum())
    for kind, name in _PHASES.items():
        here = own & (work.kind == kind)
        if excess[here].sum() >= MOST_OF_PHASE * all_excess > 0 and typical[here].sum() <= ONE_PHASE * all_work:
            return name
    return ""


def _per_phase(bench: Bench, rank: int, kind: int) -> tuple[float, float]:
    """Typical duration of a whole phase, own and of the peers, ns."""
    segments, work = bench.program.segments, bench.work
    mask = (segments.rank == rank) & (segments.kind == kind) & bench.counted
    phases = len(np.unique(segments.instance[mask])) / max(bench.num_steps, 1)
    entries = (work.rank == rank) & (work.kind == kind)
    if not phases:
        return 0.0, 0.0
    own = float(np.nan_to_num(work.own_ns[entries] * work.per_step[entries]).sum())
    peers = float(np.nan_to_num(work.peer_ns[entries] * work.per_step[entries]).sum())
    return own / phases, peers / phases
