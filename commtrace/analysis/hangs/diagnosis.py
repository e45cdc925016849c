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
        hosts: names of the nodes.
        states: by state of its files' end, how many ranks.
        last_written_ns: epoch ns of the last thing that any rank wrote; None if unknown.
        differing_versions: of packages that must be the same everywhere and are not, the ranks by package and version.
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
    """A rank and the end of its files.

    Attributes:
        state, last_written_ns, behind_ns, process: see :class:`commtrace.analysis.hangs.rank_state.Ending`.
        exception: type of the uncaught one; None if there was none.
        exception_at: where it was raised, as ``file:line function``.
        stack: where its main thread was when no thread of Python could run any more, innermost first; else empty.
        stack_at: the innermost frame of it that is not a library's.
        keep_out: command that keeps its node out of the next job.
        failures: communications that raised.
        dropped: spans that its recorder dropped, by kind.
        collectives: how many it launched.
        coordinates: in the parallel dimensions.
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
    """Spans that a rank dropped, by kind, and between when, epoch ns; they are reported at most half a second later."""

    rank: int
    dropped: Mapping[str, int]
    first_ns: int | None
    last_ns: int | None


@dataclass(frozen=True, slots=True)
class Mismatches:
    """Communications whose members did not call the same: how many, and the first of them."""

    count: int
    first: tuple[Mismatch, ...]


class Hang(NamedTuple):
    """Where communication stopped.

    Attributes:
        stops: communications that did not end, the one that waited longest first.
        chains: who waits for whom.
        doing: by rank, what those concerned did last.
        sentences: the story of it.
    """

    stops: tuple[Stop, ...]
    chains: Chains
    doing: Mapping[int, LastActivity]
    sentences: tuple[str, ...] = ()

    @property
    def is_hung(self) -> bool:
        """Return whether somebody has waited for longer than is usual."""
        return any(stop.kind == HUNG for stop in self.stops)

    def to_json(self) -> JsonObject:
        parts = fields_to_json(self)
        sentences = parts.pop("sentences")
        return {**parts, "is_hung": self.is_hung, "sentences": sentences}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a run's files hold, what they miss, and where its job hangs or stopped.

    Attributes:
        recording: what was left out on purpose.
        drops: what was lost.
        mismatches: communications whose members did not call the same.
        problems: what is wrong with the files.
        first_failure: None if nobody failed, or nothing says who was first.
        flight_recorder: None without dumps.
        findings: what somebody should look at, in sentences; empty if the run is healthy.
        notes: what is only good to know.
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
        """Return what ``commtrace doctor --json`` prints."""
        return fields_to_json(self)

    def rank(self, rank: int) -> ExaminedRank | None:
        """Return a rank; None if nothing is known of it."""
        return next((one for one in self.ranks if one.rank == rank), None)
