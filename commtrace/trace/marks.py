"""Read marks: facts that change during a run, as rows of kind ``mark`` with JSON in ``detail``, of the types below.

>>> read_mark("progress", '{"step": 3}', most_ranks=1)
{'step': 3}
>>> read_mark("progress", '{"step": "3"}', most_ranks=1)
Traceback (most recent call last):
...
ValueError: Expected `int`, got `str` - at `$.step`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from commtrace.trace import schema
from commtrace.trace.graphs import CapturedGraph, check_graph
from commtrace.trace.hang_report import Activity, InFlight
from commtrace.trace.inputs import MOST_RANKS, all_printable, decode_json, is_plain_json
from commtrace.trace.metadata import OUTSIDE, ClockAnchor, DeviceState, Group, PeakMemory, RankMetadata
from commtrace.trace.run import DiscardedSegments, Drop, FailedCommunication, TriggeredDetail
from commtrace.trace.topology import Count, Number, Step, Time, Topology, Word

_LARGEST_SUM: Final = 2**52
"""Of a step: 52 days of nanoseconds, 4 PB. A thousand of them can be added up."""

Identity = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
_Peer = Annotated[int, Meta(ge=-1, lt=OUTSIDE + MOST_RANKS)]


class _Member(Struct):
    world: Word
    run_id: Word
    rank: Rank
    host: Word
    pid: Count


class _Group(Struct):
    id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    ranks: Annotated[list[Rank], Meta(max_length=MOST_RANKS)]  # empty if an imported trace lacks them
    ordinal: Count
    role: Word
    name: Word = ""
    description: Word = ""
    backend: Word = ""
    world: Word = ""
    members: Annotated[list[_Member | None], Meta(max_length=MOST_RANKS)] = []
    key: Word = ""


class _ClockAnchor(Struct):
    monotonic_ns: Time
    realtime_ns: Time
    bracket_ns: Count = 0


# In flight since before the last pass; start in ns; blocking: training stalls on it; state, on a device only:
# scheduled or started.
class _InFlight(Struct, omit_defaults=True):
    operation: Word = "communication"
    group: Identity | UnsetType = UNSET
    seq: Number | UnsetType = UNSET
    peer: _Peer | UnsetType = UNSET
    bytes: Number | UnsetType = UNSET
    dtype: Word | UnsetType | None = UNSET
    is_async: bool | UnsetType = UNSET
    start: Time | UnsetType = UNSET
    blocking: bool | UnsetType | None = UNSET
    state: Word | UnsetType = UNSET


class _Open(Struct):
    kind: Word
    name: Word
    since: Time | None


_Messages = tuple[Identity, bool, _Peer, Time, Count]


# Written at the beginning, and by a rank that recorded nothing for two seconds. at: step, microbatch, chunk, stage;
# open: innermost phase first; collectives: launches by group; p2p: group, is_send, peer, tag, count; frames:
# "file:line function", innermost first.
class _Activity(Struct, omit_defaults=True):
    at: tuple[Step, Number, Number, Number] | UnsetType = UNSET
    open: Annotated[list[_Open], Meta(max_length=4096)] | UnsetType = UNSET
    collectives: dict[Annotated[str, Meta(pattern=r"^-?[0-9]{1,19}$")], Count] | UnsetType = UNSET
    p2p: list[_Messages] | UnsetType = UNSET
    frames: Annotated[list[Word], Meta(max_length=4096)] | UnsetType = UNSET
    no_progress_ns: Count | UnsetType = UNSET
    again_within_ns: Count | UnsetType = UNSET


# One reading by the driver; as in trace/metadata.py.
class _DeviceState(Struct, omit_defaults=True):
    at_ns: Time
    clock_mhz: Count | None = None
    most_clock_mhz: Count | None = None
    temperature_c: Annotated[int, Meta(ge=-300, le=1000)] | None = None
    power_mw: Count | None = None
    power_limit_mw: Count | None = None
    slowdowns: Annotated[list[Word], Meta(max_length=16)] = []
    corrected_errors: Count | None = None
    uncorrected_errors: Count | None = None
    nvlink_errors: Count | None = None
    pcie_replays: Count | None = None
    serial: Word = ""


# The position of a rank that records nothing now.
class _Progress(Struct):
    step: Step


# Deleted so far, to keep to the budget; the last mark counts.
class _Discarded(Struct):
    segments: Count
    bytes: Count
    first_step: Step
    last_step: Step
    at_ns: Time


# A request for steps in detail: trace/selection.py.
class _Trigger(Struct):
    id: Word
    first: Step
    end: Annotated[int, Meta(ge=-1, lt=2**31)]
    seen_at_step: Step
    modules: Word = ""
    by: Word = ""
    late: bool = False


# A part of commtrace was disabled, and the reason.
class _Problem(Struct, omit_defaults=True):
    message: Word
    is_limit: bool = False  # of the source of an imported run: nothing failed


# The highest peaks of torch's allocator until the end of ``step``, in bytes; each tells of all before it.
class _PeakMemory(Struct):
    step: Step
    allocated: Count
    reserved: Count


_Bytes = Annotated[int, Meta(ge=-1, lt=2**47)]
# Group, is_send (null: collectives), peer, tag.
_Counter = tuple[Identity, bool | None, _Peer, Time]
# Name, position of its counter, offset from the counter's first number, op_in_seq, bytes, self_bytes, dtype, peer,
# is_async, microbatch, chunk, stage, module.
_Contained = tuple[Word, Count, Count, Step, _Bytes, _Bytes, Word | None, _Peer, bool, Step, Step, Step, Word]


# Operation; positions of its stamps: start, end, where it was waited for (-1: not seen), end of the stall; whether its
# start is exact, it was seen to be waited for, and the stall is its own.
_Position = Annotated[int, Meta(ge=0, lt=2**20)]
_Stamped = tuple[_Position, _Position, _Position, Annotated[int, Meta(ge=-1, lt=2**20)], _Position, bool, bool, bool]


# What a CUDA graph contains: trace/graphs.py.
class _Graph(Struct):
    id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    phases: Word
    is_known: bool
    unlisted: Count
    counters: Annotated[list[_Counter], Meta(max_length=65_536)]
    operations: Annotated[list[_Contained], Meta(max_length=65_536)]
    stamps: Annotated[list[_Stamped], Meta(max_length=65_536)] = []
    unstamped: Annotated[dict[Word, Count], Meta(max_length=64)] | None = None


# The recorder was closed. exception: type of an uncaught one; frames: its origin, innermost first.
class _End(Struct, omit_defaults=True):
    exception: Word = ""
    frames: Annotated[list[Word], Meta(max_length=64)] = []


# The default process group was destroyed in order; False: another one was made, or the process failed after that.
class _Left(Struct):
    has_left: bool


# A communication raised an exception, as when another rank is gone.
class _Failed(Struct):
    operation: Word
    group: Identity
    seq: Number
    peer: Number
    exception: Word
    at_ns: Time


# Readers pass over other marks: "count" (tokens, samples and model_flops of the script in the row's step) and
# "hidden_ends" (capture/device/hidden_ends.py). "dropped" counts spans by kind since the previous such mark.
_TYPES: Final[Mapping[str, Any]] = {
    "process_group": _Group,
    "topology": Topology,
    "clock_anchor": _ClockAnchor,
    "dropped": Annotated[dict[Word, Count], Meta(max_length=256)],
    "in_flight": Annotated[list[_InFlight], Meta(max_length=65_536)],
    "activity": _Activity,
    "device_state": _DeviceState,
    "peak_memory": _PeakMemory,
    "graph": _Graph,
    "progress": _Progress,
    "discarded": _Discarded,
    "trigger": _Trigger,
    "problem": _Problem,
    "left": _Left,
    "failed": _Failed,
    "end": _End,
}


def read_mark(name: str, text: str | None, *, most_ranks: int) -> Any:
    """Return the detail of a mark as plain values, without undeclared fields; None for marks without a type.

    Raises:
        ValueError: the detail does not have the type of the mark, or is impossible: ranks are below ``most_ranks``.
    """
    if name not in _TYPES:
        return None
    if name == "process_group":
        return dict(_read_group(text or "{}", most_ranks))
    text = text or "{}"
    detail = msgspec.to_builtins(decode_json(text, _TYPES[name]))
    if name != "topology" or not is_plain_json(text):  # a topology has much text, and every rank its own
        detail = all_printable(detail)
    if name == "topology":
        _check_topology(detail)
    elif name == "graph":
        check_graph(detail, most_ranks)
    return detail


# All ranks of a job record the same groups: of 16,384 ranks, the members of the world would be read and held as often.
@lru_cache(maxsize=256)
def _read_group(text: str, most_ranks: int) -> dict[str, Any]:
    detail: dict[str, Any] = all_printable(msgspec.to_builtins(decode_json(text, _TYPES["process_group"])))
    _check_members(detail["ranks"], most_ranks)
    return Group.of_detail(detail)._asdict()


def _check_members(ranks: list[int], most_ranks: int) -> None:
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
    if any(one[0] not in schema.KINDS or max(one[4:]) > _LARGEST_SUM for one in decoded):
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
        self.has_left = False
        self.failures: list[FailedCommunication] = []

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

    def read(self, name: str, detail: Any, at_ns: int | None = None) -> None:
        """Collect a mark written at ``at_ns``; ignore unknown ones, and without a time also readings of the device."""
        if name == "process_group":
            self.groups[detail["id"]] = Group.of_detail(detail)
        elif name == "topology":
            self.topology = cast(Topology, {**self.topology, **detail})
        elif name == "dropped":
            if at_ns is not None:
                self.drops.append(Drop(at_ns, detail))
            self.dropped = {
                kind: self.dropped.get(kind, 0) + detail.get(kind, 0) for kind in {**self.dropped, **detail}
            }
        elif name == "clock_anchor":
            self.anchors.append(ClockAnchor(**detail))
        elif name == "in_flight":
            self.in_flight = tuple(InFlight(**one) for one in detail)
        elif name == "activity":
            self.activity, self.activity_ns = Activity.of_mark(detail), at_ns
            self.no_progress_ns, self.again_within_ns = detail.get("no_progress_ns", 0), detail.get("again_within_ns")
        elif name == "device_state" and at_ns is not None:
            self.device_states.append(read_state(detail))
        elif name == "peak_memory":
            self.peak_memory = PeakMemory(detail["step"], detail["allocated"], detail["reserved"])
        elif name == "graph":
            self.graphs[detail["id"]] = CapturedGraph.of_mark(detail)
        elif name == "progress" and at_ns is not None:
            self.progress.append((detail["step"], at_ns))
        elif name == "discarded":
            self.discarded = DiscardedSegments(**detail)
        elif name == "trigger":
            self.triggers[detail["id"]] = TriggeredDetail(**detail)
        elif name == "problem":
            if detail.get("is_limit", False):
                self.limits = (*self.limits, detail["message"])
            else:
                self.add_problem(detail["message"])
        elif name == "end":
            self.closed, self.exception = True, detail.get("exception", "")
            self.exception_frames = tuple(detail.get("frames", ()))
        elif name == "left":
            self.has_left = detail["has_left"]
        elif name == "failed":
            self.failures.append(FailedCommunication(**detail))


def read_state(detail: Mapping[str, Any]) -> DeviceState:
    return DeviceState(**{**detail, "slowdowns": tuple(detail.get("slowdowns", ()))})
