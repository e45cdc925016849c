"""Findings that hold while a job runs: named when they last, changed, and cleared when they are gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

from msgspec.structs import replace

from commtrace.analysis.clocks.time_of_day import clock_time
from commtrace.analysis.stragglers.limits import WINDOWS_OF_LASTING
from commtrace.analysis.stragglers.microbatches import SEQUENCES
from commtrace.analysis.stragglers.normal import PAST
from commtrace.analysis.stragglers.slow_links import COMMUNICATION
from commtrace.findings.causes import JOB, OF_NO_RANK, RANKS, format_cause
from commtrace.findings.finding import Finding, beginning_as, finding_id, format_since_step
from commtrace.findings.formatting import format_duration
from commtrace.findings.status import CHANGED, CLEARED, FOUND, LiveEvent

_WINDOWS_OF_PAST: Final = WINDOWS_OF_LASTING


def found(finding: Finding, now_ns: int, device: str) -> LiveEvent:
    """Return the event that something slows the job; ``device`` is the unit of hours, ``GPU`` or ``rank``."""
    return LiveEvent(FOUND, now_ns, finding, f"Straggler: {_text(finding, now_ns, device)}")


def changed(finding: Finding, before: Finding, now_ns: int, device: str) -> LiveEvent:
    """Return the event that a finding holds other ranks, or is at another place, than ``before``."""
    return LiveEvent(CHANGED, now_ns, finding, f"No longer {before.words}, but {_text(finding, now_ns, device)}")


def cleared(finding: Finding, now_ns: int) -> LiveEvent:
    """Return the event that something no longer slows the job."""
    who, cause, at = finding.who[:1].upper() + finding.who[1:], format_cause(finding.cause), clock_time(now_ns)
    several = len(finding.members) > 1 and finding.place == RANKS
    if finding.occurrence is not None:
        goes_on = "go on as their peers do" if several else "goes on as its peers do"
        sentence = f"{who} {goes_on} ({cause}) at {at}: {finding.occurrence.describe()}."
    else:
        quick = "are as fast as their peers again" if several else "is as fast as its peers again"
        over = "no longer slows the job" if finding.cause in OF_NO_RANK or finding.place == JOB else quick
        sentence = f"{who} {over} ({cause}) at {at}, after {_lasted(finding, now_ns)}."
    return LiveEvent(CLEARED, now_ns, finding, sentence)


def _text(finding: Finding, now_ns: int, device: str) -> str:
    if finding.occurrence is not None:
        mean_ms = (finding.cost_ns or 0.0) / 1e6
        when = f"from {clock_time(finding.since_ns or 0)} on; on average it costs {mean_ms:.1f} ms per step"
    else:
        hours = f"{finding.gpu_hours_per_day or 0.0:.3g} {device}-hours per day"
        when = f"{hours}, for {_lasted(finding, now_ns)}, {_since(finding)}"
    return f"{finding.line()}, {when}. {finding.evidence} {finding.advice}"


def _since(finding: Finding) -> str:
    step = format_since_step(finding.since_step, finding.since_within_steps)
    step += ", the first one compared" if finding.since_first_compared else ""
    return f"since {step}{', ' if step else ''}{clock_time(finding.since_ns or 0)}"


def _lasted(finding: Finding, now_ns: int) -> str:
    return format_duration(0 if finding.since_ns is None else now_ns - finding.since_ns)


class _Known(NamedTuple):
    """A finding as last seen, as last reported (None before it is named), and the number of windows that show it."""

    finding: Finding
    reported: Finding | None = None
    windows: int = 0
    costs_ns: tuple[float, ...] = ()  # in the newest windows


class StandingFindings:
    """Names findings that last ``windows_to_name`` windows in a row, and clears those that are gone.

    Links that only their own past shows to be slow must last longer: a busy machine delays them for seconds.

    A finding stays the same if it keeps its cause and name, or more than half of the ranks of the smaller set. So a set
    that grows, shrinks or turns out to be a host is not named again, and keeps its id.

    A finding keeps the begin of its first observation; if ``are_dated``, it takes that of the newest one. Its cost is
    the mean over the newest ``windows_of_cost``: of what strikes in one step of five, a window may hold one or two.
    """

    def __init__(self, windows_to_name: int, *, are_dated: bool = False, windows_of_cost: int = 1) -> None:
        self._windows_to_name = windows_to_name
        self._are_dated = are_dated
        self._windows_of_cost = windows_of_cost
        self._known: list[_Known] = []

    @property
    def named(self) -> list[Finding]:
        return [known.finding for known in self._known if known.reported is not None]

    def join(
        self,
        findings: Sequence[Finding],
        now: float,
        device: str,
        kept: Collection[str] = (),
        windows: int = 1,
    ) -> list[LiveEvent]:
        """Take the present observations, and return the changes.

        Findings with a cause in ``kept``, which could not be examined now, stay. ``windows`` is the number of windows
        behind these observations, ``now`` epoch seconds.
        """
        now_ns = round(now * 1e9)
        before, self._known = self._known, []
        continued = _continued(before, findings)
        gone = [known for known in before if all(known is not still for still in continued)]
        self._known = [known for known in gone if known.finding.cause in kept]
        events = [
            cleared(known.finding, now_ns)
            for known in gone
            if known.reported is not None and known.finding.cause not in kept
        ]
        ids = {known.finding.id for known in before if known.reported is not None}
        for seen, known in zip(findings, continued, strict=True):
            events += self._take(_Known(seen, None, windows, _costs(seen)), known, ids, now_ns, device)
        return events

    def _take(self, new: _Known, known: _Known | None, ids: set[str], now_ns: int, device: str) -> Iterator[LiveEvent]:
        """Take an observation, the same as a ``known`` one if there is one, and yield its event if there is one."""
        seen, reported, windows, costs_ns = new
        if known is not None:
            reported, windows = known.reported, known.windows + windows
            if set(seen.ranks) == set(known.finding.ranks):
                costs_ns = (*known.costs_ns, *costs_ns)[-self._windows_of_cost :]
            seen = _with_cost(seen, costs_ns)
            if not self._are_dated and (known.finding.since_ns or 0) < (seen.since_ns or 0):
                seen = beginning_as(seen, known.finding)
        if reported is not None:
            seen = replace(seen, id=reported.id)
            if _where(reported) != _where(seen):
                yield changed(seen, reported, now_ns, device)
                reported = seen
        elif windows >= (_WINDOWS_OF_PAST if _shown_by_past(seen) else self._windows_to_name):
            reported = seen = replace(seen, id=_free_id(seen, ids))
            ids.add(seen.id)
            yield found(seen, now_ns, device)
        self._known.append(_Known(seen, reported, windows, costs_ns))


def _costs(finding: Finding) -> tuple[float, ...]:
    return () if finding.cost_ns is None or finding.occurrence is not None else (finding.cost_ns,)


def _with_cost(finding: Finding, costs_ns: Sequence[float]) -> Finding:
    """Return a finding with the mean of these costs."""
    if not costs_ns or not finding.cost_ns:
        return finding
    cost_ns = sum(costs_ns) / len(costs_ns)
    ratio = cost_ns / finding.cost_ns
    return replace(
        finding,
        cost_ns=cost_ns,
        share=None if finding.share is None else finding.share * ratio,
        gpu_hours_per_day=None if finding.gpu_hours_per_day is None else finding.gpu_hours_per_day * ratio,
    )


def _shown_by_past(finding: Finding) -> bool:
    return finding.cause == COMMUNICATION and finding.norm == PAST and finding.occurrence is None


def _free_id(finding: Finding, taken: Collection[str]) -> str:
    # Another one may have had these ranks when it was named, and still have their id.
    plain = finding_id(finding.kind, finding.place, finding.cause, finding.ranks)
    return next(one for number in count(1) if (one := plain if number == 1 else f"{plain}+{number}") not in taken)


def _continued(known: Sequence[_Known], findings: Sequence[Finding]) -> list[_Known | None]:
    # By name first, then by ranks, so that a set with a known name is not taken for another one.
    continued: list[_Known | None] = [None] * len(findings)
    left = list(known)
    tests: tuple[Callable[[Finding, Finding], bool], ...] = (_has_same_name, _has_same_ranks)
    for is_same in tests:
        for number, finding in enumerate(findings):
            same = [one for one in left if continued[number] is None and is_same(one.finding, finding)]
            if same:
                most = max(same, key=lambda one: len({*one.finding.ranks} & {*finding.ranks}))
                continued[number] = most
                left = [one for one in left if one is not most]
    return continued


def _where(finding: Finding) -> tuple[str, tuple[int, ...], bool]:
    # Neither the slowest rank nor the cause, which may change from window to window; but whether input is the cause.
    return finding.place, tuple(sorted(finding.ranks)), finding.cause == SEQUENCES


def _has_same_name(one: Finding, other: Finding) -> bool:
    return (one.cause, one.who) == (other.cause, other.who)


def _has_same_ranks(one: Finding, other: Finding) -> bool:
    first, second = {*one.ranks}, {*other.ranks}
    return 2 * len(first & second) > min(len(first), len(second))
