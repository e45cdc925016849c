"""CUDA graphs: what each contains is written once, as a mark, and a replay is one row.

Readers get the communication of each replay as rows: :func:`with_contents`. Their times are those of the replay, as
``timing`` says: when in it they ran is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.inputs import decode_json
from commtrace.trace.spans import DTYPE_OF_COLUMN, Int64, Spans

_MOST_ROWS: Final = 20_000_000
"""Of the contents of all replays that are read at once: a damaged file may say that there are more."""


class ContainedOperation(NamedTuple):
    """One communication of a graph, an item of ``operations`` in its mark (docs/recorded-spans.md).

    Its number is the first of its counter in the replay, and ``offset`` more.
    """

    name: str
    counter: int  # position in the graph's counters
    offset: int
    op_in_seq: int
    num_bytes: int
    self_bytes: int
    dtype: str | None
    peer: int
    is_async: bool
    microbatch: int
    chunk: int
    stage: int
    module: str  # class of the module whose forward launched it; empty if unknown


class Counter(NamedTuple):
    """A sequence of numbers of a group: of its collectives (``is_send`` is None), or of messages of one kind."""

    group: int
    is_send: bool | None
    peer: int
    tag: int


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """What a CUDA graph contains."""

    id: int  # unique on its rank
    phases: str  # of training, with plus signs between; "graph" if none is known
    is_known: bool  # False: it was captured before the recording began, or by several threads at once
    unlisted: int  # communications that are not among ``operations``
    counters: tuple[Counter, ...]
    operations: tuple[ContainedOperation, ...]

    @classmethod
    def of_mark(cls, detail: Mapping[str, Any]) -> CapturedGraph:
        """Return the graph of a mark that was read."""
        lists = {
            "counters": tuple(Counter(*counter) for counter in detail["counters"]),
            "operations": tuple(ContainedOperation(*operation) for operation in detail["operations"]),
        }
        return cls(**{**detail, **lists})


def check_graph(detail: Mapping[str, Any], most_ranks: int) -> None:
    """Raise ValueError if the mark of a graph contradicts itself; ranks of the job are below ``most_ranks``."""
    for operation in map(ContainedOperation._make, detail["operations"]):
        if operation.counter >= len(detail["counters"]):
            raise ValueError("a communication of a graph has a counter that the graph lacks")
        if operation.peer >= most_ranks:
            raise ValueError(f"a graph of a job of {most_ranks} ranks holds rank {operation.peer}")


class _Replay(Struct):
    first: Annotated[list[Annotated[int, Meta(ge=0, le=2**62)]], Meta(max_length=65_536)]


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
    firsts: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}  # by owner and graph: rows and first numbers
    room = _MOST_ROWS
    for row, owner, detail in zip(replays.tolist(), owners.tolist(), details, strict=True):
        graph = graphs[owner].get(int(spans.id[row]))
        first = None if graph is None else _first_numbers(detail, len(graph.counters))
        if graph is None or first is None or room < len(graph.operations):
            spans.bytes[row] = schema.NOT_APPLICABLE
        elif graph.operations:
            room -= len(graph.operations)
            firsts.setdefault((owner, graph.id), []).append((row, first))
    if not firsts:
        return block
    codes = {name: code for code, name in enumerate(names)}
    known_before = len(codes)
    rows, contained = [], []
    for (owner, number), known in firsts.items():
        of_graph = np.array([row for row, _ in known], np.int64)
        contained.append(_contents(spans, of_graph, [first for _, first in known], graphs[owner][number], codes))
        rows.append(np.repeat(of_graph, len(graphs[owner][number].operations)))
    names += list(codes)[known_before:]
    every = Spans.concatenate([spans, *contained])
    # Each behind its replay, in the order of the capture.
    order = np.argsort(np.concatenate([np.arange(len(spans)), *rows]), kind="stable")
    owner_of_row = np.searchsorted(block.bounds, np.concatenate(rows), side="right") - 1
    lengths = np.diff(block.bounds) + np.bincount(owner_of_row, minlength=len(block.ranks))
    return Block(block.ranks, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), every.take(order))


def _first_numbers(detail: str | None, num_counters: int) -> list[int] | None:
    try:
        first: list[int] = decode_json(detail or "", _Replay).first
    except ValueError:
        return None
    return first if len(first) == num_counters else None


def _contents(
    spans: Spans, replays: Int64, firsts: Sequence[Sequence[int]], graph: CapturedGraph, codes: dict[str, int]
) -> Spans:
    """Return the rows of some replays of one graph, replay by replay."""
    operations = graph.operations
    columns = dict(zip(ContainedOperation._fields, zip(*operations, strict=True), strict=True))
    for word in chain(columns["name"], columns["dtype"]):
        if word is not None:
            codes.setdefault(word, len(codes))
    counter = np.array(columns["counter"], np.int64)
    is_message = np.array([graph.counters[at].is_send is not None for at in columns["counter"]])
    per_operation: dict[str, Any] = {
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
    rows = np.repeat(replays, len(operations))
    filled: dict[str, Any] = {
        name: np.tile(np.array(values, DTYPE_OF_COLUMN[name]), len(replays)) for name, values in per_operation.items()
    }
    filled["seq"] = (np.array(firsts, np.int64).reshape(len(replays), -1)[:, counter] + columns["offset"]).reshape(-1)
    # A replay within a phase is of its place in the schedule: the capture may have been elsewhere.
    for name in ("microbatch", "chunk", "stage"):
        of_replay = getattr(spans, name)[rows]
        filled[name] = np.where(of_replay >= 0, of_replay, filled[name])
    constants = {
        "lane": schema.COMMUNICATION, "id": schema.NOT_APPLICABLE, "stalled_on": schema.NOT_APPLICABLE,
        "timing": schema.REPLAY_TIMING, "start_exact": False, "end_exact": False,
        "start_lead_us": schema.UNKNOWN_LEAD, "end_lead_us": schema.UNKNOWN_LEAD,
    }  # fmt: skip
    for name, value in constants.items():
        filled[name] = np.full(len(rows), value, DTYPE_OF_COLUMN[name])
    for name in ("start", "end", "step"):
        filled[name] = getattr(spans, name)[rows]
    return Spans(**{name: filled[name].astype(dtype, copy=False) for name, dtype in DTYPE_OF_COLUMN.items()})
