"""Runs made by hand: exact rows, for tests that know every answer.

>>> run = make_run({0: [span("forward", 0, 10)], 1: [span("forward", 2, 12)]})
>>> run.ranks[1].spans.end.tolist()
[12]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commtrace.trace.metadata import ClockAnchor, Group, RankMetadata, group_id
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Spans

Row = dict[str, Any]

EPOCH_NS = 1_700_000_000_000_000_000
"""Wall clock of every made run at instant 0 of the true time."""


def group(role: str, *ranks: int, ordinal: int = 0) -> Group:
    """A process group of these ranks."""
    return Group(id=group_id(ranks, ordinal), ranks=tuple(sorted(ranks)), ordinal=ordinal, role=role)


def span(kind: str, start: int, end: int, **columns: Any) -> Row:
    """A row of any kind but communication; on the lane that its kind belongs to."""
    lane = "host" if kind in ("data", "checkpoint", "gc", "evaluation") else "compute"
    return {"kind": kind, "name": kind, "lane": lane, "start": start, "end": end, **columns}


def collective(operation: str, where: Group, seq: int, start: int, end: int, **columns: Any) -> Row:
    """A collective's row on one rank. Give ``id`` when something stalls on it."""
    row = {"kind": "collective", "name": operation, "lane": "communication", "start": start, "end": end}
    return {**row, "group": where.id, "seq": seq, "bytes": 1024, "dtype": "float32", **columns}


def p2p(operation: str, where: Group, peer: int, seq: int, start: int, end: int, **columns: Any) -> Row:
    """A ``send`` or ``recv`` row; ``peer`` is the global rank of the other side."""
    return {**collective(operation, where, seq, start, end), "kind": "p2p", "peer": peer, **columns}


def stall(on: Row, start: int, end: int, **columns: Any) -> Row:
    """The lane standing still for a communication that was given an ``id``."""
    copied: Row = {name: on[name] for name in ("name", "group", "seq", "op_in_seq", "peer") if name in on}
    where: Row = {name: on[name] for name in ("step", "microbatch", "chunk", "stage") if name in on}
    return {**copied, **where, "kind": "stall", "start": start, "end": end, "stalled_on": on["id"], **columns}


def make_run(
    rows: Mapping[int, Sequence[Row]],
    groups: Sequence[Group] = (),
    *,
    nodes: Mapping[int, str] | None = None,
    world_size: int | None = None,
    anchors: Mapping[int, ClockAnchor] | None = None,
    **of_every_rank: Any,
) -> Run:
    """A run that holds exactly these rows, sorted as the reader sorts them.

    Args:
        rows: by rank.
        groups: each is told to its members.
        nodes: host of each rank; ``node0`` without.
        world_size: where ranks are missing.
        anchors: of ranks whose wall clock matters; without, monotonic 0 is the epoch of the test.
        of_every_rank: fields of :class:`RankTrace`; a callable is called with the rank.
    """
    names: list[str] = []
    ranks = {}
    for rank in sorted(rows):
        ordered = sorted(rows[rank], key=lambda row: (row["start"], -row["end"]))
        extras = {name: value(rank) if callable(value) else value for name, value in of_every_rank.items()}
        ranks[rank] = RankTrace(
            metadata=metadata(
                rank,
                world_size=world_size or max(rows) + 1,
                node=(nodes or {}).get(rank, "node0"),
                anchor=(anchors or {}).get(rank, ClockAnchor(0, EPOCH_NS)),
            ),
            spans=Spans.from_rows(ordered, names),
            groups={one.id: one for one in groups if rank in one.ranks},
            **extras,
        )
    return Run(path=Path("made-run"), ranks=ranks, names=names)


def metadata(rank: int, *, world_size: int = 1, node: str = "node0", anchor: ClockAnchor | None = None) -> RankMetadata:
    """Identity of a rank of a made run."""
    return RankMetadata(
        run_id="made-run",
        attempt=0,
        session=1,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        host=node,
        node=node,
        boot_id=f"boot-of-{node}",
        pid=1000 + rank,
        backend="gloo",
        device="cpu",
        device_uuid="",
        versions={"python": "3.11.7", "torch": "2.13.0", "commtrace": "0.1.0"},
        anchor=anchor or ClockAnchor(0, EPOCH_NS),
    )
