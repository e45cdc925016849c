"""Write the evidence for slow ranks: the duration of their work, and the signs of its cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.replay.segments import BETWEEN
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.late_hosts import LaunchLateness
from commtrace.analysis.stragglers.limits import FAR_LONGER, MOST_OF_PHASE, ONE_PHASE, SLOWER_THAN_OTHERS
from commtrace.analysis.stragglers.microbatches import SEQUENCES, evidence_of_longer_input
from commtrace.analysis.stragglers.normal import BASELINE, FASTEST, PAST
from commtrace.analysis.stragglers.pauses import times_longer
from commtrace.analysis.stragglers.places import RankPlace, places_of
from commtrace.analysis.stragglers.slow_ranks import MICROBATCHES, SELDOM, WORK, SlowRank, SlowRanks
from commtrace.analysis.stragglers.work_statistics import PHASES, WorkStatistics
from commtrace.findings.causes import CAUSES, HOST, MEANT, PAUSES, RANKS, format_cause
from commtrace.findings.formatting import format_ranks, format_spread
from commtrace.trace.metadata import DeviceState
from commtrace.trace.run import RankTrace, Run

THROTTLED: Final = "throttled_device"
ONLY_PHASE: Final = "Only the {phase} takes longer; the other phases hardly do."

_OUTSIDE: Final = {
    "late_launch": ", most of it before their phases, in no span",
    "unknown": ", most of it outside of forward and backward",
}

_DIFFERS: Final = 0.01
"""A phase counts as longer than that of the peers from this share on."""


def evidence_of(
    slow: SlowRanks,
    place: str,
    cause: str,
    members: Sequence[SlowRank],
    how_often: str,
    device: DeviceEvidence | None,
    launches: LaunchLateness | None = None,
) -> str:
    """Return the evidence for a verdict: the numbers, the only slow phase, the device of the slowest member."""
    return " ".join(_sentences(slow, place, cause, members, how_often, device, launches))


def main_cause(members: Sequence[SlowRank]) -> str:
    """Return the cause of most of the excess of these ranks."""
    excess: Counter[str] = Counter()
    for member in members:
        excess.update(member.excess_ns)
    return max(excess, key=lambda cause: excess[cause])


def slow_phase(work: WorkStatistics, ranks: Collection[int]) -> str:
    """Return the only phase in which all of these ranks are slow; empty if there is none."""
    peers = work.peers
    excess, usual = peers.excess_ns, peers.usual_ns
    of_ranks = np.isin(peers.rank, list(ranks))
    in_phase = of_ranks & (peers.kind < BETWEEN)
    all_excess, all_work = float(excess[in_phase].sum()), float(usual[in_phase].sum())
    for name, kind in PHASES.items():
        here = of_ranks & (peers.kind == kind)
        own_excess, own_work = float(excess[here].sum()), float(usual[here].sum())
        if own_excess < MOST_OF_PHASE * all_excess or all_excess <= 0:
            continue
        if own_work <= ONE_PHASE * all_work:
            return name
        # A slow device would lengthen the other phases by the same share.
        longer, others_longer = own_excess / own_work, (all_excess - own_excess) / max(all_work - own_work, 1.0)
        if longer >= FAR_LONGER and longer >= SLOWER_THAN_OTHERS * others_longer and all_work > own_work:
            return name
    return ""


def _sentences(
    slow: SlowRanks,
    place: str,
    cause: str,
    members: Sequence[SlowRank],
    how_often: str,
    device: DeviceEvidence | None,
    launches: LaunchLateness | None,
) -> Iterator[str]:
    yield _in_numbers(slow, place, cause, members, how_often)
    if cause == "compute" and len(members) > 1 and members[0].beyond == WORK:
        yield from _in_phases_of_their_own(slow.work, members)
    if phase := CAUSES[cause].phase:
        yield ONLY_PHASE.format(phase=phase)
    if launches is not None and (sentence := launches.sentence([member.rank for member in members])):
        yield sentence
    if device is not None and is_of_device(place, cause):
        yield device_sentence(device, members[0].rank, len(members))


def _in_phases_of_their_own(work: WorkStatistics, members: Sequence[SlowRank]) -> Iterator[str]:
    """Say which phase is slow on which member, if each is slow in one only."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(member.rank for member in members):
        ranks.setdefault(slow_phase(work, {rank}), []).append(rank)
    if len(ranks) > 1 and "" not in ranks:
        of_phases = ", ".join(
            f"on {format_ranks(slow_there)} only the {CAUSES[phase].phase}" for phase, slow_there in ranks.items()
        )
        yield f"Not all of them in the same phase: {of_phases}."


