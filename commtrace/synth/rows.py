"""Store the rows of one pipeline stage once for all its ranks, as they differ only in their times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from commtrace.trace import schema
from commtrace.trace.schema import Coordinates
from commtrace.trace.spans import Bool, Int64

NAMES: Final = (
    "step",
    "forward",
    "backward",
    "backward weights",
    "optimizer",
    "data",
    "gc",
    "checkpoint",
    "evaluation",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
    "bfloat16",
    "float32",
)
"""Names for the codes in ``Spans.name`` and ``Spans.dtype`` of a synthetic run."""

ROLES: Final = ("none", "world", "tp", "cp", "dp", "dp-cp", "ep", "pp", "mp", "embedding")


class Instant(NamedTuple):
    """A time at which the devices of a stage pass a mark, and how far their hosts are ahead, ns, by rank."""

    time: Int64
    lead: Int64


class SimulatedMessage(NamedTuple):
    """A communication; ``peer`` is the stage of the other side."""

    operation: str
    role: str
    seq: int
    num_bytes: int
    dtype: str = "bfloat16"
    peer: int = -1


class _Template(NamedTuple):
    kind: int
    name: int
    lane: int
    coordinates: Coordinates
    role: int = 0
    seq: int = -1
    num_bytes: int = -1
    dtype: int = -1
    peer: int = -1
    is_async: bool = False
    id: int = -1
    stalled_on: int = -1
    timing: int = schema.CUDA_EVENT_TIMING
    start_exact: bool = True
    end_exact: bool = True


_CODE: Final = {name: code for code, name in enumerate(NAMES)}
_ON_THE_HOST: Final = (schema.DATA, schema.GC, schema.CHECKPOINT, schema.EVALUATION)
NO_LEAD: Final = -(2**62)
"""Instead of a lead, ns: the instant has none."""

_ONLY_WITH_A_LENGTH: Final = (schema.STALL, *_ON_THE_HOST)
"""Left out if they take no time."""


@dataclass(slots=True)
class StageRows:
    """Collects the rows of a stage; times are arrays over its ranks."""

    _templates: list[_Template] = field(default_factory=list)
    _starts: list[Int64] = field(default_factory=list)
    _ends: list[Int64] = field(default_factory=list)
    _start_leads: list[Int64] = field(default_factory=list)
    _end_leads: list[Int64] = field(default_factory=list)
    _ids: int = 0

    def work(self, kind: int, name: str, coordinates: Coordinates, start: Instant, end: Instant) -> None:
        lane = schema.HOST if kind in _ON_THE_HOST else schema.COMPUTE
        timing = schema.HOST_TIMING if lane == schema.HOST else schema.CUDA_EVENT_TIMING
        template = _Template(kind, _CODE[name], lane, coordinates, timing=timing)
        if lane == schema.HOST:
            self._add(template, start.time, end.time)
        else:
            self._add(template, start.time, end.time, start.lead, end.lead)

    def communication(
        self,
        coordinates: Coordinates,
        message: SimulatedMessage,
        start: Int64,
        end: Int64,
        *,
        is_async: bool = False,
    ) -> int:
        """Add a communication and return its id. The caller may fill in ``end`` later."""
        self._ids += 1
        kind = schema.P2P if message.peer >= 0 else schema.COLLECTIVE
        self._add(
            _Template(
                kind, _CODE[message.operation], schema.COMMUNICATION, coordinates, ROLES.index(message.role),
                message.seq, message.num_bytes, _CODE[message.dtype], message.peer, is_async, self._ids,
            ),
            start,
            end,
        )  # fmt: skip
        return self._ids

    def stall(
        self,
        coordinates: Coordinates,
        message: SimulatedMessage,
        communication: int,
        start: Instant,
        end: Instant,
    ) -> None:
        """Add stalls on a communication; a rank that did not wait gets none."""
        role, name = ROLES.index(message.role), _CODE[message.operation]
        self._add(
            _Template(
                schema.STALL, name, schema.COMPUTE, coordinates, role, message.seq, peer=message.peer,
                stalled_on=communication,
            ),
            start.time,
            end.time,
            start.lead,
            end.lead,
        )  # fmt: skip

    def finished(self) -> StageColumns:
        columns = dict(zip(_Template._fields, zip(*self._templates, strict=True), strict=True))
        columns |= dict(zip(Coordinates._fields, zip(*columns.pop("coordinates"), strict=True), strict=True))
        return StageColumns(
            {name: np.array(values, np.int64) for name, values in columns.items()},
            np.ascontiguousarray(np.stack(self._starts).T),
            np.ascontiguousarray(np.stack(self._ends).T),
            np.ascontiguousarray(np.stack(self._start_leads).T),
            np.ascontiguousarray(np.stack(self._end_leads).T),
        )

    def _add(
        self,
        template: _Template,
        start: Int64,
        end: Int64,
        start_lead: Int64 | None = None,
        end_lead: Int64 | None = None,
    ) -> None:
        self._templates.append(template)
        self._starts.append(start)
        self._ends.append(end)
        none = np.full(len(start), NO_LEAD, np.int64)
        self._start_leads.append(none if start_lead is None else start_lead)
        self._end_leads.append(none if end_lead is None else end_lead)


@dataclass(frozen=True, slots=True)
class StageColumns:
    """All rows of a stage: common columns by name, and true times, shape (ranks, rows)."""

    common: dict[str, Int64]
    start: Int64
    end: Int64
    start_lead: Int64  # how far the host was ahead of the device then, ns; NO_LEAD where nothing tells
    end_lead: Int64

    def recorded(self, position: int) -> Bool:
        """Mark the rows that the rank at this position in the stage records."""
        optional = np.isin(self.common["kind"], _ONLY_WITH_A_LENGTH)
        return np.asarray(~optional | (self.end[position] > self.start[position]))
