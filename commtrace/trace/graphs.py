"""CUDA graphs: what each contains is written once, as a mark, and a replay is one row.

Readers get the communication of each replay as rows: :func:`with_contents`. Those that were stamped have times of
their own, and rows of the stalls on them; the times of others are those of the replay, as ``timing`` says: when in it
they ran is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.bounds import Count, Identity, Peer, Step, Time, Word
from commtrace.trace.inputs import decode_json
from commtrace.trace.spans import DTYPE_OF_COLUMN, Bool, Int64, Spans

_MOST_ROWS: Final = 20_000_000
"""Of the contents of all replays that are read at once: a damaged file may say that there are more."""


_MOST_ITEMS: Final = 65_536
_MOST_POSITIONS: Final = 2**20
_Bytes = Annotated[int, Meta(ge=-1, lt=2**47)]
_Position = Annotated[int, Meta(ge=0, lt=_MOST_POSITIONS)]


class ContainedOperation(NamedTuple):
    """One communication of a graph, an item of ``operations`` in its mark (docs/recorded-spans.md).

    Its number is the first of its counter in the replay, and ``offset`` more.
    """

    name: Word
    counter: Count  # position in the graph's counters
    offset: Count
    op_in_seq: Step
    num_bytes: _Bytes
    self_bytes: _Bytes
    dtype: Word | None
    peer: Peer
    is_async: bool
    microbatch: Step
    chunk: Step
    stage: Step
    module: Word  # class of the module whose forward launched it; empty if unknown


class Counter(NamedTuple):
    """A sequence of numbers of a group: of its collectives (``is_send`` is None), or of messages of one kind."""

    group: Identity
    is_send: bool | None
    peer: Peer
    tag: Time


class StampedOperation(NamedTuple):
    """The stamps of a communication of a graph, by their positions in ``stamps`` of a replay: an item of the mark."""

    operation: _Position  # in the graph's operations
    start: _Position
    end: _Position
    # where the capture's stream came to the wait; −1 if it was not seen to wait
    waited_from: Annotated[int, Meta(ge=-1, lt=_MOST_POSITIONS)]
    stall_end: _Position
    is_start_exact: bool
    is_awaited: bool  # the capture's stream has run it, or was seen to wait for it
    has_stall: bool  # False of a member of a coalescing bracket that is not its first


class CapturedGraph(Struct, frozen=True):
    """What a CUDA graph contains: the detail of its mark."""

    id: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # unique on its rank
    phases: Word  # of training, with plus signs between; "graph" if none is known
    is_known: bool  # False: it was captured before the recording began, or by several threads at once
    unlisted: Count  # communications that are not among ``operations``
    counters: Annotated[tuple[Counter, ...], Meta(max_length=_MOST_ITEMS)]
    operations: Annotated[tuple[ContainedOperation, ...], Meta(max_length=_MOST_ITEMS)]
    stamps: Annotated[tuple[StampedOperation, ...], Meta(max_length=_MOST_ITEMS)] = ()
    # How many of the others, by reason; None: no stamps were asked for.
    unstamped: Annotated[Mapping[Word, Count], Meta(max_length=64)] | None = None

    @property
    def num_stamps(self) -> int:
        """Return how many stamps a replay writes."""
        return len({position for stamped in self.stamps for position in stamped[1:5] if position >= 0})

    @property
    def is_stamped_throughout(self) -> bool:
        """Return whether stamps tell when its communication ran, and when it was waited for."""
        return (
            0 < len(self.operations) == len(self.stamps)
            and not self.unlisted
            and all(stamped.is_awaited for stamped in self.stamps)
        )

    def check(self, most_ranks: int) -> None:
        """Raise ValueError if it contradicts itself; ranks of the job are below ``most_ranks``."""
        for operation in self.operations:
            if operation.counter >= len(self.counters):
                raise ValueError("a communication of a graph has a counter that the graph lacks")
            if operation.peer >= most_ranks:
                raise ValueError(f"a graph of a job of {most_ranks} ranks holds rank {operation.peer}")
        if any(stamped.operation >= len(self.operations) for stamped in self.stamps):
            raise ValueError("a graph has stamps of a communication that it lacks")


_MOST_STAMPS: Final = 4 * 65_536
_Offset = Annotated[int, Meta(ge=-(2**50), le=2**50)]


MOST_EXACT_ERROR_NS: Final = 100_000
"""Stamps may be wrong by so much before what they say is a bound only: docs/recorded-spans.md says why."""


class _Replay(Struct):
    first: Annotated[list[Annotated[int, Meta(ge=0, le=2**62)]], Meta(max_length=65_536)]
    first_id: Annotated[int, Meta(ge=-1, le=2**61)] = schema.NOT_APPLICABLE
    stamps: Annotated[list[_Offset | None], Meta(max_length=_MOST_STAMPS)] = []  # ns since the replay's start
    error_ns: Annotated[int, Meta(ge=0, le=2**62)] = 0  # of the stamps: they are right within it


def with_contents(
    block: Block,
    replays: Int64,
    details: Sequence[str | None],
    graphs: Sequence[Mapping[int, CapturedGraph]],
    names: list[str],
) -> Block:
    """Return a block with the communication of its replays as rows behind them.

    Args:
        block: sorted by rank and start.
        replays: its rows of kind ``replay``; where what it contains is not known, its bytes become −1.
        details: of each of them.
        graphs: of each rank of the block, by their id.
        names: strings for the codes of the block; missing ones are appended.
    """
    spans = block.spans
    owners = np.searchsorted(block.bounds, replays, side="right") - 1
    known: dict[tuple[int, int], list[tuple[int, _Replay]]] = {}  # by owner and graph: rows and details
    room = _MOST_ROWS
    for row, owner, detail in zip(replays.tolist(), owners.tolist(), details, strict=True):
        graph = graphs[owner].get(int(spans.id[row]))
        replay = None if graph is None else _replay(detail, len(graph.counters))
        num_rows = 0 if graph is None else len(graph.operations) + len(graph.stamps)
        if graph is None or replay is None or room < num_rows:
            spans.bytes[row] = schema.NOT_APPLICABLE
        elif graph.operations:
            room -= num_rows
            known.setdefault((owner, graph.id), []).append((row, replay))
    if not known:
        return block
    codes = {name: code for code, name in enumerate(names)}
    known_before = len(codes)
    parts, rows_of_parts = [], []
    for (owner, number), of_graph in known.items():
        contained = _Contained(spans, of_graph, graphs[owner][number], codes)
        for part, rows in (contained.communication(), contained.stalls()):
            parts.append(part)
            rows_of_parts.append(rows)
        spans.is_async[contained.resolved] = True
    names += list(codes)[known_before:]
    every = Spans.concatenate([spans, *parts])
    of_replay = np.concatenate([np.arange(len(spans)), *rows_of_parts])
    owner_of_row = np.searchsorted(block.bounds, of_replay, side="right") - 1
    # By start on each rank; what has none of its own stays behind its replay, in the order of the capture.
    order = np.lexsort((of_replay, every.start, owner_of_row))
    lengths = np.bincount(owner_of_row, minlength=len(block.ranks))
    return Block(block.ranks, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), every.take(order))


def knows_its_communication(replays: Spans) -> Bool:
    """Return of each of these rows, replays, whether rows tell when its communication ran and was waited for.

    Of what was read only: files do not say so. ``is_async`` has no other meaning in these rows.
    """
    return np.asarray(replays.is_async)


def _replay(detail: str | None, num_counters: int) -> _Replay | None:
    try:
        replay: _Replay = decode_json(detail or "", _Replay)
    except ValueError:
        return None
    return replay if len(replay.first) == num_counters else None


_NOT_WRITTEN: Final = np.iinfo(np.int64).min
"""Of a stamp, instead of its time."""


class _Contained:
    """The rows of some replays of one graph, replay by replay."""

    def __init__(
        self, spans: Spans, replays: Sequence[tuple[int, _Replay]], graph: CapturedGraph, codes: dict[str, int]
    ) -> None:
        self._spans = spans
        self._graph = graph
        self._replays = np.array([row for row, _ in replays], np.int64)
        self._firsts = np.array([replay.first for _, replay in replays], np.int64).reshape(len(replays), -1)
        self._ids = np.array([replay.first_id for _, replay in replays], np.int64)
        self._is_exact = np.array([replay.error_ns <= MOST_EXACT_ERROR_NS for _, replay in replays], np.bool_)
        operations, stamps = graph.operations, graph.stamps
        # By replay and operation: start, end, begin and end of the stall, all ns.
        times = np.full((len(replays), 4, len(operations)), _NOT_WRITTEN, np.int64)
        for at, (row, replay) in enumerate(replays):
            if not stamps or len(replay.stamps) <= max(max(stamped[1:5]) for stamped in stamps) or replay.first_id < 0:
                continue
            offsets = [*(_NOT_WRITTEN if offset is None else offset for offset in replay.stamps), _NOT_WRITTEN]
            written = np.array(offsets, np.int64)  # with one more, which position −1 finds
            positions = np.array([stamped[1:5] for stamped in stamps], np.int64).T
            offsets_ns = written[positions]
            of_stamped = [stamped.operation for stamped in stamps]
            times[at][:, of_stamped] = np.where(offsets_ns == _NOT_WRITTEN, offsets_ns, offsets_ns + spans.start[row])
        self._times = times
        self._is_stamped = (times[:, :2] != _NOT_WRITTEN).all(axis=1)
        self._is_start_exact = np.zeros(len(operations), np.bool_)
        self._has_stall = np.zeros(len(operations), np.bool_)
        for stamped in stamps:
            self._is_start_exact[stamped.operation] = stamped.is_start_exact
            self._has_stall[stamped.operation] = stamped.has_stall
        self._columns = _columns_of(graph, codes)

    @property
    def resolved(self) -> Int64:
        """Return the rows of replays of which all is known."""
        written = (self._times != _NOT_WRITTEN).all(axis=(1, 2))
        return self._replays[written] if self._graph.is_stamped_throughout else self._replays[:0]

    def communication(self) -> tuple[Spans, Int64]:
        """Return the rows of communication, and those of their replays."""
        rows = np.repeat(self._replays, len(self._graph.operations))
        is_stamped = self._is_stamped.reshape(-1)
        start, end = (self._times[:, at].reshape(-1) for at in (0, 1))
        is_exact = is_stamped & np.repeat(self._is_exact, len(self._graph.operations))
        is_start_exact = is_exact & np.tile(self._is_start_exact, len(self._replays))
        ids = (self._ids[:, None] + np.arange(len(self._graph.operations))).reshape(-1)
        return self._rows(np.arange(len(rows)), {
            "start": np.where(is_stamped, start, self._spans.start[rows]),
            "end": np.where(is_stamped, np.maximum(start, end), self._spans.end[rows]),
            "timing": np.where(is_stamped, schema.GRAPH_STAMP_TIMING, schema.REPLAY_TIMING),
            "start_exact": is_start_exact,
            "end_exact": is_exact,
            "id": np.where(is_stamped, ids, schema.NOT_APPLICABLE),
        }), rows  # fmt: skip

    def stalls(self) -> tuple[Spans, Int64]:
        """Return the rows of the stalls on communication, and those of their replays."""
        start, end = self._times[:, 2], self._times[:, 3]
        is_stall = self._is_stamped & (start != _NOT_WRITTEN) & (end > start) & self._has_stall
        chosen = np.flatnonzero(is_stall.reshape(-1))
        replay, operation = np.divmod(chosen, len(self._graph.operations))
        none = np.full(len(chosen), schema.NOT_APPLICABLE)
        return self._rows(chosen, {
            "kind": np.full(len(chosen), schema.STALL), "lane": np.full(len(chosen), schema.COMPUTE),
            "start": start.reshape(-1)[chosen], "end": end.reshape(-1)[chosen],
            "timing": np.full(len(chosen), schema.GRAPH_STAMP_TIMING),
            "start_exact": self._is_exact[replay], "end_exact": self._is_exact[replay],
            "id": none, "stalled_on": self._ids[replay] + operation, "bytes": none, "self_bytes": none, "dtype": none,
        }), self._replays[replay]  # fmt: skip

    def _rows(self, chosen: Int64, replaced: Mapping[str, Any]) -> Spans:
        """Return rows of some operations, by their positions among those of all replays."""
        graph, spans = self._graph, self._spans
        replay, operation = np.divmod(chosen, len(graph.operations))
        rows = self._replays[replay]
        columns: dict[str, Any] = {name: values[operation] for name, values in self._columns.items()}
        columns["seq"] = self._firsts[replay, columns.pop("counter")] + columns.pop("offset")
        for name in ("start_lead_us", "end_lead_us"):
            columns[name] = np.full(len(chosen), schema.UNKNOWN_LEAD)
        # A replay within a phase is of its place in the schedule: the capture may have been elsewhere.
        for name in ("microbatch", "chunk", "stage"):
            of_replay = getattr(spans, name)[rows]
            columns[name] = np.where(of_replay >= 0, of_replay, columns[name])
        columns["step"] = spans.step[rows]
        columns["lane"] = np.full(len(rows), schema.COMMUNICATION)
        columns["stalled_on"] = np.full(len(rows), schema.NOT_APPLICABLE)
        columns |= replaced
        return Spans(**{name: columns[name].astype(dtype, copy=False) for name, dtype in DTYPE_OF_COLUMN.items()})


def _columns_of(graph: CapturedGraph, codes: dict[str, int]) -> dict[str, Any]:
    """Return what the operations of a graph have in each replay; new strings get codes."""
    columns = dict(zip(ContainedOperation._fields, zip(*graph.operations, strict=True), strict=True))
    for word in chain(columns["name"], columns["dtype"]):
        if word is not None:
            codes.setdefault(word, len(codes))
    is_message = np.array([graph.counters[at].is_send is not None for at in columns["counter"]])
    filled: dict[str, Any] = {
        "kind": np.where(is_message, schema.P2P, schema.COLLECTIVE),
        "name": [codes[name] for name in columns["name"]],
        "group": [graph.counters[at].group for at in columns["counter"]],
        "op_in_seq": columns["op_in_seq"],
        "bytes": columns["num_bytes"],
        "self_bytes": columns["self_bytes"],
        "dtype": [schema.NOT_APPLICABLE if dtype is None else codes[dtype] for dtype in columns["dtype"]],
        "peer": columns["peer"],
        "is_async": columns["is_async"],
        "microbatch": columns["microbatch"],
        "chunk": columns["chunk"],
        "stage": columns["stage"],
    }
    filled = {name: np.array(values, DTYPE_OF_COLUMN[name]) for name, values in filled.items()}
    for name in ("counter", "offset"):
        filled[name] = np.array(columns[name], np.int64)
    return filled
