"""Made runs that stopped: ranks whose files end with communications in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from commtrace.trace.hang_report import Activity, InFlight
from commtrace.trace.metadata import Group
from commtrace.trace.run import Run
from tests.factory import EPOCH_NS, Row, collective, make_run

SECOND = 1_000_000_000
END = 100 * SECOND
"""When every rank wrote its last word, unless a test says otherwise."""

NOW_NS = EPOCH_NS + END + 3600 * SECOND


def done(groups: Mapping[Group, int]) -> list[Row]:
    """The rows of a rank that has completed so many all_reduces in each of these groups, 1 ms each."""
    return [
        collective("all_reduce", group, seq, seq * SECOND, seq * SECOND + 1_000_000, id=1000 * position + seq)
        for position, (group, count) in enumerate(groups.items())
        for seq in range(count)
    ]


def flight(group: Group, seq: int, *, since: int = 40, blocking: bool | None = True, **changes: Any) -> dict[str, Any]:
    """A communication in flight since that second."""
    return {
        "operation": "all_reduce", "group": group.id, "seq": seq, "peer": -1, "bytes": 1024, "dtype": "float32",
        "is_async": False, "start": since * SECOND, "blocking": blocking, **changes,
    }  # fmt: skip


def activity(quiet: int = 60, **changes: Any) -> dict[str, Any]:
    """What a rank says that has been quiet for so many seconds."""
    return {
        "at": [-1, -1, -1, -1], "open": [], "collectives": {}, "p2p": [], "frames": [],
        "no_progress_ns": quiet * SECOND, "again_within_ns": 3 * SECOND, **changes,
    }  # fmt: skip


def stopped_run(
    rows: Mapping[int, Sequence[Row]],
    groups: Sequence[Group],
    *,
    in_flight: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    activities: Mapping[int, Mapping[str, Any]] | None = None,
    last: Mapping[int, int] | None = None,
    closed: Sequence[int] = (),
    exceptions: Mapping[int, str] | None = None,
    world_size: int | None = None,
) -> Run:
    """A run that ended in no order; ``last`` is the second of the last word of ranks that stopped earlier."""
    run = make_run(rows, groups, closed=False, world_size=world_size)
    ranks = {}
    for rank, trace in run.ranks.items():
        end = (last or {}).get(rank, END // SECOND) * SECOND
        last_report = (activities or {}).get(rank, activity(0))
        ranks[rank] = replace(
            trace,
            in_flight=tuple(InFlight(**one) for one in (in_flight or {}).get(rank, ())),
            activity=msgspec.convert(last_report, Activity),
            activity_ns=end,
            no_progress_ns=last_report["no_progress_ns"],
            again_within_ns=last_report["again_within_ns"],
            last_written_ns=end,
            closed=rank in closed,
            exception=(exceptions or {}).get(rank, ""),
        )
    return replace(run, ranks=ranks)
