"""Describe verdicts on runs as they are kept: stragglers, causes and costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace.analysis.hangs.job_end import Count
from commtrace.errors import TraceFormatError
from commtrace.findings.finding import LOST, NOT_JUDGED, SLOW, Finding, worth_naming
from commtrace.findings.status import CHANGED, FOUND, LiveEvent, MonitorStatus
from commtrace.history.facts import MONITOR_EVENTS, MONITOR_STATUS, Time
from commtrace.trace.inputs import open_file, printable_json, read_file

ANALYSIS: Final = "analysis"
MONITOR: Final = "monitor"
"""Sources of verdicts: a command that read the whole run, or the monitor during the run."""

_MOST_RANKS: Final = 64
_MOST_HOSTS: Final = 256
_MOST_NAMED: Final = 64
_MOST_ABSTENTIONS: Final = 8
_LARGEST_STATUS: Final = 64 << 20
_LONGEST_LINE: Final = 16 << 20
_NAMING: Final = (FOUND, CHANGED)
"""Kinds of events that name something."""


@dataclass(frozen=True, slots=True)
class Named:
    """A finding on a cause of lost time, as it is kept."""

    who: str  # describes the rank, host, stage or link; empty of lost time
    place: str  # as in a finding, like the cause
    cause: str
    cost_ms_per_step: float | None  # saving per step without it; None if unknown
    occurrence: str = ""  # the steps, if only few
    ranks: tuple[int, ...] = ()  # slowest first, at most 64
    hosts: tuple[str, ...] = ()  # empty if the cause is in the division of work, or moves between ranks
    share_of_step: float | None = None  # the cost, of the mean step; None if unknown
    id: str = ""  # of the finding
    text: str = ""  # the finding in a line


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """A judgement of one attempt of a run."""

    source: str  # ANALYSIS or MONITOR
    by: str  # the command, or "monitor"
    attempt: Count  # number of earlier starts of the job
    judged_ns: Time  # epoch
    last_step: Count | None  # the last one judged; None if none had ended
    named: tuple[Named, ...]  # what slows the steps, the costliest first
    abstentions: tuple[str, ...] = ()  # sentences about parts that could not be judged
    losses: tuple[Named, ...] = ()  # lost time that is worth naming, the largest first

    @property
    def is_judged(self) -> bool:
        """Return whether somebody was named, or nothing was left unjudged: only then can hosts be called healthy."""
        return bool(self.named) or not self.abstentions

    @property
    def text(self) -> str:
        """Return ``rank 1 on vm, slow forward: 224 ms per step (62.9% of it); 1 more``.

        It is the costliest finding, and the costliest that slows the steps if that is another one.
        """
        costliest = _costliest((*self.named, *self.losses))
        if not costliest:
            return "nothing found" if self.is_judged else "nothing found, but not all could be judged"
        told = list(dict.fromkeys((costliest[0], *self.named[:1])))
        more = len(costliest) - len(told)
        return "; ".join([*(named.text for named in told), *([f"{more} more"] if more else [])])

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the named hosts, each once."""
        return tuple(dict.fromkeys(host for named in self.named for host in named.hosts))


def verdict_of_analysis(
    findings: Iterable[Finding],
    *,
    by: str,
    attempt: int,
    judged_ns: int,
    last_step: int | None,
) -> RunVerdict:
    """Return the verdict of a command on a whole run."""
    listed = list(findings)
    named = [_named(finding) for finding in listed if finding.kind == SLOW]
    abstentions = tuple(finding.evidence for finding in listed if finding.kind == NOT_JUDGED)[:_MOST_ABSTENTIONS]
    losses = [_named(finding) for finding in worth_naming(listed) if finding.kind == LOST]
    return RunVerdict(ANALYSIS, by, attempt, judged_ns, last_step, _costliest(named), abstentions, _costliest(losses))


def verdict_of_monitor(directory: Path, attempt: int) -> RunVerdict | None:
    """Return the monitor's verdict since the job began, None without files; raise TraceFormatError."""
    path = directory / MONITOR_STATUS
    try:
        status = printable_json(read_file(path, _LARGEST_STATUS), MonitorStatus)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"{path} is not what a monitor writes, and was left out ({error}).") from None
    by_cause = {
        (finding.who, finding.cause): finding
        for finding in (*_events(directory / MONITOR_EVENTS), *status.findings)
        if finding.kind == SLOW
    }
    named = [_named(finding) for finding in by_cause.values()]
    last_step = status.last_step if status.last_step >= 0 else None
    abstentions = tuple(finding.evidence for finding in status.findings if finding.kind == NOT_JUDGED)[
        :_MOST_ABSTENTIONS
    ]
    if last_step is None and not abstentions:
        abstentions = ("No step had ended.",)
    return RunVerdict(MONITOR, MONITOR, attempt, status.time_ns, last_step, _costliest(named), abstentions)


def _named(finding: Finding) -> Named:
    return Named(
        finding.who,
        finding.place,
        finding.cause,
        None if finding.cost_ns is None else finding.cost_ns / 1e6,
        "" if finding.occurrence is None else finding.occurrence.describe(),
        finding.ranks[:_MOST_RANKS],
        finding.hosts[:_MOST_HOSTS],
        finding.share,
        finding.id,
        finding.line(),
    )


def _events(path: Path) -> Iterator[Finding]:
    """Yield what was found, oldest first; lines that are torn or of another program are skipped."""
    try:
        with open_file(path) as file:
            while line := file.readline(_LONGEST_LINE):
                try:
                    event = printable_json(line, LiveEvent)
                except ValueError:
                    continue  # the last line of a monitor that was killed is torn
                if event.kind in _NAMING:
                    yield event.finding
    except OSError:
        return  # a monitor without events writes none; the present state is in monitor.json


def _costliest(named: Iterable[Named]) -> tuple[Named, ...]:
    return tuple(sorted(named, key=lambda each: -(each.cost_ms_per_step or 0.0))[:_MOST_NAMED])
