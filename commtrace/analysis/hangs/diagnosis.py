"""The result of ``commtrace doctor``, typed; the names are those of its JSON (docs/json/doctor.schema.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.hangs.first_failure import FirstFailure
from commtrace.analysis.hangs.flight_recorder import FlightEvidence
from commtrace.analysis.hangs.rank_state import LastActivity
from commtrace.analysis.hangs.stops import HUNG, Chains, Stop
from commtrace.analysis.matching.arrivals import GroupLabel
from commtrace.analysis.matching.coverage import Coverage, GroupCoverage
from commtrace.analysis.matching.mismatches import Mismatch
from commtrace.trace.json_values import JsonObject, fields_to_json


class ExaminedRun(NamedTuple):
    """The run as a whole.

    Attributes:
        attempt: from 0.
        missing_ranks: ranks without files.
        states: number of ranks by state of their files' end.
        last_written_ns: epoch ns of the last write of any rank; None if unknown.
        differing_versions: by package that must agree, and version, the ranks.
    """

    id: str
    attempt: int
    path: str
    world_size: int
    missing_ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    backend: str
    device: str
    states: Mapping[str, int]
    last_written_ns: int | None
    versions: Mapping[str, str]
    differing_versions: Mapping[str, Mapping[str, tuple[int, ...]]]


class Failure(NamedTuple):
    """A communication that raised ``exception``, at ``at_ns`` of the rank's own clock."""

    operation: str
    group: GroupLabel
    seq: int
    peer: int
    exception: str
    at_ns: int


class ExaminedRank(NamedTuple):
    """A rank and the end of its files; see also :class:`commtrace.analysis.hangs.rank_state.Ending`.

    Attributes:
        exception: type of the uncaught one; None if there was none.
        exception_at, stack_at: innermost frame outside of libraries, as ``file:line function``.
        stack: of the main thread when no Python thread could run, innermost first; else empty.
        keep_out: command that keeps its node out of the next job.
        failures: communications that raised.
        dropped: spans that its recorder dropped, by kind.
        collectives: number launched.
    """

    rank: int
    host: str
    pid: int
    state: str
    last_written_ns: int | None
    behind_ns: int | None
    process: str | None
    exception: str | None
    exception_at: str | None
    stack: tuple[str, ...]
    stack_at: str | None
    device_uuid: str | None
    keep_out: str
    failures: tuple[Failure, ...]
    dropped: Mapping[str, int]
    collectives: int
    coordinates: Mapping[str, int]


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


class Hang(NamedTuple):
    """The stops of communication.

    Attributes:
        stops: communications that did not end.
        doing: last activity of the ranks concerned.
        sentences: the report of it.
    """

    stops: tuple[Stop, ...]
    chains: Chains
    doing: Mapping[int, LastActivity]
    sentences: tuple[str, ...] = ()

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
    """The contents and gaps of a run's files, and the places where its job hangs or stopped.

    Attributes:
        recording: options that left something out on purpose.
        problems: faults of the files.
        first_failure: None if no rank failed, or nothing shows which was first.
        flight_recorder: None without dumps.
        findings: sentences that need attention; empty if the run is healthy.
        notes: sentences that do not.
    """

    run: ExaminedRun
    ranks: tuple[ExaminedRank, ...]
    groups: tuple[GroupCoverage, ...]
    coverage: Coverage
    recording: tuple[LeftOut, ...]
    drops: tuple[Drops, ...]
    alignment: Alignment
    mismatches: Mismatches
    hang: Hang
    problems: tuple[str, ...]
    first_failure: FirstFailure | None
    flight_recorder: FlightEvidence | None
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        return not self.findings

    def to_json(self) -> JsonObject:
        """Return the output of ``commtrace doctor --json``."""
        return fields_to_json(self)

    def rank(self, rank: int) -> ExaminedRank | None:
        """Return a rank; None if nothing is known of it."""
        return next((one for one in self.ranks if one.rank == rank), None)