def _in_numbers(slow: SlowRanks, place: str, cause: str, members: Sequence[SlowRank], how_often: str) -> str:
    work, first = slow.work, members[0]
    if cause == SEQUENCES:
        ranks = [member.rank for member in members]
        more = [100 * member.total_ns / max(member.normal_ns, 1.0) for member in members]
        long = slow.microbatches.describe(ranks) if first.beyond == MICROBATCHES else ""
        return evidence_of_longer_input(ranks, more, long)
    if len(members) > 1:
        ranks, excess_ms = [member.rank for member in members], [member.total_ns / 1e6 for member in members]
        places = places_of(work.run)
        if first.beyond == SELDOM and first.norm_source == PAST:
            return f"{several_need_longer_than_usual(places, place, ranks, excess_ms)}, {how_often}."
        if first.is_rare:
            return several_pause_longer(places, place, cause, ranks, excess_ms)
        percent = [100 * member.total_ns / max(member.normal_ns, 1.0) for member in members]
        longer = several_need_longer(places, place, ranks, first.norm_source, percent, excess_ms)
        return f"{longer}{_OUTSIDE.get(cause, '')} (medians over steps)."
    where, own_ms = _place(work.run, first.rank), first.excess_ns[first.cause] / 1e6
    if first.cause in PAUSES:
        row = int(np.searchsorted(work.ranks, first.rank))
        pauses_ns = work.pauses_ns(first.cause) + work.between_ns(first.cause)
        mean_ns = float(pauses_ns[row].sum()) / max(work.num_steps, 1)
        times = f", {_times(slow, row, pauses_ns)}" if first.cause in MEANT else ""
        return f"{one_pauses_longer(where, first.cause, mean_ns / 1e6, own_ms)}, {how_often}{times}."
    now_and_then = first.beyond == SELDOM
    phases = "" if now_and_then else format_phases(work, first.rank)
    details = format_work(first.cause, (first.normal_ns + first.total_ns) / 1e6, phases)
    basis = "means over steps" if now_and_then else "medians over steps"
    sentence = one_needs_longer(where, details, own_ms, first.norm_source, first.normal_ns / 1e6, basis)
    return f"{sentence}, {how_often}."


def _times(slow: SlowRanks, row: int, pauses_ns: Float64) -> str:
    """Return ``4 times, by 223 ms each (median), 0.9 s in all``."""
    peers = slow.work.stages == slow.work.stages[row]
    peers[row] = False
    beyond = pauses_ns[row] - np.median(pauses_ns[peers], axis=0)
    longer = times_longer(beyond)
    if len(longer) == 1:
        return f"once, by {_exactly(longer[0])}"
    return f"{len(longer)} times, by {_exactly(np.median(longer))} each (median), {_exactly(longer.sum())} in all"


def _exactly(ns: float) -> str:
    """Return a duration with three digits: a tenth of a second is much where a step takes less."""
    return f"{ns / 1e6:.3g} ms" if ns < 999.5e6 else f"{ns / 1e9:.3g} s"


def _place(run: Run, rank: int) -> str:
    trace = run.ranks[rank]
    position = ", ".join(f"{name} {at}" for name, at in trace.coordinates.items() if trace.parallel.get(name, 2) > 1)
    return f"Rank {rank} ({position}, {trace.metadata.node})" if position else f"Rank {rank} ({trace.metadata.node})"


def format_phases(work: WorkStatistics, rank: int) -> str:
    """Return the phases that take longer: ``48.0 ms per forward (peers 40.0)``; empty without."""
    return ", ".join(
        f"{own_ns / 1e6:.1f} ms per {name} (peers {peers_ns / 1e6:.1f})"
        for phase, kind in PHASES.items()
        for name, own_ns, peers_ns in [(CAUSES[phase].phase, *_per_phase(work, rank, kind))]
        if own_ns - peers_ns > _DIFFERS * peers_ns
    )


