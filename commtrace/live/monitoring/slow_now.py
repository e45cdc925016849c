"""Ranks that are slow now, in the sets and terms of ``commtrace straggler``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from commtrace.analysis.stragglers.evidence import (
    ONLY_PHASE,
    THROTTLED,
    DeviceEvidence,
    are_throttled,
    device_sentence,
    format_work,
    is_of_device,
    one_needs_longer,
    one_pauses_longer,
    several_need_longer,
    several_pause_longer,
)
from commtrace.analysis.stragglers.late_hosts import LATE, LaunchLateness, least
from commtrace.analysis.stragglers.limits import WINDOWS_OF_LASTING
from commtrace.analysis.stragglers.microbatches import (
    SEQUENCES,
    evidence_of_longer_input,
    format_replicas,
)
from commtrace.analysis.stragglers.places import RankPlace, format_place, group_by_place
from commtrace.analysis.stragglers.slow_ranks import WORK
from commtrace.findings.causes import CAUSES, OF_DIVISION, PAUSES, RANKS, advice
from commtrace.findings.finding import MOST_MEMBERS, SLOW, Finding, Member, Norm, finding_id
from commtrace.live.monitoring.sampled_replay import Price, Priced
from commtrace.live.monitoring.since import Since
from commtrace.live.monitoring.window import WORK as WORDS


class RankReplays(NamedTuple):
    """What replays of sampled steps say of a slow rank; nothing before the first."""

    price: Price | None = None  # its cost, from the newest that gives one
    phase: str = ""  # the only slow one; else empty
    phases: str = ""  # the longer ones with numbers
    launches: LaunchLateness | None = None  # how its work was launched; None if not known
    launches_late: bool = False  # most of its excess there lies before its phases
    # in the newest few its long microbatches, empty if all are; None if its input is no longer than that of others
    long_inputs: tuple[str | None, ...] = ()

    @property
    def long_input(self) -> str | None:
        # A single replay may be wrong in the noise of few steps: most must agree.
        seen = [microbatches for microbatches in self.long_inputs if microbatches is not None]
        return seen[-1] if 2 * len(seen) > len(self.long_inputs) else None

    def with_newest(self, priced: Priced, rank: int, excess_ns: float, long_input: str | None) -> RankReplays:
        """Return it after another replay, in which the rank is slow by ``excess_ns``."""
        return RankReplays(
            price=priced.price(rank, excess_ns) or self.price,
            phase=priced.phases[rank],
            phases=priced.phase_texts.get(rank, ""),
            launches=priced.launches[rank],
            launches_late=rank in priced.late,
            long_inputs=(*self.long_inputs, long_input)[-WINDOWS_OF_LASTING:],
        )


class SlowNow(NamedTuple):
    """A rank that works too long in the newest window; times in ns per step."""

    rank: int
    since: Since
    work_ns_of: tuple[float, ...]  # by window.WORK
    excess_ns_of: tuple[float, ...]  # over normal, likewise
    excess_ns: float
    normal_ns: float
    norm: Norm  # the source of normal
    waited_ns: float  # stall of a rank that is not slow
    duration_ns: float  # of a step
    may_drift: bool = False  # a healthy device may be as slow for seconds, and too few peers show whether they are
    replays: RankReplays = RankReplays()

    @property
    def cause(self) -> str:
        return cause_of([self])

    @property
    def beyond(self) -> str:
        return self.cause if self.cause in PAUSES else WORK


def cause_of(members: Sequence[SlowNow]) -> str:
    """Return the kind of work with the largest excess, longer input, or late hosts."""
    if all(one.replays.long_input is not None for one in members):
        return SEQUENCES
    excess = [sum(own) for own in zip(*(one.excess_ns_of for one in members), strict=True)]
    cause = WORDS[excess.index(max(excess))]
    launches = least(one.replays.launches for one in members)
    return LATE if cause == "compute" and launches is not None and launches.are_late else cause


def sets_now(
    places: Mapping[int, RankPlace], slow: Sequence[SlowNow], seconds: float
) -> Iterator[tuple[str, list[SlowNow]]]:
    """Yield sets of slow ranks, each with its place, the slowest member first.

    Ranks without a common place are one set if they became slow within ``seconds``.
    """
    for own in group_by_place(places, slow):
        together: list[SlowNow] = []
        for one in sorted(own.members, key=lambda one: one.since.time):
            if together and own.place == RANKS and one.since.time - together[0].since.time > seconds:
                yield own.place, _slowest_first(together)
                together = []
            together.append(one)
        yield own.place, _slowest_first(together)


def _slowest_first(members: Sequence[SlowNow]) -> list[SlowNow]:
    return sorted(members, key=lambda one: (-one.excess_ns, one.rank))


def cost_ns(members: Sequence[SlowNow]) -> float:
    """Return the cost of a set per step; without a price the excess, but at most the stall of others."""
    return max(
        min(one.excess_ns, one.waited_ns) if one.replays.price is None else one.replays.price.set_ns for one in members
    )


def finding_of(
    places: Mapping[int, RankPlace],
    place: str,
    members: Sequence[SlowNow],
    world_size: int,
    *,
    replica_of: Mapping[int, int],
    devices: Sequence[DeviceEvidence | None] = (),
) -> Finding:
    """Return a set of slow ranks as a finding.

    Args:
        places: of all ranks of the job; ``place`` is that of the set.
        members: the slowest first, as are ``devices``.
        world_size: ranks of the job.
        replica_of: by rank, its place in data parallelism.
    """
    first, cost, ranks = members[0], cost_ns(members), tuple(one.rank for one in members)
    share = cost / max(first.duration_ns, 1.0)
    cause, earliest = cause_of(members), min((one.since for one in members), key=lambda since: since.time)
    if cause in ("compute", LATE) and are_throttled(devices):
        cause = THROTTLED
    elif cause == "compute" and first.replays.phase:
        cause = first.replays.phase
    elif cause == "unknown" and first.replays.launches_late:
        cause = "late_launch"
    evidence = f"{_evidence(places, place, cause, members)} {_waiting(members)}"
    if phase := CAUSES[cause].phase:
        evidence += f" {ONLY_PHASE.format(phase=phase)}"
    launches = least(one.replays.launches for one in members)
    if launches is not None and (phase or cause in ("compute", LATE)) and (launched := launches.sentence(ranks)):
        evidence += f" {launched}"
    if is_of_device(place, cause) and devices and devices[0] is not None:
        evidence += f" {device_sentence(devices[0], first.rank, len(members))}"
    finding = Finding(
        id=finding_id(SLOW, place, cause, ranks),
        kind=SLOW,
        place=place,
        cause=cause,
        who=format_replicas(replica_of, ranks) if cause == SEQUENCES else format_place(places, place, sorted(ranks)),
        ranks=ranks,
        hosts=() if cause in OF_DIVISION else tuple(dict.fromkeys(places[rank].host for rank in ranks)),
        members=tuple(_member(places, one) for one in members[:MOST_MEMBERS]),
        cost_ns=cost,
        share=share,
        gpu_hours_per_day=share * 24 * world_size,
        norm=first.norm,
        evidence=evidence,
        advice=advice(cause, len(members), place),
    )
    return earliest.of(finding)


def _member(places: Mapping[int, RankPlace], one: SlowNow) -> Member:
    price = one.replays.price
    share, alone = (price.share_ns, price.alone_ns) if price is not None else (None, None)
    return Member(one.rank, places[one.rank].host, one.excess_ns, share, alone)


def _evidence(places: Mapping[int, RankPlace], place: str, cause: str, members: Sequence[SlowNow]) -> str:
    first, ranks = members[0], [one.rank for one in members]
    percent = [100 * one.excess_ns / max(one.normal_ns, 1.0) for one in members]
    if cause == SEQUENCES:
        return evidence_of_longer_input(ranks, percent, first.replays.long_input or "")
    if len(members) == 1:
        where, normal_ms, excess_ms = format_rank(places, first.rank), first.normal_ns / 1e6, first.excess_ns / 1e6
        if cause in PAUSES:
            at = WORDS.index(cause)
            return one_pauses_longer(where, cause, first.work_ns_of[at] / 1e6, first.excess_ns_of[at] / 1e6) + "."
        details = format_work(cause, normal_ms + excess_ms, first.replays.phases)
        return one_needs_longer(where, details, excess_ms, first.norm, normal_ms, "means of a window") + "."
    all_excess_ms = [one.excess_ns / 1e6 for one in members]
    if cause in PAUSES:
        return several_pause_longer(places, place, cause, ranks, all_excess_ms)
    return several_need_longer(places, place, ranks, first.norm, percent, all_excess_ms) + " (means of a window)."


def format_rank(places: Mapping[int, RankPlace], rank: int) -> str:
    """Return ``Rank 3 (node0)``."""
    return f"Rank {rank} ({places[rank].host})"


def _waiting(members: Sequence[SlowNow]) -> str:
    return f"The others wait for {members[0].waited_ns / 1e6:.1f} ms."
