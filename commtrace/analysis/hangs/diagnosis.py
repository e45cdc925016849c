"""The result of ``commtrace doctor``, typed; the names are those of its JSON (docs/json/doctor.schema.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.engines import EngineUse
from commtrace.analysis.hangs.first_failure import FirstFailure
from commtrace.analysis.hangs.flight_recorder import FlightEvidence
from commtrace.analysis.hangs.job_end import EarlierAttempt
from commtrace.analysis.hangs.rank_state import LastActivity
from commtrace.analysis.hangs.setup import SetupHang
from commtrace.analysis.hangs.stops import HUNG, Chains, Stop
from commtrace.analysis.matching.arrivals import GroupLabel
from commtrace.analysis.matching.coverage import Coverage, GroupCoverage
from commtrace.analysis.matching.mismatches import Mismatch
from commtrace.findings.finding import Finding
from commtrace.trace.json_values import JsonObject, fields_to_json


class ExaminedRun(NamedTuple):
    """The run as a whole."""

    id: str
    attempt: int  # from 0
    path: str
    world_size: int
    missing_ranks: tuple[int, ...]  # without files
    hosts: tuple[str, ...]
    backend: str
    device: str
    states: Mapping[str, int]  # number of ranks by state of their files' end
    last_written_ns: int | None  # epoch ns of the last write of any rank; None if unknown
    versions: Mapping[str, str]
    differing_versions: Mapping[str, Mapping[str, tuple[int, ...]]]  # ranks by package that must agree, version
    earlier_attempts: tuple[EarlierAttempt, ...] = ()  # of the same job, oldest first


class Failure(NamedTuple):
    """A communication that raised ``exception``, at ``at_ns`` of the rank's own clock."""

    operation: str
    group: GroupLabel
    seq: int
    peer: int
    exception: str
    at_ns: int


class ExitCalled(NamedTuple):
    """A call of os._exit with another status than 0."""

    status: int
    signal: str | None  # whose handler called it
    exception: str | None  # type of the one that was being handled
    at: str | None  # where that came from, else the call: innermost frame outside of libraries


class ExaminedRank(NamedTuple):
    """A rank and the end of its files; see also :class:`commtrace.analysis.hangs.rank_state.Ending`."""

    rank: int
    host: str
    pid: int
    state: str
    last_written_ns: int | None
    behind_ns: int | None
    process: str | None
    launcher: str | None  # that ended it by killing it, as it does when a job is done
    exception: str | None  # type of the uncaught one
    exception_at: str | None  # innermost frame outside of libraries, as ``file:line function``
    stack: tuple[str, ...]  # of the main thread when no Python thread could run, innermost first
    stack_at: str | None  # innermost frame outside of libraries
    device_uuid: str | None
    exclude_nodes: str  # command that keeps its node out of the next job
    failures: tuple[Failure, ...]  # communications that raised
    dropped: Mapping[str, int]  # spans that its recorder dropped, by kind
    collectives: int  # number launched
    coordinates: Mapping[str, int]
    exit: ExitCalled | None
    shell_hides_end: bool  # it was started by a shell, whose exit code 0 does not say how the rank ended


class LeftOut(NamedTuple):
    """An option that leaves something out on purpose, and the ranks on which it was set."""

    option: str
    value: str
    ranks: tuple[int, ...]


class Drops(NamedTuple):
    """Spans that a rank dropped, by kind, between two times, epoch ns; reports are at most half a second late."""

    rank: int
    dropped: Mapping[str, int]
    first_ns: int | None
    last_ns: int | None


@dataclass(frozen=True, slots=True)
class Mismatches:
    """Communications whose members did not call the same: their number, and the first of them."""

    count: int
    first: tuple[Mismatch, ...]


class CommunicationStops(NamedTuple):
    """The stops of communication."""

    stops: tuple[Stop, ...]  # communications that did not end
    chains: Chains
    last_activities: Mapping[int, LastActivity]  # last activity of the ranks concerned
    sentences: tuple[str, ...] = ()  # the report of it

    @property
    def is_hung(self) -> bool:
        """Return whether some rank has waited for unusually long."""
        return any(stop.kind == HUNG for stop in self.stops)

    def to_json(self) -> JsonObject:
        parts = fields_to_json(self)
        sentences = parts.pop("sentences")
        return {**parts, "is_hung": self.is_hung, "sentences": sentences}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The contents and gaps of a run's files, and the places where its job hangs or stopped."""

    run: ExaminedRun
    ranks: tuple[ExaminedRank, ...]
    groups: tuple[GroupCoverage, ...]
    coverage: Coverage
    recording: tuple[LeftOut, ...]  # options that left something out on purpose
    engines: tuple[EngineUse, ...]  # none if imported
    drops: tuple[Drops, ...]
    alignment: Alignment
    mismatches: Mismatches
    hang: CommunicationStops
    problems: tuple[str, ...]  # faults of the files
    setup_hang: SetupHang | None  # None unless the job hangs before its first step, or while groups are made
    first_failure: FirstFailure | None  # None if no rank failed, or nothing shows which was first
    flight_recorder: FlightEvidence | None  # None without dumps
    findings: tuple[Finding, ...] = ()  # need attention, the first of them first; empty if the run is healthy
    notes: tuple[str, ...] = ()  # need none

    @property
    def is_healthy(self) -> bool:
        return not self.findings

    def to_json(self) -> JsonObject:
        """Return the output of ``commtrace doctor --json``."""
        return fields_to_json(self)

    def rank(self, rank: int) -> ExaminedRank | None:
        """Return a rank; None if nothing is known of it."""
        return next((one for one in self.ranks if one.rank == rank), None)
