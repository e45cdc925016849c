"""Findings of the monitor, and the events about them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from commtrace.analysis.clocks.time_of_day import clock_time, iso_utc
from commtrace.analysis.stragglers.microbatches import SEQUENCES
from commtrace.analysis.stragglers.verdict import NamedRank
from commtrace.findings.causes import JOB, OF_NO_RANK, RANKS, format_cause
from commtrace.findings.finding import format_since_step
from commtrace.findings.formatting import format_duration
from commtrace.live.monitoring.wire_types import Count, Duration, Number, Text
from commtrace.trace.json_values import JsonObject, fields_to_json

FOUND: Final = "straggler"
CHANGED: Final = "changed"
CLEARED: Final = "recovered"
SILENT: Final = "silent"
BACK: Final = "back"

MOST_MEANS: Final = 16
"""Limit of the kinds of work, and of the roles, with a mean."""


class Since(NamedTuple):
    """The step in which something began."""

    step: int  # −1 if not known
    time: float  # begin of that step, epoch seconds
    within: int = 0  # by so many steps it may be off
    is_first: bool = False  # no step before it was compared


@dataclass(frozen=True, slots=True)
class LiveStraggler:
    """A rank, host, stage or link that slows the job.

    Without a replay, the cost is the excess over normal, at most the stall of ranks that are not slow. ``id`` is empty
    before it is reported, ``members`` where no rank is the cause.
    """

    rank: int  # the slowest of several; −1, with an empty host, where the cause moves between ranks
    host: str
    who: str
    place: str  # one of verdict.PLACES
    cause: str  # one of verdict.CAUSES
    since: float  # epoch seconds: begin of ``since_step``
    cost_ms_per_step: float  # gain from mending it after all other findings, from a replay
    gpu_hours_per_day: float  # over all devices of the job, a rank without a GPU counted as one
    evidence: str
    next_step: str
    occurrence: str = ""  # steps and total duration of events in few steps; else empty
    steps: int = 0  # over which the cost of such events is spread; 0 if it holds in every step
    ranks: tuple[int, ...] = ()  # all that it names; of a link both ends
    since_step: int = -1  # the first step in which it was slow, or of the events; −1 if not known
    since_within_steps: int = 0  # by so many steps ``since_step`` may be off
    since_first_compared: bool = False  # no step before ``since_step`` was compared: it may have begun earlier
    members: tuple[NamedRank, ...] = ()  # the slow ranks, slowest first, at most 16
    cost_is_bound: bool = False  # it costs no more than that
    id: str = ""  # constant until it is cleared, unique among those that hold

    @property
    def begin(self) -> Since:
        return Since(self.since_step, self.since, self.since_within_steps, self.since_first_compared)

    def beginning(self, since: Since) -> LiveStraggler:
        """Return the same with another beginning."""
        return replace(
            self,
            since=since.time,
            since_step=since.step,
            since_within_steps=since.within,
            since_first_compared=since.is_first,
        )

    def to_json(self) -> JsonObject:
        """Return the fields, and ``since`` as ISO 8601 as well."""
        return {**asdict(self), "since_utc": iso_utc(_ns(self.since))}


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """A message for the person on call."""

    kind: str  # FOUND, CHANGED (other ranks, now a host, or longer input), CLEARED, SILENT, BACK, hang or resumed
    time: float  # epoch seconds
    rank: int  # the subject; −1, with an empty host, if it is no rank
    host: str
    sentence: str
    straggler: LiveStraggler | None = None

    def to_json(self) -> JsonObject:
        """Return the fields, and ``time`` as ISO 8601 as well."""
        straggler = self.straggler.to_json() if self.straggler else None
        return {**asdict(self), "straggler": straggler, "time_utc": iso_utc(_ns(self.time))}


@dataclass(frozen=True, slots=True)
class JobMeans:
    """Means over the ranks of the job in one window of their mean steps; ns per step."""

    step: Number  # the newest that a rank reported
    ranks: Count  # that ended steps in the window
    step_ns: Duration
    work_ns: Annotated[Mapping[Text, Duration], Meta(max_length=MOST_MEANS)]  # by window.WORK
    exposed_ns: Annotated[Mapping[Text, Duration], Meta(max_length=MOST_MEANS)]  # by role; bubble as pp


@dataclass(frozen=True, slots=True)
class MonitorStatus:
    """The present state, as in ``monitor.json``; stragglers are the costliest first."""

    time: float  # epoch seconds
    world_size: int
    ranks_heard: int  # that have ever reported
    silent: Sequence[int]
    step_ms: float  # median of the ranks' mean step in the newest windows
    last_step: int  # the newest that a rank reported; −1 before the first
    peers_missing: bool  # a rank has no peer that does the same work
    hang: str | None  # the finding about it
    abstentions: tuple[str, ...]  # reasons why something cannot be judged
    stragglers: tuple[LiveStraggler, ...]
    means: JobMeans | None = None  # None before the first steps

    def to_json(self) -> JsonObject:
        return fields_to_json(self)


@dataclass(frozen=True, slots=True)
class JobView:
    """The job as a rank sees it through its monitor: findings, costliest first, and the newest events, oldest first."""

    stragglers: tuple[LiveStraggler, ...]
    events: tuple[LiveEvent, ...]
    means: JobMeans | None


def found(straggler: LiveStraggler, now: float, device: str) -> LiveEvent:
    """Return the event that something slows the job; ``device`` is the unit of hours, ``GPU`` or ``rank``."""
    sentence = f"Straggler: {_text(straggler, now, device)}"
    return LiveEvent(FOUND, now, straggler.rank, straggler.host, sentence, straggler)


def changed(straggler: LiveStraggler, before: LiveStraggler, now: float, device: str) -> LiveEvent:
    """Return the event that a reported straggler holds other ranks, or is at another place, than ``before``."""
    sentence = f"No longer {before.who}, {format_cause(before.cause)}, but {_text(straggler, now, device)}"
    return LiveEvent(CHANGED, now, straggler.rank, straggler.host, sentence, straggler)


def _text(straggler: LiveStraggler, now: float, device: str) -> str:
    cost = f"{straggler.cost_ms_per_step:.1f} ms per step"
    if straggler.occurrence:
        first = clock_time(_ns(straggler.since))
        cost = f"{straggler.occurrence} (from {first} on); spread over {straggler.steps} steps, it costs {cost}"
    else:
        hours = f"{straggler.gpu_hours_per_day:.3g} {device}-hours per day"
        bound = "at most " if straggler.cost_is_bound else ""
        cost = f"costs {bound}{cost}, {hours}, for {_lasted(straggler, now)}, {_since(straggler)}"
    return f"{straggler.who}, {format_cause(straggler.cause)}: {cost}. {straggler.evidence} {straggler.next_step}"


def cleared(straggler: LiveStraggler, now: float) -> LiveEvent:
    """Return the event that something no longer slows the job."""
    who, cause = straggler.who[:1].upper() + straggler.who[1:], format_cause(straggler.cause)
    several = len(straggler.members) > 1 and straggler.place == RANKS
    if straggler.occurrence:
        goes_on = "go on as their peers do" if several else "goes on as its peers do"
        sentence = f"{who} {goes_on} ({cause}) at {clock_time(_ns(now))}: {straggler.occurrence}."
    else:
        quick = "are as fast as their peers again" if several else "is as fast as its peers again"
        over = "no longer slows the job" if straggler.cause in OF_NO_RANK or straggler.place == JOB else quick
        sentence = f"{who} {over} ({cause}) at {clock_time(_ns(now))}, after {_lasted(straggler, now)}."
    return LiveEvent(CLEARED, now, straggler.rank, straggler.host, sentence, replace(straggler))


def _since(straggler: LiveStraggler) -> str:
    step = format_since_step(straggler.since_step, straggler.since_within_steps)
    step += ", the first one compared" if straggler.since_first_compared else ""
    return f"since {step}{', ' if step else ''}{clock_time(_ns(straggler.since))}"


def _ns(epoch_seconds: float) -> int:
    return round(1e9 * epoch_seconds)


def _lasted(straggler: LiveStraggler, now: float) -> str:
    return format_duration(round(1e9 * (now - straggler.since)))


@dataclass(slots=True, eq=False)
class _Known:
    """A finding as last seen, as last reported (None before it is named), and the number of windows that show it."""

    straggler: LiveStraggler
    reported: LiveStraggler | None = None
    windows: int = 0


class StandingFindings:
    """Names findings that last ``windows_to_name`` windows in a row, and clears those that are gone.

    A finding stays the same if it keeps its cause and name, or more than half of the ranks of the smaller set. So a set
    that grows, shrinks or turns out to be a host is not named again.

    A finding keeps the begin of its first observation; if ``are_dated``, it takes that of the newest one.
    """

    def __init__(self, windows_to_name: int, *, are_dated: bool = False) -> None:
        self._windows_to_name = windows_to_name
        self._are_dated = are_dated
        self._known: list[_Known] = []

    @property
    def named(self) -> list[LiveStraggler]:
        return [one.straggler for one in self._known if one.reported is not None]

    def join(
        self,
        stragglers: Sequence[LiveStraggler],
        now: float,
        device: str,
        kept: Collection[str] = (),
        windows: int = 1,
    ) -> list[LiveEvent]:
        """Take the present observations, and return the changes.

        Findings with a cause in ``kept``, which could not be examined now, stay. ``windows`` is the number of windows
        behind these observations, ``now`` epoch seconds.
        """
        before, self._known = self._known, []
        continued = _continued(before, stragglers)
        gone = [one for one in before if all(one is not other for other in continued)]
        self._known = [one for one in gone if one.straggler.cause in kept]
        events = [cleared(one.straggler, now) for one in gone if one not in self._known and one.reported is not None]
        for seen, known in zip(stragglers, continued, strict=True):
            one = known or _Known(seen)
            straggler = replace(seen, id=one.straggler.id)
            if not self._are_dated and one.straggler.since < straggler.since:
                straggler = straggler.beginning(one.straggler.begin)
            one.straggler = straggler
            one.windows += windows
            events += self._events(one, now, device)
            self._known.append(one)
        return events

    def _events(self, one: _Known, now: float, device: str) -> Iterator[LiveEvent]:
        if one.reported is None:
            if one.windows >= self._windows_to_name:
                kind = "pauses" if one.straggler.occurrence else "slow"
                one.straggler = replace(one.straggler, id=f"{kind}/{one.straggler.cause}/{one.straggler.who}")
                one.reported = one.straggler
                yield found(one.straggler, now, device)
        elif _where(one.reported) != _where(one.straggler):
            yield changed(one.straggler, one.reported, now, device)
            one.reported = one.straggler


def _continued(known: Sequence[_Known], stragglers: Sequence[LiveStraggler]) -> list[_Known | None]:
    # By name first, then by ranks, so that a set with a known name is not taken for another one.
    found: list[_Known | None] = [None] * len(stragglers)
    left = list(known)
    for is_same in (_has_same_name, _has_same_ranks):
        for number, straggler in enumerate(stragglers):
            same = [one for one in left if found[number] is None and is_same(one.straggler, straggler)]
            if same:
                found[number] = max(same, key=lambda one: len({*one.straggler.ranks} & {*straggler.ranks}))
                left = [one for one in left if one is not found[number]]
    return found


def _where(one: LiveStraggler) -> tuple[str, tuple[int, ...], bool]:
    # Neither the slowest rank nor the cause, which may change from window to window; but whether input is the cause.
    return one.place, tuple(sorted(one.ranks)), one.cause == SEQUENCES


def _has_same_name(one: LiveStraggler, other: LiveStraggler) -> bool:
    return (one.cause, one.who) == (other.cause, other.who)


def _has_same_ranks(one: LiveStraggler, other: LiveStraggler) -> bool:
    first, second = {*one.ranks}, {*other.ranks}
    return 2 * len(first & second) > min(len(first), len(second))
