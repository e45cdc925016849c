"""Programs of ranges of steps, built side by side, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from commtrace.analysis.match import Matches
from commtrace.analysis.replay import JoinedGraph, ReplayError
from commtrace.analysis.replay_edges import Edges
from commtrace.analysis.replay_program import Program, by_rank, common_steps, program_of_steps
from commtrace.analysis.replay_segments import narrow, same_work
from commtrace.analysis.step_bounds import StepBounds
from commtrace.analysis.step_parts import StepPart, StepWorkers, cut
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Columns = TypeVar("_Columns", bound="DataclassInstance")


def build_program(run: Run, matches: Matches, workers: StepWorkers | None = None) -> Program:
    """The dependency graph of the steps that every rank recorded whole.

    The clocks of the ranks must have been aligned. Workers build it range by range of steps.

    Raises:
        ReplayError: no step was recorded by all ranks, or what was recorded contradicts itself.
    """
    steps = common_steps(run)
    if not len(steps):
        raise ReplayError("No step was recorded by all ranks, so nothing can be replayed.")
    bounds = StepBounds.of(run, steps)
    ranges = workers.ranges(steps.tolist()) if workers else []
    if workers is None or len(ranges) < 2:
        return program_of_steps(run, matches, bounds)
    bounds_of_parts = [bounds.of_steps(np.array(own)) for own in ranges]
    parts = [cut(run, matches, own) for own in bounds_of_parts]
    programs = workers.map(
        program_of_steps, [(part.run, part.matches, own) for part, own in zip(parts, bounds_of_parts, strict=True)]
    )
    return _joined(programs, parts)


def _joined(programs: Sequence[Program], parts: Sequence[StepPart]) -> Program:
    """The programs of ascending ranges of steps as one."""
    nodes, pieces, transfers, joins, steps, instances = (
        _before(sizes)
        for sizes in (
            [program.graph.num_nodes for program in programs],
            [len(program.segments) for program in programs],
            [len(program.transfers) for program in programs],
            [int(program.transfers.join.max(initial=-1)) + 1 for program in programs],
            [len(program.steps) for program in programs],
            [int(program.segments.instance.max(initial=-1)) + 1 for program in programs],
        )
    )
    places = _places([program.edges for program in programs])
    rows = [
        (
            narrow(by_rank(program, program.transfers.rank, program.transfers.row, part.rows.__getitem__)),
            narrow(by_rank(program, program.stalls.rank, program.stalls.row, part.rows.__getitem__)),
        )
        for program, part in zip(programs, parts, strict=True)
    ]
    stalls = [
        replace(
            program.stalls,
            row=row,
            lane_edge=place[program.stalls.lane_edge],
            join_node=np.where(program.stalls.join_node >= 0, program.stalls.join_node + node, -1),
        )
        for program, (_, row), place, node in zip(programs, rows, places, nodes, strict=True)
    ]
    segments = _concatenated([program.segments for program in programs], step=steps, instance=instances)
    return Program(
        graph=JoinedGraph(
            tuple(program.graph for program in programs),
            tuple(places),
            tuple(
                np.arange(node, node + program.graph.num_nodes) for program, node in zip(programs, nodes, strict=True)
            ),
        ),
        edges=_joined_edges(programs, nodes, transfers),
        segments=segments,
        transfers=_concatenated(
            [replace(program.transfers, row=row) for program, (row, _) in zip(programs, rows, strict=True)],
            step=steps,
            join=joins,
        ),
        stalls=_concatenated(stalls, step=steps, node=nodes),
        piece_ns=np.concatenate([program.piece_ns for program in programs]),
        piece_segment=np.concatenate(
            [program.piece_segment + offset for program, offset in zip(programs, pieces, strict=True)]
        ),
        steps=np.concatenate([program.steps for program in programs]),
        ranks=programs[0].ranks,
        first_node=np.hstack([program.first_node + node for program, node in zip(programs, nodes, strict=True)]),
        last_node=np.hstack([program.last_node + node for program, node in zip(programs, nodes, strict=True)]),
        start_ns=np.hstack([program.start_ns for program in programs]),
        end_ns=np.hstack([program.end_ns for program in programs]),
        work=same_work(segments),
    )


def _before(sizes: Sequence[int]) -> list[int]:
    """How many there are in the parts before each."""
    return [0, *np.cumsum(sizes)[:-1].tolist()]


def _blocks(edges: Edges) -> tuple[slice, slice, slice]:
    """Edges with pieces alone, with pieces and a transfer, with a transfer alone."""
    both, pieces = len(edges) - len(edges.transfer), len(edges.first_piece)
    return slice(0, both), slice(both, pieces), slice(pieces, len(edges))


def _places(edges: Sequence[Edges]) -> list[Int64]:
    """Of each edge of each part, its number in the whole: there, too, edges with a transfer stand behind those with
    pieces."""
    places = [np.empty(len(part), np.int64) for part in edges]
    reached = 0
    for block in range(3):
        for part, place in zip(edges, places, strict=True):
            own = place[_blocks(part)[block]]
            own[:] = np.arange(reached, reached + len(own))
            reached += len(own)
    return places


def _joined_edges(programs: Sequence[Program], nodes: Sequence[int], transfers: Sequence[int]) -> Edges:
    edges = [program.edges for program in programs]
    pieces = _before([len(program.piece_ns) for program in programs])
    moved = [
        replace(
            own,
            source=own.source + node,
            target=own.target + node,
            first_piece=own.first_piece + piece,
            end_piece=own.end_piece + piece,
            transfer=np.where(own.transfer >= 0, own.transfer + transfer, -1),
        )
        for own, node, piece, transfer in zip(edges, nodes, pieces, transfers, strict=True)
    ]

    def column(name: str, blocks: Sequence[int], *, behind: bool = False) -> Int64:
        """``blocks`` of a column, of all parts one behind the other; it may begin ``behind`` the first block."""
        return np.concatenate(
            [
                getattr(part, name)[_shifted(bounds, -_blocks(part)[0].stop if behind else 0)]
                for block in blocks
                for part in moved
                for bounds in [_blocks(part)[block]]
            ]
        )

    return Edges(
        source=column("source", (0, 1, 2)),
        target=column("target", (0, 1, 2)),
        first_piece=column("first_piece", (0, 1)),
        end_piece=column("end_piece", (0, 1)),
        work_ns=column("work_ns", (0, 1)),
        transfer=column("transfer", (1, 2), behind=True),
        fixed_ns=column("fixed_ns", (0, 1, 2)),
    )


def _shifted(bounds: slice, by: int) -> slice:
    return slice(bounds.start + by, bounds.stop + by)


def _concatenated(parts: list[_Columns], **offsets: Sequence[int]) -> _Columns:
    """Dataclasses of columns one behind the other; to some columns of each part a number is added.

    The list is emptied: of parts that nobody else holds, every column is let go as soon as it has been copied.
    """
    if len(parts) == 1:
        return parts.pop()
    kind = type(parts[0])
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(kind)}
    parts.clear()
    for name, own in offsets.items():
        columns[name] = [values + int(offset) for values, offset in zip(columns[name], own, strict=True)]
    return kind(*(np.concatenate(columns.pop(name)) for name in [*columns]))
