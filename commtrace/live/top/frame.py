"""Define the frame that ``commtrace top`` draws, also as JSON. Unknown values are None, never 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from commtrace.findings.finding import LOST, SLOW, Finding
from commtrace.trace.json_values import JsonObject, fields_to_json

PARTS: Final = (
    "compute",
    "exposed",
    "bubble",
    "data",
    "checkpoint",
    "gc",
    "memory",
    "idle",
    "replay",
    "between",
    "other",
)
"""The parts of a step; they add up to it. Only imported kernel traces have ``memory`` and ``idle``."""

MOST_STEPS: Final = 20
"""Number of the newest steps that are shown by default."""

URGENT: Final = ("SILENT", "STOPPED")
"""Beginnings of notes that need action now."""

STEPS_SHOWN: Final = "steps shown"
MONITOR: Final = "monitor"
BOTH: Final = "monitor and the steps shown"
METRICS: Final = "metrics"
ALERT: Final = "alert"

SOURCES: Final = (STEPS_SHOWN, MONITOR, BOTH, METRICS, ALERT)


@dataclass(frozen=True, slots=True)
class Exposed:
    """Stalls for communication of one role, ns per step."""

    total_ns: int
    wait_ns: int | None = None  # before the last participant arrived; None if ranks were not compared
    transfer_ns: int | None = None  # after that


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank; times are ns per step, the mean of the steps shown. Empty and None mean unknown or none."""

    rank: int  # −1 if a metrics endpoint does not name it
    host: str = ""  # node
    where: str = ""  # position in the parallel dimensions, such as "pp1 dp0"
    step_ns: int | None = None
    parts: Mapping[str, int] = field(default_factory=dict)  # by PARTS; empty if no step was recorded in detail
    exposed: Mapping[str, Exposed] = field(default_factory=dict)  # by role
    # of compute and of time in no span, the device waited for its host for so long at most; None if unknown
    launch_bound_ns: int | None = None
    waits_for: int | None = None  # the rank that it waited for longest, for waits_ns
    waits_ns: int | None = None
    blame_ns: int | None = None  # the wait of all others for this rank
    last_step: int = -1  # −1 before the first
    age_ns: int | None = None  # since its last sign of life
    state: str = ""  # running, silent, ended or stopped
    dropped: int | None = None  # lost spans: all of them in metrics, those of the steps shown in files


@dataclass(frozen=True, slots=True)
class Frame:
    """One look at a job; fields are None or empty if unknown."""

    source: str  # the run directory or address
    time_ns: int  # epoch ns of the look
    run_id: str = ""
    world_size: int | None = None
    hosts: int | None = None  # their number
    first_step: int | None = None
    last_step: int | None = None
    num_steps: int = 0  # the steps shown; parts are means over them
    step_ns: int | None = None  # median of the steps shown, over all ranks
    before_ns: int | None = None  # likewise of the run so far, as before describes
    before: str = ""
    own_cost: str = ""  # of recording, with its error, in words; empty if nobody tells it
    ranks: tuple[RankRow, ...] = ()  # ascending
    findings: tuple[Finding, ...] = ()  # in the order of findings.ranked
    sources: Mapping[str, str] = field(default_factory=dict)  # who says so, by id: see SOURCES
    notes: tuple[str, ...] = ()  # most urgent first
    took_ns: int = 0  # duration of the look

    @property
    def verdict(self) -> str:
        """Return the most urgent note, else the first finding, else that there is none or why that is unknown."""
        if self.notes and self.notes[0].startswith(URGENT):
            return self.notes[0]
        first = next((one for one in self.findings if one.kind != LOST), None)
        if first is None:
            return "No straggler in these steps." if self.num_steps else "No step has ended yet."
        return f"Straggler: {first.line()}." if first.kind == SLOW else first.line()

    @property
    def slow(self) -> tuple[Finding, ...]:
        """Return the findings that something slows the job, costliest first."""
        return tuple(finding for finding in self.findings if finding.kind == SLOW)

    @property
    def slow_ranks(self) -> frozenset[int]:
        return frozenset(rank for finding in self.slow for rank in finding.ranks)

    def to_json(self) -> JsonObject:
        return {"verdict": self.verdict, **fields_to_json(self)}


def choose_ranks(frame: Frame, most: int) -> list[RankRow]:
    """Return up to ``most`` ranks, ascending: slow, silent, waited for, and the extremes of compute."""
    rows = frame.ranks
    if len(rows) <= most:
        return list(rows)
    chosen: dict[int, RankRow] = {}
    for row in _by_interest(frame):
        if len(chosen) >= most:
            break
        chosen.setdefault(row.rank, row)
    return [row for row in rows if row.rank in chosen]


def _by_interest(frame: Frame) -> Iterable[RankRow]:
    rows = frame.ranks
    slow = frame.slow_ranks
    yield from (row for row in rows if row.rank in slow)
    # A few of each kind first: a thousand silent ranks must not hide the one that all wait for.
    yield from _most(rows, lambda row: row.blame_ns or 0)[:2]
    silent = [row for row in rows if row.state == "silent"]
    yield from silent[:4]
    by_work = sorted(rows, key=lambda row: (-row.parts.get("compute", row.step_ns or 0), row.rank))
    for heaviest, lightest in zip(by_work, reversed(by_work), strict=True):
        yield heaviest
        yield lightest


def _most(rows: Sequence[RankRow], of: Callable[[RankRow], int]) -> list[RankRow]:
    return sorted((row for row in rows if of(row)), key=lambda row: (-of(row), row.rank))