def _per_phase(work: WorkStatistics, rank: int, kind: int) -> tuple[float, float]:
    """Return the typical duration of a whole phase, own and of the peers, ns."""
    table, peers = work.table, work.peers
    phases = int((table.begins_phase & (table.rank == rank) & (table.kind == kind) & work.counted).sum())
    if not phases:
        return 0.0, 0.0
    entries = (peers.rank == rank) & (peers.kind == kind)
    own_ns, others_ns = (
        float(np.nan_to_num(values[entries] * peers.per_step[entries]).sum())
        for values in (peers.own_ns, peers.peer_ns)
    )
    per_step = phases / max(work.num_steps, 1)
    return own_ns / per_step, others_ns / per_step


_SLOWER: Final = 0.97
"""Share of the others' clock: devices of one model, at the same work, differ by a few steps of 15 MHz."""

_MOSTLY: Final = 0.5
"""Share of the readings."""


class DeviceEvidence(NamedTuple):
    """Evidence for or against the device."""

    is_throttled: bool  # its clock was held down, and is lower than on others of its model, or than it can be
    sentence: str
    serial: str


def device_evidence(run: Run, rank: int, within: tuple[int, int] | None = None) -> DeviceEvidence | None:
    """Compare the readings of a rank's device, ``within`` some time (ns), with its model's; None without any."""
    model = run.ranks[rank].metadata.device
    others = [
        _read(trace, within)
        for rank_of_other, trace in run.ranks.items()
        if rank_of_other != rank and trace.metadata.device == model
    ]
    return compare_devices(_read(run.ranks[rank], within), others)


def compare_devices(
    states: Sequence[DeviceState], states_of_others: Sequence[Sequence[DeviceState]]
) -> DeviceEvidence | None:
    """Compare the readings of a device with those of others of its model; None without any."""
    if not states:
        return None
    clock, usual_clock = _typical(states, "clock_mhz"), _typical_of_others(states_of_others, "clock_mhz")
    reasons = Counter(reason for state in states for reason in state.slowdowns)
    could_be = _typical(states, "most_clock_mhz") if usual_clock is None else usual_clock
    held_down = bool(reasons) and reasons.most_common(1)[0][1] >= _MOSTLY * len(states)
    is_throttled = held_down and clock is not None and could_be is not None and clock < _SLOWER * could_be
    state = [
        part for part in (_clock(states, clock, usual_clock, reasons), *_conditions(states, states_of_others)) if part
    ]
    sentences = (("Its device: ", state), ("Its errors: ", [*_errors(states)]))
    sentence = " ".join(f"{begin}{'; '.join(parts)}." for begin, parts in sentences if parts)
    return DeviceEvidence(is_throttled, sentence, states[-1].serial) if sentence else None


def are_throttled(devices: Sequence[DeviceEvidence | None]) -> bool:
    """Return whether the clocks of all of these devices were held down."""
    return bool(devices) and all(device is not None and device.is_throttled for device in devices)


def is_of_device(place: str, cause: str) -> bool:
    """Return whether the device may be the reason that ranks of this place are slow for this cause."""
    return place != RANKS or CAUSES[cause].mended_at == "device" or bool(CAUSES[cause].phase)


def device_sentence(device: DeviceEvidence, rank: int, num_ranks: int) -> str:
    """Return the sentence; of several ranks, with the rank of the device."""
    return device.sentence if num_ranks == 1 else f"Rank {rank}: {device.sentence}"


def _read(trace: RankTrace, within: tuple[int, int] | None) -> Sequence[DeviceState]:
    if within is None:
        return trace.device_states
    return [state for state in trace.device_states if within[0] <= state.at_ns <= within[1]]


def _clock(states: Sequence[DeviceState], clock: float | None, usual: float | None, reasons: Counter[str]) -> str:
    if clock is None:
        return ""
    compared = f" (the others {usual:.0f} MHz)" if usual is not None else ""
    reason, count = next(iter(reasons.most_common(1)), ("", 0))
    why = f", held down by {reason} in {count} of {len(states)} readings" if count else ""
    return f"{clock:.0f} MHz{compared}{why}"


def _conditions(states: Sequence[DeviceState], states_of_others: Sequence[Sequence[DeviceState]]) -> Iterator[str]:
    for field, unit, scale in (("temperature_c", "°C", 1.0), ("power_mw", "W", 1000.0)):
        value, usual = _typical(states, field), _typical_of_others(states_of_others, field)
        if value is not None:
            compared = f" (the others {usual / scale:.0f} {unit})" if usual is not None else ""
            yield f"{value / scale:.0f} {unit}{compared}"


