"""Add up the replays of CUDA graphs, with the communication that they contain.

When in a replay its communication ran is known by stamps only: without them the time of a replay with communication is
neither compute nor exposed communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.matching.operations import communication_rows
from commtrace.trace import schema
from commtrace.trace.graphs import CapturedGraph
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64, Spans

_DENSE_NS = 50_000
_PREFIXES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class ReplayKey(NamedTuple):
    """Replays that are added up."""

    phases: str  # of training, with plus signs between; "graph" if none is known
    is_known: bool  # what they contain


@dataclass(frozen=True, slots=True)
class ReplaySums:
    """Sums over the replays of some steps. Those of several windows add up."""

    replays: int
    rank_steps: int  # steps of a rank in which there were any
    time_ns: int
    calls: Mapping[str, int]  # by operation
    num_bytes: Mapping[str, int]  # by operation, of calls of known bytes
    has_stamps: bool = False  # they were asked for
    stamps: int = 0  # that were to be written
    stamped: int = 0  # calls that were to have times of their own
    timed: int = 0  # those that have
    unstamped: Mapping[str, int] = field(default_factory=dict)  # calls that were not to have them, by reason

    def __add__(self, other: ReplaySums) -> ReplaySums:
        return ReplaySums(
            self.replays + other.replays,
            self.rank_steps + other.rank_steps,
            self.time_ns + other.time_ns,
            Counter(self.calls) + Counter(other.calls),
            Counter(self.num_bytes) + Counter(other.num_bytes),
            self.has_stamps or other.has_stamps,
            self.stamps + other.stamps,
            self.stamped + other.stamped,
            self.timed + other.timed,
            Counter(self.unstamped) + Counter(other.unstamped),
        )


@dataclass(frozen=True, slots=True)
class ContainedCalls:
    """The calls of one operation in replays, per rank and step."""

    operation: str
    count: float
    bytes: float


@dataclass(frozen=True, slots=True)
class StampedCalls:
    """How much of the communication in replays has times of its own, per rank and step, where that was asked for."""

    timed: float  # calls
    lost: float  # calls whose stamps were overwritten, or never written
    unstamped: Mapping[str, float]  # calls without stamps, by reason
    ns_per_stamp: int | None  # time of the replays for each of their stamps; None without any

    @classmethod
    def of(cls, sums: ReplaySums) -> StampedCalls:
        """Return the mean of sums."""
        unstamped = sorted(sums.unstamped.items(), key=lambda item: (-item[1], item[0]))
        return cls(
            sums.timed / sums.rank_steps,
            (sums.stamped - sums.timed) / sums.rank_steps,
            {reason: count / sums.rank_steps for reason, count in unstamped},
            sums.time_ns // sums.stamps if sums.stamps else None,
        )

    @property
    def is_complete(self) -> bool:
        return self.timed > 0 and not self.lost and not self.unstamped

    @property
    def sentence(self) -> str:
        """Return how many calls have times of their own, and why the others have none."""
        calls = self.timed + self.lost + sum(self.unstamped.values())
        parts = [f"{self.timed:.3g} of {calls:.3g} calls per step have device times of their own, by stamps"]
        if self.lost:
            parts.append(f"the times of {self.lost:.3g} were lost")
        parts += [f"{count:.3g} have none: {reason}" for reason, count in self.unstamped.items()]
        if self.ns_per_stamp is not None:
            parts.append(f"1 stamp in {self.ns_per_stamp / 1e3:,.0f} µs of the replays")
            if self.ns_per_stamp < _DENSE_NS:
                parts.append("more than 1 in 50 µs: they may cost more than 1% of that time")
        return "; ".join(parts) + "."

    def to_json(self) -> JsonObject:
        return {**fields_to_json(self), "unstamped": dict(self.unstamped), "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays of CUDA graphs in a step of a rank, in the mean of the steps that had any."""

    phases: str
    is_known: bool
    count: float
    time_ns: int
    calls: tuple[ContainedCalls, ...]  # largest first
    stamped: StampedCalls | None = None  # None: stamps were not asked for

    @classmethod
    def of(cls, key: ReplayKey, sums: ReplaySums) -> Replays:
        """Return the mean of sums."""
        calls = [
            ContainedCalls(operation, count / sums.rank_steps, sums.num_bytes.get(operation, 0) / sums.rank_steps)
            for operation, count in sums.calls.items()
        ]
        calls.sort(key=lambda call: (-call.bytes, -call.count, call.operation))
        stamped = StampedCalls.of(sums) if sums.has_stamps and calls else None
        return cls(*key, sums.replays / sums.rank_steps, sums.time_ns // sums.rank_steps, tuple(calls), stamped)

    @property
    def sentence(self) -> str:
        """Return what was replayed, for how long, with what inside."""
        work = "Work" if self.phases == "graph" else self.phases
        from_graphs = "a CUDA graph" if self.count == 1 else "CUDA graphs"
        took = f"{self.time_ns / 1e6:.3g} ms per step" + ("" if self.count == 1 else f" in {self.count:.3g} replays")
        stamped = "" if self.stamped is None else f" {self.stamped.sentence}"
        return f"{work[:1].upper()}{work[1:]} replayed from {from_graphs}: {took}, {self._contents()}.{stamped}"

    def _contents(self) -> str:
        if not self.is_known:
            return "and what they contain is not known: they were captured before the recording began, or beside others"
        if not self.calls:
            return "without communication"
        contain = "contains" if self.count == 1 else "contain"
        calls = [f"{call.count:.3g} {call.operation} ({_bytes(call.bytes)})" for call in self.calls]
        listed = f"which {contain} {', '.join(calls)}"
        if self.stamped is not None and self.stamped.is_complete:
            return f"{listed}, all with device times of their own"
        if self.stamped is not None and self.stamped.timed:
            return f"{listed}, some with device times of their own"
        return f"{listed}: when in it they ran, and whether they were exposed, is not known"

    def to_json(self) -> JsonObject:
        return {
            "phases": self.phases,
            "is_known": self.is_known,
            "count": self.count,
            "time_ns": self.time_ns,
            "calls": [fields_to_json(call) for call in self.calls],
            "stamped": None if self.stamped is None else self.stamped.to_json(),
            "sentence": self.sentence,
        }


def find_replays(run: Run, steps: Sequence[int] | None = None) -> dict[ReplayKey, ReplaySums]:
    """Add up the replays of all ranks, in all or some steps."""
    sums: dict[ReplayKey, ReplaySums] = {}
    for trace in run.ranks.values():
        for key, sums_of_rank in _of_rank(run, trace, steps):
            sums[key] = sums[key] + sums_of_rank if key in sums else sums_of_rank
    return sums


def add_replays(
    some: Mapping[ReplayKey, ReplaySums], more: Mapping[ReplayKey, ReplaySums]
) -> dict[ReplayKey, ReplaySums]:
    """Return the sums of both."""
    return {
        key: some[key] + more[key] if key in some and key in more else (some.get(key) or more[key])
        for key in {**some, **more}
    }


def _of_rank(run: Run, trace: RankTrace, steps: Sequence[int] | None) -> Iterator[tuple[ReplayKey, ReplaySums]]:
    spans = trace.spans
    is_replay = spans.kind == schema.REPLAY
    rows = np.flatnonzero(is_replay if steps is None else is_replay & np.isin(spans.step, steps))
    if not len(rows):
        return
    replays = spans.take(rows)
    is_known = (replays.bytes >= 0).astype(np.int64)
    timed = _timed_calls(spans, rows)
    first, which = grouped(pack((replays.name, is_known)))
    duration = replays.end - replays.start
    for number, example in enumerate(first.tolist()):
        of_key = which == number
        calls, num_bytes = Counter[str](), Counter[str]()
        unstamped: Counter[str] = Counter()
        stamps = stamped = 0
        has_stamps = False
        for graph, count in zip(*np.unique(replays.id[of_key], return_counts=True), strict=True):
            contents = trace.graphs.get(int(graph))
            if contents is not None and is_known[example]:
                for operation, (times, size) in _contents(contents).items():
                    calls[operation] += times * int(count)
                    num_bytes[operation] += size * int(count)
                has_stamps |= contents.unstamped is not None
                stamped += len(contents.stamps) * int(count)
                stamps += contents.num_stamps * int(count)
                for reason, times in (contents.unstamped or {}).items():
                    unstamped[reason] += times * int(count)
        key = ReplayKey(run.names[int(replays.name[example])], bool(is_known[example]))
        rank_steps = len(np.unique(replays.step[of_key]))
        yield key, ReplaySums(
            int(of_key.sum()), rank_steps, int(duration[of_key].sum()), calls, num_bytes, has_stamps, stamps, stamped,
            int(timed[of_key].sum()), unstamped,
        )  # fmt: skip


def _timed_calls(spans: Spans, replays: Int64) -> Int64:
    """Return how many calls with times of their own each of these rows, replays of a rank by start, contains."""
    calls = (spans.timing == schema.GRAPH_STAMP_TIMING) & communication_rows(spans)
    # Starts of calls may be before that of their replay, by the errors of two clocks: middles are within it.
    middles = (spans.start[calls] + spans.end[calls]) // 2
    owners = np.maximum(np.searchsorted(spans.start[replays], middles, side="right") - 1, 0)
    return np.bincount(owners, minlength=len(replays)).astype(np.int64)


def _contents(graph: CapturedGraph) -> Mapping[str, tuple[int, int]]:
    """Return calls and bytes of each operation of a graph."""
    calls, num_bytes = Counter[str](), Counter[str]()
    for operation in graph.operations:
        calls[operation.name] += 1
        num_bytes[operation.name] += max(operation.num_bytes, 0)
    return {name: (count, num_bytes[name]) for name, count in calls.items()}


def _bytes(number: float) -> str:
    return next((f"{number / size:.3g} {unit}" for size, unit in _PREFIXES if number >= size), f"{number:.0f} B")
