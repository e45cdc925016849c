"""Read marks: facts that change during a run, as rows of kind ``mark`` with JSON in ``detail``, of the types below.

>>> read_mark("progress", '{"step": 3}', most_ranks=1)
_Progress(step=3)
>>> read_mark("progress", '{"step": "3"}', most_ranks=1)
Traceback (most recent call last):
...
ValueError: Expected `int`, got `str` - at `$.step`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Final, cast

from msgspec import Meta, Struct

from commtrace.trace import schema
from commtrace.trace.bounds import Count, Identity, Number, Step, Word
from commtrace.trace.graphs import CapturedGraph
from commtrace.trace.hang_report import Activity, InFlight
from commtrace.trace.inputs import decode_json, printable_json
from commtrace.trace.metadata import ClockAnchor, DeviceState, Group, PeakMemory, RankMetadata
from commtrace.trace.quiet import QUIET, QuietChange
from commtrace.trace.run import DiscardedSegments, Drop, FailedCommunication, OsExit, TriggeredDetail
from commtrace.trace.topology import Topology

_LARGEST_SUM: Final = 2**52
"""Of a step: 52 days of nanoseconds, 4 PB. A thousand of them can be added up."""


class _ActivityMark(Activity, frozen=True):
    """Written at the beginning, and by a rank that recorded nothing for two seconds."""

    no_progress_ns: Count = 0
    again_within_ns: Count | None = None


# The position of a rank that records nothing now.
class _Progress(Struct):
    step: Step


# A part of commtrace was disabled, and the reason.
class _Problem(Struct, omit_defaults=True):
    message: Word
    is_limit: bool = False  # of the source of an imported run: nothing failed


# The recorder was closed. exception: type of an uncaught one; frames: its origin, innermost first.
class _End(Struct, omit_defaults=True):
    exception: Word = ""
    frames: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()


# The default process group was destroyed in order; False: another one was made, or the process failed after that.
class _Left(Struct):
    has_left: bool


# Readers pass over other marks: "count" (tokens, samples and model_flops of the script in the row's step) and
# "hidden_ends" (capture/device/hidden_ends.py). "dropped" counts spans by kind since the previous such mark.
_TYPES: Final[Mapping[str, Any]] = {
    "process_group": Group,
    "topology": Topology,
    "clock_anchor": ClockAnchor,
    "dropped": Annotated[dict[Word, Count], Meta(max_length=256)],
    "in_flight": Annotated[tuple[InFlight, ...], Meta(max_length=65_536)],
    "activity": _ActivityMark,
    "device_state": DeviceState,
    "peak_memory": PeakMemory,
    "graph": CapturedGraph,
    "progress": _Progress,
    "discarded": DiscardedSegments,
    "trigger": TriggeredDetail,
    "problem": _Problem,
    "left": _Left,
    "failed": FailedCommunication,
    "exit": OsExit,
    "end": _End,
    QUIET: QuietChange,
}


def read_mark(name: str, text: str | None, *, most_ranks: int) -> Any:
    """Return the fact in the detail of a mark, without undeclared fields; None for marks without a type.

    It is a dictionary of a ``topology`` and of ``dropped``, else a record.

    Raises:
        ValueError: the detail does not have the type of the mark, or is impossible: ranks are below ``most_ranks``.
    """
    if name not in _TYPES:
        return None
    text = text or "{}"
    if name == "process_group":
        return _read_group(text, most_ranks)
    fact = printable_json(text, _TYPES[name])
    if name == "topology":
        _check_topology(fact)
    if name == "graph":
        fact.check(most_ranks)
    return fact


# All ranks of a job record the same groups: of 16,384 ranks, the members of the world would be read and held as often.
@lru_cache(maxsize=256)
def _read_group(text: str, most_ranks: int) -> Group:
    group = printable_json(text, Group)
    _check_members(group.ranks, most_ranks)
    return group


def _check_members(ranks: Sequence[int], most_ranks: int) -> None:
    if not all(before < after for before, after in pairwise(ranks)):
        raise ValueError("the ranks of a group are not ascending, each once")
    if ranks and ranks[-1] >= most_ranks:
        raise ValueError(f"a group of a job of {most_ranks} ranks holds rank {ranks[-1]}")


def _check_topology(detail: Topology) -> None:
    whatif = detail.get("whatif")
    if whatif is None:
        return
    if not whatif.get("seq_stride") or not whatif.get("pp_size"):
        raise ValueError("the sizes of the what-if trace are missing, or 0")
    if not {"pp", "dp"} <= set(detail.get("coordinates", ())):
        raise ValueError("the place of the rank in the what-if trace is missing")


# Kind, name, group, peer, count, ns, bytes, longest ns: sums over a step (trace/aggregates.py).
_Aggregates = list[tuple[Word, Word, Identity, Number, Count, Count, Count, Count]]


def check_aggregates(text: str | None) -> None:
    """Raise ValueError unless this is the detail of an ``aggregate`` mark."""
    decoded: list[Any] = decode_json(text or "", _Aggregates)
    if any(aggregate[0] not in schema.KINDS or max(aggregate[4:]) > _LARGEST_SUM for aggregate in decoded):
        raise ValueError("sums of a kind that does not exist, or larger than any step makes")


class Marks:
    """Collects marks in the order of writing.

    Another thread copies before it reads (``dict(marks.groups)`` is atomic under the GIL).
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.topology: Topology = {}
        self.dropped: Mapping[str, int] = {}
        self.anchors: list[ClockAnchor] = []
        self.in_flight: tuple[InFlight, ...] = ()
        self.activity: Activity | None = None
        self.activity_ns: int | None = None
        self.no_progress_ns = 0
        self.again_within_ns: int | None = None
        self.drops: list[Drop] = []
        self.device_states: list[DeviceState] = []
        self.peak_memory: PeakMemory | None = None
        self.graphs: dict[int, CapturedGraph] = {}
        self.progress: list[tuple[int, int]] = []
        self.discarded: DiscardedSegments | None = None
        self.triggers: dict[str, TriggeredDetail] = {}
        self.problems: tuple[str, ...] = ()
        self.limits: tuple[str, ...] = ()
        self.closed = False
        self.exception = ""
        self.exception_frames: tuple[str, ...] = ()
        self.exit: OsExit | None = None
        self.has_left = False
        self.failures: list[FailedCommunication] = []
        self.quiet: list[QuietChange] = []

    def add_problem(self, message: str) -> None:
        if message not in self.problems:
            self.problems = (*self.problems, message)

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Return the position in each parallel dimension; empty without an integration."""
        return self.topology.get("coordinates", {})

    @property
    def parallel(self) -> Mapping[str, int]:
        """Return the size of each parallel dimension; empty without an integration."""
        return self.topology.get("parallel", {})

    def rank_of(self, group: int, peer: int, world: str) -> int:
        """Return the rank of a peer in a group: see :meth:`commtrace.trace.metadata.Group.rank_in_world`."""
        known = self.groups.get(group)
        return peer if known is None else known.rank_in_world(peer, world)

    def completed(self, metadata: RankMetadata) -> RankMetadata:
        """Return the metadata with the device, which may be unknown when the header is written."""
        device = self.topology.get("device")
        if device is None:
            return metadata
        return replace(metadata, device=device["name"], device_uuid=device["uuid"])

    def read(self, name: str, fact: Any, at_ns: int | None = None) -> None:
        """Collect a fact of :func:`read_mark` written at ``at_ns``.

        Unknown ones are ignored, and without a time also readings of the device.
        """
        if name == "process_group":
            self.groups[fact.id] = fact
        elif name == "topology":
            self.topology = cast(Topology, {**self.topology, **fact})
        elif name == "dropped":
            if at_ns is not None:
                self.drops.append(Drop(at_ns, fact))
            self.dropped = {kind: self.dropped.get(kind, 0) + fact.get(kind, 0) for kind in {**self.dropped, **fact}}
        elif name == "clock_anchor":
            self.anchors.append(fact)
        elif name == "in_flight":
            self.in_flight = fact
        elif name == "activity":
            self.activity = Activity(fact.at, fact.open, fact.collectives, fact.p2p, fact.frames)
            self.activity_ns = at_ns
            self.no_progress_ns, self.again_within_ns = fact.no_progress_ns, fact.again_within_ns
        elif name == "device_state" and at_ns is not None:
            self.device_states.append(fact)
        elif name == "peak_memory":
            self.peak_memory = fact
        elif name == "graph":
            self.graphs[fact.id] = fact
        elif name == "progress" and at_ns is not None:
            self.progress.append((fact.step, at_ns))
        elif name == "discarded":
            self.discarded = fact
        elif name == "trigger":
            self.triggers[fact.id] = fact
        elif name == "problem":
            if fact.is_limit:
                self.limits = (*self.limits, fact.message)
            else:
                self.add_problem(fact.message)
        elif name == "end":
            self.closed, self.exception, self.exception_frames = True, fact.exception, fact.frames
        elif name == "exit":
            self.exit = fact
        elif name == "left":
            self.has_left = fact.has_left
        elif name == "failed":
            self.failures.append(fact)
        elif name == QUIET:
            self.quiet.append(fact)
