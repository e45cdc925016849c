"""Find a job that hangs before its first step: in a call that makes process groups, or in what comes before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from commtrace.analysis.hangs.rank_state import ENDED, RUNNING, Ending, own_frame
from commtrace.analysis.matching.arrivals import RankArrivals, reports_activity
from commtrace.findings.formatting import format_duration, format_ranks
from commtrace.trace.run import RankTrace, Run

_SHORTEST_NS: Final = 20_000_000_000
"""Ranks that start, or import, at different speeds wait a few seconds for each other."""

_WITHOUT_STEP_NS: Final = 30_000_000_000

_MODULE: Final = "/torch/distributed/distributed_c10d.py:"
_BARRIER: Final = "monitored_barrier"
_CALLS: Final = frozenset(
    {
        "init_process_group", "new_group", "split_group", "shrink_group", "new_subgroups",
        "new_subgroups_by_enumeration", _BARRIER,
    }
)  # fmt: skip
"""Functions of torch in which ranks wait for each other without any communication that is seen."""

_MOST_PLACES: Final = 8


class SetupCall(NamedTuple):
    """Ranks that wait in one call of torch, at one place of the script."""

    call: str
    at: str  # "file:line function"
    ranks: tuple[int, ...]
    waited_ns: int  # the longest


class SetupPlace(NamedTuple):
    """Ranks at one place of the script."""

    at: str  # "file:line function"
    ranks: tuple[int, ...]


class SetupHang(NamedTuple):
    """A job that does not get to its first step."""

    calls: tuple[SetupCall, ...]  # empty: no rank waits in such a call, and none has come to a communication or step
    elsewhere: tuple[SetupPlace, ...]  # ranks that are in none of the calls
    ended: tuple[int, ...]  # ranks that have ended, and so will not come
    unknown: tuple[int, ...]  # ranks without files
    waited_ns: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks that are in none of the calls, and whose process may live."""
        return tuple(sorted(rank for place in self.elsewhere for rank in place.ranks))


def find_setup_hang(run: Run, arrivals: Mapping[int, RankArrivals], endings: Mapping[int, Ending]) -> SetupHang | None:
    """Return where ranks wait for each other to make process groups, or have begun no step for long; else None."""
    there = {rank: trace for rank, trace in run.ranks.items() if endings[rank].state != ENDED and trace.exit is None}
    waits: dict[tuple[str, str], list[int]] = {}
    for rank, trace in there.items():
        call = _call(trace)
        if call is not None:
            waits.setdefault(call, []).append(rank)
    stalled = {rank: arrivals[rank].stalled_ns for rank in there if rank in arrivals}
    calls = tuple(
        SetupCall(call, at, tuple(ranks), max(stalled[rank] for rank in ranks)) for (call, at), ranks in waits.items()
    )
    ended = tuple(rank for rank in run.ranks if rank not in there)
    waiting = {rank for call in calls for rank in call.ranks}
    if calls:
        waited = max(call.waited_ns for call in calls)
        is_hung = waited >= _SHORTEST_NS
    else:
        waited = min(stalled.values(), default=0)
        is_hung = not ended and waited >= _WITHOUT_STEP_NS and not any(map(_has_begun, run.ranks.values()))
    if not is_hung:
        return None
    places: dict[str, list[int]] = {}
    for rank, trace in there.items():
        if rank not in waiting:
            places.setdefault(_place(trace), []).append(rank)
    unknown = tuple(rank for rank in range(run.world_size) if rank not in run.ranks)
    elsewhere = tuple(SetupPlace(place, tuple(ranks)) for place, ranks in places.items())
    return SetupHang(calls, elsewhere, ended, unknown, waited)


def setup_findings(hang: SetupHang, endings: Mapping[int, str]) -> Iterable[str]:
    """Yield a sentence on the ranks that wait, one on those that have not come, and where each is."""
    if not hang.calls:
        places = "; ".join(_places(hang.elsewhere))
        yield (
            f"No rank has begun a step or communicated: no progress for {format_duration(hang.waited_ns)}. They are: "
            f"{places}.{_without_files(hang.unknown)}"
        )
        return
    waits = [
        f"{format_ranks(call.ranks)} {'waits' if len(call.ranks) == 1 else 'wait'} in {call.call} at {call.at} for "
        f"{format_duration(call.waited_ns)}"
        for call in sorted(hang.calls, key=lambda call: -len(call.ranks))
    ]
    where = "in a barrier" if all(call.call == _BARRIER for call in hang.calls) else "while process groups are made"
    yield f"The job hangs {where}: {'; '.join(waits)}."
    absent = _places(hang.elsewhere)
    if hang.ended:
        absent.append(f"{format_ranks(hang.ended)}, which ended and will not come")
    if hang.unknown:
        absent.append(f"{format_ranks(hang.unknown)}, of which there are no files")
    silent = [rank for rank in hang.missing if endings.get(rank) not in (RUNNING, None)]
    if absent:
        yield f"Not come: {'; '.join(absent)}."
    elif len(hang.calls) > 1:
        yield "They wait for each other in different calls: all ranks must make the same groups in the same order."
    else:
        yield "No rank is missing there: look at the network, and at what each rank passes to the call."
    if silent and len(silent) < len(hang.missing):
        yield f"Of them, {format_ranks(silent)} gave no sign of life any more."


def _places(elsewhere: Sequence[SetupPlace]) -> list[str]:
    places = [f"{format_ranks(place.ranks)} at {place.at}" for place in elsewhere[:_MOST_PLACES]]
    more = sum(len(place.ranks) for place in elsewhere[_MOST_PLACES:])
    return [*places, f"{more} more ranks elsewhere"] if more else places


def _without_files(unknown: Sequence[int]) -> str:
    return f" Of {format_ranks(unknown)} there are no files." if unknown else ""


def _call(trace: RankTrace) -> tuple[str, str] | None:
    """Return the call in which a rank waits, the outermost one, and the place of the script that called it."""
    if trace.activity is None or not reports_activity(trace):
        return None
    frames = trace.activity.frames
    for position in range(len(frames) - 1, -1, -1):
        where, _, function = frames[position].rpartition(" ")
        if _MODULE in where and function in _CALLS:
            return function, own_frame(frames[position:]) or frames[-1]
    return None


def _place(trace: RankTrace) -> str:
    frames = trace.activity.frames if trace.activity is not None else ()
    return own_frame(frames) or next(iter(frames), "a place that is not known")


def _has_begun(trace: RankTrace) -> bool:
    if trace.activity is None or trace.activity.at[0] >= 0:
        return True
    return bool(len(trace.spans)) or any(trace.activity.collectives.values()) or bool(trace.activity.p2p)
