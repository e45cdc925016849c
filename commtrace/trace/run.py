"""Hold a recorded run in memory: the input of every analysis, view and export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from commtrace.trace import schema
from commtrace.trace.blocks import Block, blocks_of
from commtrace.trace.bounds import Count, EndStep, Identity, Number, Peer, Step, Time, Word
from commtrace.trace.hang_report import Activity, InFlight
from commtrace.trace.metadata import ClockAnchor, DeviceState, Group, PeakMemory, RankMetadata
from commtrace.trace.quiet import QuietChange
from commtrace.trace.spans import Spans

if TYPE_CHECKING:
    from commtrace.trace.graphs import CapturedGraph
    from commtrace.trace.topology import Recording, RecordingEngine, Topology

_BLOCKS: Final = "_blocks"


class Drop(NamedTuple):
    """Spans dropped since the last report, by kind; ``reported_ns`` is on the rank's own clock."""

    reported_ns: int
    counts: Mapping[str, int]


class FailedCommunication(Struct, frozen=True):
    """A communication that raised ``exception``, at ``at_ns`` of the rank's own clock."""

    operation: Word
    group: Identity
    seq: Number
    peer: Peer
    exception: Word
    at_ns: Time


class OsExit(Struct, frozen=True, omit_defaults=True):
    """A call of ``os._exit`` with another status than 0."""

    status: Annotated[int, Meta(ge=-(2**31), lt=2**31)]
    exception: Word = ""  # type of the one that was being handled
    frames: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()  # of that exception, else of the call
    signal: Word = ""  # whose handler called it

    @property
    def call(self) -> str:
        """Return ``os._exit(1)``."""
        return f"os._exit({self.status})"


class DiscardedSegments(Struct, frozen=True):
    """Segments deleted up to ``at_ns`` (epoch), to keep to the budget; steps are −1 if they held none."""

    segments: Count
    bytes: Count
    first_step: Step
    last_step: Step
    at_ns: Time


class TriggeredDetail(Struct, frozen=True):
    """A request for steps in detail, ``end`` exclusive; ``late`` if the rank saw it after they had begun."""

    id: Word
    first: Step
    end: EndStep
    seen_at_step: Step
    modules: Word = ""
    by: Word = ""
    late: bool = False


class PeerLook(NamedTuple):
    """A rank's look, on the host's monotonic clock, at the processes of other ranks of its host."""

    at_ns: int
    ended: tuple[int, ...]  # since the last look; none to show that the rank itself is still there


def _no_facts() -> Topology:
    return {}


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Everything that one rank recorded. Times are ns of its own clock; empty or None means unknown or none."""

    metadata: RankMetadata
    spans: Spans  # without marks, by start; at equal starts the longer one first
    groups: Mapping[int, Group] = field(default_factory=dict)  # of which it is a member, by Group.id
    coordinates: Mapping[str, int] = field(default_factory=dict)  # position in each parallel dimension
    parallel: Mapping[str, int] = field(default_factory=dict)  # size of each
    # further facts from the framework: framework, schedule, microbatches, …
    topology: Topology = field(default_factory=_no_facts)
    dropped: Mapping[str, int] = field(default_factory=dict)  # number of spans lost, by kind
    anchors: tuple[ClockAnchor, ...] = ()  # the monotonic clock against the wall clock
    in_flight: tuple[InFlight, ...] = ()  # as of its last report
    activity: Activity | None = None  # its last report while it recorded nothing
    activity_ns: int | None = None  # of that report
    no_progress_ns: int = 0  # before that report
    again_within_ns: int | None = None  # until the next report was due
    limits: tuple[str, ...] = ()  # of the source of an imported run, in sentences
    drops: tuple[Drop, ...] = ()
    device_states: tuple[DeviceState, ...] = ()
    peak_memory: PeakMemory | None = None  # None without an accelerator
    graphs: Mapping[int, CapturedGraph] = field(default_factory=dict)  # CUDA graphs that it captured, by their id
    last_written_ns: int | None = None  # the latest instant in the files
    closed: bool = True  # False if killed, or still running
    # its default process group was destroyed in order, or its command ended with 0: it may end without closing them
    has_left: bool = False
    shell_hides_end: bool = False  # its command ended with 0, through a shell: that does not say how the rank ended
    command_failed: bool = False  # that of `commtrace run`, which the rank belongs to
    exception: str = ""  # type of an uncaught one
    exception_frames: tuple[str, ...] = ()  # "file:line function", innermost first
    exit: OsExit | None = None  # its call of os._exit, unless that was with 0: then it is closed
    failures: tuple[FailedCommunication, ...] = ()
    # sent to its process group before it ended without closing its files; 0: none; None: not known, or it did not
    end_signal: int | None = None
    gone_peers: tuple[PeerLook, ...] = ()  # looks at other ranks of its host that ended
    stack: tuple[str, ...] = ()  # of its main thread when no Python thread could run, innermost first
    # texts of the marks, by step without detail
    aggregates: Mapping[int, Sequence[str]] = field(default_factory=dict)
    quiet: tuple[QuietChange, ...] = ()  # begins and ends of what was not recorded, to measure what recording costs
    discarded: DiscardedSegments | None = None  # to keep to the budget
    progress: tuple[tuple[int, int], ...] = ()  # (step, ns) while nothing was recorded
    triggers: tuple[TriggeredDetail, ...] = ()  # requests for detail during the run
    details: Mapping[int, str] = field(default_factory=dict)  # JSON extras of communications, by span id
    # equal for ranks that do the same work, where the messages of a pipeline show it that no framework told
    work_class: int | None = None

    @property
    def rank(self) -> int:
        return self.metadata.rank

    @property
    def recording(self) -> Recording:
        """Return the recording options: ``sample``, ``skip_roles``, …; empty if imported."""
        return self.topology.get("recording", {})

    @property
    def leaves_out_steps(self) -> bool:
        """Return whether the step that it was in at its last write may be one of which nothing is recorded."""
        return bool(self.quiet and self.quiet[-1].is_quiet) or "steps" in self.recording

    @property
    def engine(self) -> RecordingEngine | None:
        """Return what recorded; None if imported, or recorded before there were two engines."""
        return self.topology.get("engine")

    @property
    def process_start_ns(self) -> int | None:
        """Return the start of its process; None if unknown."""
        return self.topology.get("process_start_ns")

    @property
    def launcher(self) -> str:
        """Return the launcher, if it is one that ends its processes by killing them; else an empty string."""
        return self.topology.get("launcher", "")

    @property
    def first_step(self) -> int:
        """Return the first step of the process: the warm-up, recorded or not."""
        return self.topology.get("first_step", 0)

    @property
    def has_times(self) -> bool:
        """Return False for an import that has durations but no times."""
        return not self.topology.get("without_times")

    @property
    def clock_key(self) -> tuple[str, str]:
        """Return a key that is equal for ranks that read the same clock."""
        return (self.metadata.node, self.metadata.boot_id)


PIPELINE: Final = "pp"
"""The parallel dimension, and the role of groups, of a pipeline's stages."""


