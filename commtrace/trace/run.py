"""A recorded run in memory: the input of every analysis, view and export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from commtrace.trace.blocks import Block, blocks_of
from commtrace.trace.hang_report import Activity, InFlight
from commtrace.trace.metadata import ClockAnchor, DeviceState, Group, RankMetadata
from commtrace.trace.spans import Spans


class Drop(NamedTuple):
    """Spans dropped since the rank last reported drops, by kind; ``reported_ns`` is on its own clock."""

    reported_ns: int
    counts: Mapping[str, int]


class FailedCommunication(NamedTuple):
    """A communication that raised ``exception``, at ``at_ns`` of the rank's own clock."""

    operation: str
    group: int
    seq: int
    peer: int
    exception: str
    at_ns: int


class DiscardedSegments(NamedTuple):
    """Segments that were deleted to keep to the budget, up to ``at_ns``, epoch; steps are −1 where they held none."""

    segments: int
    bytes: int
    first_step: int
    last_step: int
    at_ns: int


class TriggeredDetail(NamedTuple):
    """A request for steps in detail, ``end`` exclusive, and when a rank saw it; ``late``: after the steps had begun."""

    id: str
    first: int
    end: int
    seen_at_step: int
    modules: str = ""
    by: str = ""
    late: bool = False


class PeerLook(NamedTuple):
    """A look of a rank at the processes of the other ranks of its host.

    Attributes:
        at_ns: on the host's monotonic clock.
        ended: ranks that had ended since the look before; none to show that the rank itself is still there.
    """

    at_ns: int
    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Everything that one rank recorded. Times are ns of its own clock.

    Attributes:
        spans: its rows, marks left out, sorted by start (at equal starts the longer one first).
        groups: the process groups that it is a member of, by ``Group.id``.
        coordinates, parallel: position in each parallel dimension, and size of each; empty if unknown.
        topology: further facts from the framework integration: ``framework``, ``schedule``, ``microbatches``, …
        dropped: spans that the recorder had to drop, by kind.
        anchors: the monotonic clock against the wall clock, over the run.
        in_flight: communications that had been launched and had not ended when the rank last reported.
        activity: its last report of what it does while it records nothing, at ``activity_ns``: it had recorded nothing
            for ``quiet_ns``, and would report again within ``again_within_ns``. None without a report.
        device_states: readings of its device, in the order of time.
        last_written_ns: the latest instant in the files; None if they hold none.
        closed: False when the rank did not end in order (killed, or still running).
        exception: type of an uncaught exception that ended the rank; else empty.
        exception_frames: where it was raised, innermost first, as ``file:line function``.
        failures: communications that raised.
        gone_peers: looks at which it saw other ranks of its host end, in order.
        stack: where its main thread was when no thread of Python could run any more, innermost first; else empty.
        aggregates: by step without detail, the texts of its ``aggregate`` marks.
        discarded: what was deleted to keep to the budget; None if nothing was.
        progress: (step, ns) while nothing was recorded, of a rank that records only some steps.
        triggers: requests for detail during the run.
        details: JSON extras of communications, by span id.
    """

    metadata: RankMetadata
    spans: Spans
    groups: Mapping[int, Group] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    parallel: Mapping[str, int] = field(default_factory=dict)
    topology: Mapping[str, Any] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    anchors: tuple[ClockAnchor, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    activity: Activity | None = None
    activity_ns: int | None = None
    quiet_ns: int = 0
    again_within_ns: int | None = None
    drops: tuple[Drop, ...] = ()
    device_states: tuple[DeviceState, ...] = ()
    last_written_ns: int | None = None
    closed: bool = True
    exception: str = ""
    exception_frames: tuple[str, ...] = ()
    failures: tuple[FailedCommunication, ...] = ()
    gone_peers: tuple[PeerLook, ...] = ()
    stack: tuple[str, ...] = ()
    aggregates: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    discarded: DiscardedSegments | None = None
    progress: tuple[tuple[int, int], ...] = ()
    triggers: tuple[TriggeredDetail, ...] = ()
    details: Mapping[int, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.metadata.rank

    @property
    def recording(self) -> Mapping[str, Any]:
        """Return the recording options of the rank: ``sample``, ``skip_roles``, …; empty for what was imported."""
        options: Mapping[str, Any] = self.topology.get("recording", {})
        return options

    @property
    def process_start_ns(self) -> int | None:
        """Return when its process began; None if unknown."""
        start_ns = self.topology.get("process_start_ns")
        return start_ns if isinstance(start_ns, int) else None

    @property
    def first_step(self) -> int:
        """Return the number of the first step of the process: the warm-up, recorded or not."""
        return int(self.topology.get("first_step", 0))

    @property
    def has_times(self) -> bool:
        """Return whether its spans stand where they were; False for an import that knows durations alone."""
        return not self.topology.get("without_times")

    @property
    def clock_key(self) -> tuple[str, str]:
        """Return a key that is equal for ranks that read the same clock."""
        return (self.metadata.node, self.metadata.boot_id)


@dataclass(frozen=True)
class Run:
    """All ranks of one attempt of one job.

    Attributes:
        ranks: those that were found, ascending; ``world_size`` is how many there should be.
        names: the words that the codes in ``Spans.name`` and ``Spans.dtype`` stand for.
        problems: sentences for the user: missing ranks, torn files, parts of commtrace that were disabled.
        steps_inferred: nothing marked the steps of the job; these are what its communication suggests.
    """

    path: Path
    ranks: Mapping[int, RankTrace]
    names: list[str]
    problems: tuple[str, ...] = ()
    steps_inferred: bool = False

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return the rows of all ranks as blocks of many ranks: as they were loaded, else a copy."""
        return tuple(blocks_of({rank: trace.spans for rank, trace in self.ranks.items()}))

    def with_blocks(self, blocks: Sequence[Block]) -> Run:
        """Return this run with the ranks and rows of these blocks."""
        ranks = {
            rank: replace(self.ranks[rank], spans=block.spans.take(rows))
            for block in blocks
            for rank, rows in block.slices().items()
        }
        made = replace(self, ranks=ranks)
        vars(made)["blocks"] = tuple(blocks)  # where cached_property keeps it: the ranks are slices of these blocks
        return made

    @property
    def any_metadata(self) -> RankMetadata:
        """Return the metadata of the lowest rank found, for what is equal on all of them."""
        return next(iter(self.ranks.values())).metadata

    @property
    def world_size(self) -> int:
        return max(trace.metadata.world_size for trace in self.ranks.values())

    def name_code(self, name: str) -> int:
        """Return the code of a name, or −2 (a code that no row has) if the run does not hold it."""
        return self.names.index(name) if name in self.names else -2