def _errors(states: Sequence[DeviceState]) -> Iterator[str]:
    for field, words in (
        ("uncorrected_errors", "uncorrectable memory errors"),
        ("corrected_errors", "corrected memory errors"),
        ("nvlink_errors", "NVLink errors"),
        ("pcie_replays", "PCIe replays"),
    ):
        counts = [count for state in states if (count := getattr(state, field)) is not None]
        if counts and counts[-1]:
            yield f"{counts[-1]} {words}, {max(counts[-1] - counts[0], 0)} of them during the run"


def _typical(states: Sequence[DeviceState], field: str) -> float | None:
    values = [value for state in states if (value := getattr(state, field)) is not None]
    return float(median(values)) if values else None


def _typical_of_others(states_of_others: Sequence[Sequence[DeviceState]], field: str) -> float | None:
    values = [value for states in states_of_others if (value := _typical(states, field)) is not None]
    return float(median(values)) if values else None


_COMPARED_WITH: Final[Mapping[str, str]] = {
    PAST: "the ranks that do the same work and are as fast as before",
    BASELINE: "the ranks that do the same work and are as fast as in the baseline",
    FASTEST: "the fastest ranks that do the same work",
}


def compared_with(norm_source: str) -> str:
    return _COMPARED_WITH.get(norm_source, "the ranks that do the same work")


def one_needs_longer(where: str, details: str, excess_ms: float, norm_source: str, normal_ms: float, basis: str) -> str:
    """Say, without a full stop, that a rank works longer than its peers; ``details`` are from :func:`format_work`."""
    return (
        f"{where} needs {details}: {excess_ms:.1f} ms per step more than {compared_with(norm_source)}, which need "
        f"{normal_ms:.1f} ms ({basis})"
    )


def format_work(cause: str, work_ms: float, phases: str = "") -> str:
    """Return the work of a rank: ``phases``, as ``48.0 ms per forward (peers 40.0)``, if known, or all of its work."""
    if cause == "late_launch":
        return f"{work_ms:.1f} ms per step, more of it before its phases, in no span"
    if cause == "unknown":
        return f"{work_ms:.1f} ms per step, more of it outside of forward and backward"
    return phases or f"{work_ms:.1f} ms of work per step"


def one_pauses_longer(where: str, cause: str, mean_ms: float, excess_ms: float) -> str:
    """Say, without a full stop, that a rank loses more per step to pauses that may be rare."""
    return (
        f"{where} needs {mean_ms:.1f} ms per step for {format_cause(cause)} (mean), {excess_ms:.1f} ms more than "
        "other ranks that do the same work"
    )


def several_need_longer(
    places: Mapping[int, RankPlace],
    place: str,
    ranks: Collection[int],
    norm_source: str,
    percent: Sequence[float],
    excess_ms: Sequence[float],
) -> str:
    """Say, without a full stop, that ranks, the slowest first, work longer than their peers."""
    named, compared = _subject(places, place, ranks), compared_with(norm_source)
    if place == HOST:
        compared = compared.replace("ranks that", "ranks of other hosts that")
    return f"{named} need {format_spread(percent)}% longer per step than {compared}, {format_spread(excess_ms)} ms"


def several_need_longer_than_usual(
    places: Mapping[int, RankPlace], place: str, ranks: Collection[int], excess_ms: Iterable[float]
) -> str:
    """Say, without a full stop, that ranks work longer than in their own other steps."""
    return (
        f"{_subject(places, place, ranks)} need {format_spread(excess_ms)} ms per step more than in their other steps, "
        "and the ranks of other hosts do not (means over all steps)"
    )


def several_pause_longer(
    places: Mapping[int, RankPlace], place: str, cause: str, ranks: Collection[int], excess_ms: Iterable[float]
) -> str:
    """Say that ranks lose more to pauses than their peers."""
    what = f" for {format_cause(cause)}" if cause in PAUSES else ""
    return (
        f"{_subject(places, place, ranks)} need {format_spread(excess_ms)} ms per step more{what} than "
        "other ranks of their stages (means)."
    )


def _subject(places: Mapping[int, RankPlace], place: str, ranks: Collection[int]) -> str:
    if place != HOST:
        return format_ranks(ranks).capitalize()
    host = places[next(iter(ranks))].host
    return f"{_how_many(len(ranks), sum(rank_place.host == host for rank_place in places.values()))} ranks on {host}"


def _how_many(some: int, all_of_them: int) -> str:
    if some == all_of_them == 2:
        return "Both"
    return f"All {some}" if some == all_of_them else f"{some} of the {all_of_them}"
