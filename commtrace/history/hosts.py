"""Count the runs in which each host was named, because a bad node comes back.

>>> worst = tally_hosts(entries).hosts[0]                       # doctest: +SKIP
>>> worst.host, worst.named, worst.judged, worst.rate           # doctest: +SKIP
('node3', 4, 5, 0.8)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from commtrace.analysis.clocks.time_of_day import iso_utc, iso_utc_if_known
from commtrace.history.store import StoredRun, is_same_launch
from commtrace.trace.json_values import JsonObject, fields_to_json


@dataclass(frozen=True, slots=True)
class Naming:
    """A run in which a host was named."""

    run: str
    directory: str  # of the run; it may be gone
    ended_ns: int  # end of the recording, else time of the verdict; epoch ns
    who: str  # as in the verdict
    cause: str
    cost_ms_per_step: float | None  # saving without the cause; None if unknown
    sources: tuple[str, ...]  # analysis, monitor or both

    def to_json(self) -> JsonObject:
        parts = fields_to_json(self)
        del parts["ended_ns"]
        return {**parts, "ended_utc": iso_utc(self.ended_ns)}


@dataclass(frozen=True, slots=True)
class HostTally:
    """Verdicts on a host."""

    host: str
    runs: int  # number of its jobs; restarts do not count
    judged: int  # jobs in which ranks could be compared
    named: int  # jobs in which it was named, by any source
    causes: Mapping[str, int]  # number of runs by cause, the most frequent first
    namings: tuple[Naming, ...]  # the costliest of each run, the newest run first

    @property
    def rate(self) -> float | None:
        """Return the share of the judged runs in which it was named; None if none was judged."""
        return self.named / self.judged if self.judged else None

    @property
    def largest_cost_ms_per_step(self) -> float | None:
        return max(
            (naming.cost_ms_per_step for naming in self.namings if naming.cost_ms_per_step is not None), default=None
        )

    @property
    def last_ns(self) -> int | None:
        """Return the end of the newest run in which it was named, epoch ns; None if there is none."""
        return self.namings[0].ended_ns if self.namings else None

    def to_json(self) -> JsonObject:
        return {
            **fields_to_json(self),
            "rate": self.rate,
            "largest_cost_ms_per_step": self.largest_cost_ms_per_step,
            "last_utc": iso_utc_if_known(self.last_ns),
        }


@dataclass(frozen=True, slots=True)
class HostReport:
    """The hosts of the jobs in a directory, the most often named first, then by rate and name."""

    runs: int
    judged: int  # jobs in which ranks could be compared
    hosts: tuple[HostTally, ...]


def tally_hosts(entries: Iterable[StoredRun]) -> HostReport:
    """Count how often each host of these jobs was named. A job that was copied counts once."""
    runs, judged = Counter[str](), Counter[str]()
    namings: dict[str, list[Naming]] = {}
    causes: dict[str, Counter[str]] = {}
    jobs = _without_copies(entries)
    for entry in jobs:
        named = _named(entry)
        took_part = {*entry.hosts, *named}
        runs.update(took_part)
        if _is_judged(entry):
            judged.update(took_part)
        for host, of_host in named.items():
            namings.setdefault(host, []).append(of_host[0])
            causes.setdefault(host, Counter()).update({naming.cause for naming in of_host})
    tallies = [
        HostTally(
            host,
            count,
            judged[host],
            len(namings.get(host, ())),
            dict(causes.get(host, Counter()).most_common()),
            tuple(sorted(namings.get(host, ()), key=lambda naming: -naming.ended_ns)),
        )
        for host, count in runs.items()
    ]
    tallies.sort(key=lambda tally: (-tally.named, -(tally.rate or 0.0), tally.host))
    return HostReport(len(jobs), sum(map(_is_judged, jobs)), tuple(tallies))


def _without_copies(entries: Iterable[StoredRun]) -> list[StoredRun]:
    """Return every job once, also one whose directory was copied, or lies in parts beside the whole."""
    jobs: list[StoredRun] = []
    for entry in entries:
        at = next((at for at, job in enumerate(jobs) if is_same_launch(job.facts, entry.facts)), None)
        if at is None:
            jobs.append(entry)
        else:
            hosts = tuple(dict.fromkeys([*jobs[at].hosts, *entry.hosts]))
            jobs[at] = replace(jobs[at], hosts=hosts, verdicts=(*jobs[at].verdicts, *entry.verdicts))
    return jobs


def _is_judged(entry: StoredRun) -> bool:
    return any(verdict.is_judged for verdict in entry.verdicts)


def _named(entry: StoredRun) -> dict[str, list[Naming]]:
    """Return the causes for which each host was named in one job, the costliest first, each once."""
    by_host: dict[str, dict[str, Naming]] = {}
    for verdict in sorted(entry.verdicts, key=lambda verdict: (-verdict.attempt, verdict.source)):
        for named in verdict.named:
            for host in named.hosts:
                by_cause = by_host.setdefault(host, {})
                before = by_cause.get(named.cause)
                # ANALYSIS comes before MONITOR: it knows the cost of the whole run.
                by_cause[named.cause] = Naming(
                    entry.facts.run,
                    entry.directory,
                    entry.facts.ended_ns or verdict.judged_ns,
                    before.who if before else named.who,
                    named.cause,
                    before.cost_ms_per_step if before else named.cost_ms_per_step,
                    tuple(sorted({*(before.sources if before else ()), verdict.source})),
                )
    return {
        host: sorted(by_cause.values(), key=lambda naming: -(naming.cost_ms_per_step or 0.0))
        for host, by_cause in by_host.items()
    }
