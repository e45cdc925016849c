"""The lanes of many ranks, put one behind the other part by part, as they are read.

What was read of a part is let go as soon as it has its place, and the next part takes its memory. Were all parts kept
until the last one is there, each column would be in memory twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.replay_lane import Lanes, Launches, ReadLanes, Starts, Waits
from commtrace.analysis.replay_segments import Segments

_ROOM: Final = 1.1
"""So many times what the parts so far lead to expect; memory that is never written to is none."""

_NESTED: Final[Mapping[str, type[Any]]] = {"segments": Segments, "starts": Starts, "waits": Waits}


class LaneColumns:
    """Takes the lanes of each part of a run, from several threads and in any order.

    Args:
        rows: how many rows each part has: what is expected of those to come is in proportion.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows
        self._early: dict[int, ReadLanes] = {}
        self._next = 0
        self._is_appending = False
        self._changes = threading.Lock()
        self._columns: dict[str, _Column] = {}
        self._only: ReadLanes | None = None

    def put(self, number: int, read: ReadLanes) -> None:
        """What was read of this part; it has its place, or waits for that of an earlier one, when this returns."""
        with self._changes:
            self._early[number] = read
            if self._is_appending:
                return  # whoever does goes on with this
            self._is_appending = True
        del read
        while (following := self._take_next()) is not None:
            self._append(following)

    def joined(self) -> ReadLanes:
        """The lanes of all parts, once all of them are there."""
        if self._only is not None:
            return self._only
        lanes: dict[str, Any] = {name: self._joined(kind, f"{name}.") for name, kind in _NESTED.items()}
        lanes |= {field.name: self._columns[field.name].values for field in fields(Lanes) if field.name not in lanes}
        return ReadLanes(Lanes(**lanes), self._joined(Launches, "launches."))

    def _joined(self, kind: type[Any], prefix: str) -> Any:
        return kind(*(self._columns[prefix + field.name].values for field in fields(kind)))

    def _take_next(self) -> ReadLanes | None:
        with self._changes:
            read = self._early.pop(self._next, None)
            self._is_appending = read is not None
            self._next += self._is_appending
            return read

    def _append(self, read: ReadLanes) -> None:
        if len(self._rows) == 1:
            self._only = read
            return
        share = sum(self._rows[: self._next]) / max(sum(self._rows), 1)
        lanes = self._counted_on(read.lanes)
        columns = {field.name: getattr(lanes, field.name) for field in fields(Lanes) if field.name not in _NESTED}
        for name, part in {**{name: getattr(lanes, name) for name in _NESTED}, "launches": read.launches}.items():
            columns |= {f"{name}.{field.name}": getattr(part, field.name) for field in fields(part)}
        for name, values in columns.items():
            self._columns.setdefault(name, _Column()).append(values, share)

    def _counted_on(self, lanes: Lanes) -> Lanes:
        """Its nodes, pieces, segments and starts, numbered on from those of the parts before."""
        if not self._columns:
            return lanes
        node, piece, segment, start = (
            self._columns[name].length for name in ("node_piece", "piece_ns", "segments.rank", "starts.node")
        )
        starts, waits = lanes.starts, lanes.waits
        return replace(
            lanes,
            node_piece=lanes.node_piece + piece,
            first_node=lanes.first_node + node,
            last_node=lanes.last_node + node,
            piece_segment=lanes.piece_segment + segment,
            starts=replace(starts, node=starts.node + node, piece=starts.piece + piece),
            waits=replace(waits, node=waits.node + node, launch=np.where(waits.launch >= 0, waits.launch + start, -1)),
        )


class _Column:
    """A column that grows."""

    def __init__(self) -> None:
        self.length = 0
        self._memory: npt.NDArray[Any] | None = None

    @property
    def values(self) -> npt.NDArray[Any]:
        assert self._memory is not None, "nothing was put"
        return self._memory[: self.length]

    def append(self, values: npt.NDArray[Any], share: float) -> None:
        """Of all that is to come, with these this share will be there."""
        end = self.length + len(values)
        if self._memory is None or end > len(self._memory):
            expected = int(end / share * _ROOM) + 1 if share else end
            grown = np.empty((expected, *values.shape[1:]), values.dtype)
            if self._memory is not None:
                grown[: self.length] = self.values
            self._memory = grown
        self._memory[self.length : end] = values
        self.length = end
