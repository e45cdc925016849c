"""Reports of hangs."""

from __future__ import annotations

from dataclasses import replace

from commtrace.trace.hang_report import Activity, HangReport, InFlight, ThreadStack
from tests.factory import group, metadata

EVERYONE = group("dp", 0, 1, 2)


def hang(rank: int, *frames: str, session: int = 1) -> HangReport:
    return HangReport(
        time=1_700_000_000.0 + rank,
        monotonic_ns=1,
        no_progress_ns=60_000_000_000 + rank,
        metadata=replace(metadata(rank, world_size=3), session=session),
        groups=(EVERYONE,),
        coordinates={},
        parallel={},
        activity=Activity((3, -1, -1, -1), (), {}, (), ()),
        in_flight=(InFlight("all_reduce", EVERYONE.id, 7),),
        threads=(ThreadStack("MainThread", frames),),
    )