def stage_in_groups(rank: int, groups: Iterable[Group]) -> int | None:
    """Return the place of a rank in its pipeline group; None without one."""
    pipelines = [group.ranks for group in groups if group.role == PIPELINE and rank in group.ranks and group.size > 1]
    return min(pipelines, key=len).index(rank) if pipelines else None


def told_stage(trace: RankTrace) -> int | None:
    """Return the pipeline stage of a rank as its framework, its forwards or its groups tell it; None if none does."""
    if PIPELINE in trace.coordinates:
        return int(trace.coordinates[PIPELINE])
    spans = trace.spans
    stages = spans.stage[(spans.kind == schema.FORWARD) & (spans.stage >= 0)]
    return int(stages[0]) if len(stages) else stage_in_groups(trace.rank, trace.groups.values())


@dataclass(frozen=True)
class Run:
    """All ranks of one attempt of one job."""

    path: Path
    ranks: Mapping[int, RankTrace]  # with files, ascending
    names: list[str]  # strings for the codes in Spans.name and Spans.dtype
    problems: tuple[str, ...] = ()  # sentences: missing ranks, torn files, disabled parts of commtrace
    steps_inferred: bool = False  # from communication, as the job marked none

    @property
    def blocks(self) -> Iterator[Block]:
        """Return the rows as blocks of many ranks: those of :meth:`with_blocks`, else copies, made one by one."""
        held: tuple[Block, ...] | None = vars(self).get(_BLOCKS)
        if held is not None:
            return iter(held)
        return blocks_of((rank, trace.spans) for rank, trace in self.ranks.items())

    def with_blocks(self, blocks: Sequence[Block]) -> Run:
        """Replace the ranks and rows by those of these blocks."""
        ranks = {
            rank: replace(self.ranks[rank], spans=block.spans.take(rows))
            for block in blocks
            for rank, rows in block.slices().items()
        }
        made = replace(self, ranks=ranks)
        vars(made)[_BLOCKS] = tuple(blocks)  # no field: a run with other rows has other blocks
        return made

    def with_classes(self, classes: Mapping[int, int]) -> Run:
        """Return the run with the classes of its ranks' work, by rank; as it is if there are none."""
        if not classes:
            return self
        ranks = {rank: replace(trace, work_class=classes.get(rank)) for rank, trace in self.ranks.items()}
        made = replace(self, ranks=ranks)
        if _BLOCKS in vars(self):
            vars(made)[_BLOCKS] = vars(self)[_BLOCKS]
        return made

    @property
    def any_metadata(self) -> RankMetadata:
        """Return the metadata of the lowest rank, for fields equal on all."""
        return next(iter(self.ranks.values())).metadata

    @property
    def world_size(self) -> int:
        return max(trace.metadata.world_size for trace in self.ranks.values())

    def name_code(self, name: str) -> int:
        """Return the code of a name, or −2 (a code that no row has) if the run lacks it."""
        return self.names.index(name) if name in self.names else -2
