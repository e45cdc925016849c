"""Find communications whose members did not call the same thing, also those that never ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.matching.arrivals import GroupLabel, RankArrivals, describe_group, known_groups
from commtrace.analysis.matching.match import Rows, bucket, concatenate, differences, gather
from commtrace.trace import schema
from commtrace.trace.hang_report import InFlight
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64, Spans

MOST_MISMATCHES: Final = 20
"""Number of mismatches described; the others are counted."""


class Call(NamedTuple):
    """The call of some of the members; ``bytes`` is None where its payload is unknown."""

    operation: str
    bytes: int | None
    dtype: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One communication, called differently by its members."""

    group: GroupLabel
    seq: int
    differ: tuple[str, ...]  # operation, bytes, dtype, or sides (two sends, or two receives)
    calls: tuple[Call, ...]
    ended: bool  # all members that called it finished it

    @property
    def may_be_harmless(self) -> bool:
        """Return whether only the sizes differ, as those of sparse tensors may, and all members finished."""
        return self.ended and self.differ == ("bytes",)

    def to_json(self) -> JsonObject:
        return {**fields_to_json(self), "may_be_harmless": self.may_be_harmless}


def find_mismatches(run: Run, arrivals: Mapping[int, RankArrivals]) -> tuple[list[Mismatch], int]:
    """Return the first mismatches, those that never ended first, and the number of all."""
    in_flight = _in_flight(run, arrivals)
    whole = replace(run, names=in_flight.names)
    rows = gather(run)
    if in_flight.ranks:
        rows = concatenate([rows, gather(in_flight)])
    if not len(rows.rank):
        return [], 0
    buckets = bucket(rows)
    differing = differences(whole, rows, buckets)
    which = np.flatnonzero(np.logical_or.reduce(list(differing.values())))
    if not len(which):
        return [], 0
    ended = np.minimum.reduceat(rows.finished[buckets.order].astype(np.int8), buckets.first)[which].astype(np.bool_)
    chosen = which[np.argsort(ended, kind="stable")][:MOST_MISMATCHES]
    groups = known_groups(run)
    described = []
    for number in chosen:
        members = np.sort(buckets.order[buckets.first[number] : buckets.first[number] + buckets.size[number]])
        group = int(rows.spans.group[members[0]])
        described.append(
            Mismatch(
                group=describe_group(groups.get(group), group),
                seq=int(rows.spans.seq[members[0]]),
                differ=tuple(aspect for aspect, mask in differing.items() if mask[number]),
                calls=_calls(whole, rows, members),
                ended=bool(rows.finished[members].all()),
            )
        )
    return described, len(which)


def _calls(run: Run, rows: Rows, members: Int64) -> tuple[Call, ...]:
    spans = rows.spans
    ranks_of_call: dict[tuple[str, int, str | None], list[int]] = {}
    for row in members.tolist():
        name, dtype = int(spans.name[row]), int(spans.dtype[row])
        call = (run.names[name] if name >= 0 else "", int(spans.bytes[row]), run.names[dtype] if dtype >= 0 else None)
        ranks_of_call.setdefault(call, []).append(int(rows.rank[row]))
    return tuple(
        Call(operation, num_bytes if num_bytes >= 0 else None, dtype, tuple(sorted(ranks)))
        for (operation, num_bytes, dtype), ranks in ranks_of_call.items()
    )


def _in_flight(run: Run, arrivals: Mapping[int, RankArrivals]) -> Run:
    """Return the communications in flight as rows of their own; names are added to the run's."""
    names = list(run.names)
    ranks = {
        rank: _unfinished(trace, calls, names)
        for rank, trace in run.ranks.items()
        if not trace.metadata.is_dump  # which has rows of them
        and (calls := [call for call in arrivals[rank].in_flight if call.seq >= 0])
    }
    return replace(run, ranks=ranks, names=names)


def _unfinished(trace: RankTrace, in_flight: Sequence[InFlight], names: list[str]) -> RankTrace:
    numbers = [-2 - position for position in range(len(in_flight))]
    rows: list[dict[str, object]] = [
        {
            "kind": schema.P2P if call.is_p2p else schema.COLLECTIVE,
            "name": call.operation,
            "lane": schema.COMMUNICATION,
            "start": call.start,
            "end": call.start,
            "group": call.group,
            "seq": call.seq,
            "bytes": call.bytes,
            "peer": call.peer,
            "id": number,
            **({"dtype": call.dtype} if call.dtype else {}),
        }
        for number, call in zip(numbers, in_flight, strict=True)
    ]
    return replace(trace, spans=Spans.from_rows(rows, names), details=dict.fromkeys(numbers, '{"unfinished":true}'))
