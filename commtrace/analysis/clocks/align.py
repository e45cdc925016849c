"""Put the spans of all hosts on one clock, and report the residual.

Ranks of one boot of one host share a clock; clocks of different hosts differ by offset and drift. No member can leave
a synchronising collective before all have arrived, so its ends are one instant seen on several clocks.

>>> aligned = apply(run, align(run))                            # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from msgspec import structs

from commtrace.analysis.clocks.causality import without_violations
from commtrace.analysis.clocks.fit import (
    NEVER_STEPPED,
    LinearClock,
    Observations,
    PiecewiseClock,
    Residual,
    fit_clocks,
    observe,
    unconnected,
)
from commtrace.analysis.clocks.jumps import find_steps, split_at
from commtrace.trace.blocks import Block
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int32, Int64

ClockKey = tuple[str, str]

SHARED_CLOCK: Final = "shared clock"
COLLECTIVE_ENDS: Final = "collective ends"
NOT_ALIGNED: Final = "not aligned"


@dataclass(frozen=True, slots=True)
class AlignedClock:
    """One host's clock relative to the reference clock."""

    host: str
    offset_ns: int  # ahead of the reference, at origin_ns on its own clock
    drift_ppm: float  # runs faster by so many parts per million
    origin_ns: int = 0
    key: ClockKey = ("", "")
    later: PiecewiseClock = NEVER_STEPPED  # parts from its own readings begins[i] on

    @classmethod
    def of(cls, key: ClockKey, clock: PiecewiseClock) -> AlignedClock:
        first = clock.parts[0]
        later = PiecewiseClock(clock.parts[1:], clock.starts)
        return cls(key[0], first.offset_ns, first.drift * 1e6, first.origin_ns, key, later)

    @property
    def is_reference(self) -> bool:
        """Return whether its times are those of the reference clock as they are."""
        return not (self.offset_ns or self.drift_ppm or self.later.parts)

    def to_reference(self, times: Int64, steps: Int32 | None = None) -> Int64:
        """Return these times, taken in these steps of training, on the reference clock."""
        first = LinearClock(self.origin_ns, self.offset_ns, self.drift_ppm * 1e-6)
        return PiecewiseClock((first, *self.later.parts), self.later.starts).to_reference(times, steps)

    def to_json(self) -> JsonObject:
        return {
            "host": self.host,
            "offset_ns": self.offset_ns,
            "drift_ppm": round(self.drift_ppm, 4),
            "steps": [
                {"at_ns": begin, "offset_ns": part.offset_ns, "drift_ppm": round(part.drift * 1e6, 4)}
                for begin, part in zip(self.later.begins, self.later.parts, strict=True)
            ],
        }


@dataclass(frozen=True, slots=True)
class Alignment:
    """The alignment of the hosts' clocks."""

    method: str
    observations: int = 0  # pairs of ends of one collective on two hosts that the fit used
    residual_ns: Mapping[str, int] = field(default_factory=lambda: {"p50": 0, "p99": 0, "max": 0})
    hosts: tuple[AlignedClock, ...] = ()  # every clock; the first one is the reference
    refused: str | None = None  # why the clocks could not be aligned, or None

    @property
    def keeps_order(self) -> bool:
        """Return whether rows stay in order when they are brought to the reference clock."""
        return not any(clock.later.goes_back for clock in self.hosts)

    def to_json(self) -> JsonObject:
        return {
            "method": self.method,
            "observations": self.observations,
            "residual_ns": dict(self.residual_ns) if self.refused is None else None,
            "hosts": [clock.to_json() for clock in self.hosts],
            "refused": self.refused,
        }


def align(run: Run) -> Alignment:
    """Find the differences between the hosts' clocks; the reference is the host on which the run began first."""
    keys = _clocks_earliest_first(run)
    unaligned = tuple(AlignedClock(key[0], 0, 0.0, key=key) for key in keys)
    if len(keys) == 1:
        return Alignment(SHARED_CLOCK, hosts=unaligned)
    observations = observe(run, keys)
    missing = unconnected(observations, len(keys))
    if missing:
        return Alignment(NOT_ALIGNED, len(observations), hosts=unaligned, refused=_refusal([keys[i] for i in missing]))
    clocks = without_violations(run, keys, _fit(observations, len(keys)))
    residual = Residual.of(observations, clocks)
    return Alignment(
        COLLECTIVE_ENDS,
        len(observations),
        {"p50": residual.p50, "p99": residual.p99, "max": residual.max},
        tuple(AlignedClock.of(key, clock) for key, clock in zip(keys, clocks, strict=True)),
    )


def _fit(observations: Observations, count: int) -> list[PiecewiseClock]:
    """Return the clocks, in parts where they were stepped, unless a part then has nothing to be compared with."""
    steps = find_steps(observations)
    parts, owner = split_at(observations, steps, count)
    if not steps or unconnected(parts, len(owner)):
        return [PiecewiseClock((clock,)) for clock in fit_clocks(observations, count)]
    fitted = fit_clocks(parts, len(owner))
    starts = [step.begin for step in steps]
    return [
        PiecewiseClock(
            tuple(part for part, of in zip(fitted, owner, strict=True) if of == clock),
            tuple(start for start, of in zip(starts, owner[count:], strict=True) if of == clock),
        )
        for clock in range(count)
    ]


def apply(run: Run, alignment: Alignment) -> Run:
    """Return the run with all times on the reference host's clock; the run itself if nothing has to move."""
    moving = {clock.key: clock for clock in alignment.hosts if not clock.is_reference}
    if not moving:
        return run
    clocks = {rank: moving.get(trace.clock_key) for rank, trace in run.ranks.items()}
    ranks = {rank: _with_readings(trace, clocks[rank]) for rank, trace in run.ranks.items()}
    moved = (_moved(block, clocks) for block in run.blocks)
    return replace(run, ranks=ranks).with_blocks([*moved] if alignment.keeps_order else [*map(_in_order, moved)])


def _with_readings(trace: RankTrace, clock: AlignedClock | None) -> RankTrace:
    if clock is None:
        return trace
    anchors = trace.anchors or (trace.metadata.anchor,)
    times = clock.to_reference(np.array([anchor.monotonic_ns for anchor in anchors], np.int64))
    moved = tuple(structs.replace(anchor, monotonic_ns=at) for anchor, at in zip(anchors, times.tolist(), strict=True))
    times = clock.to_reference(np.array([state.at_ns for state in trace.device_states], np.int64))
    states = tuple(
        structs.replace(state, at_ns=at) for state, at in zip(trace.device_states, times.tolist(), strict=True)
    )
    return replace(trace, anchors=moved, device_states=states)


def _moved(block: Block, clocks: Mapping[int, AlignedClock | None]) -> Block:
    start, end = block.spans.start.copy(), block.spans.end.copy()
    for rank, rows in block.slices().items():
        clock = clocks[rank]
        if clock is not None:
            steps = block.spans.step[rows]
            start[rows], end[rows] = clock.to_reference(start[rows], steps), clock.to_reference(end[rows], steps)
    return replace(block, spans=block.spans.replace(start=start, end=end))


def _in_order(block: Block) -> Block:
    spans = block.spans
    return replace(block, spans=spans.take(np.lexsort((spans.start - spans.end, spans.start, block.rank()))))


def _clocks_earliest_first(run: Run) -> list[ClockKey]:
    """Return the clocks, ordered by the wall-clock begin of their first span."""
    begins: dict[ClockKey, tuple[int, int]] = {}
    for rank, trace in run.ranks.items():
        begin = (_wall_clock_begin(trace), rank)
        begins[trace.clock_key] = min(begin, begins.get(trace.clock_key, begin))
    return sorted(begins, key=lambda key: begins[key])


def _wall_clock_begin(trace: RankTrace) -> int:
    anchor = trace.metadata.anchor
    first = int(trace.spans.start.min()) if len(trace.spans) else anchor.monotonic_ns
    return anchor.realtime_ns + first - anchor.monotonic_ns


def _refusal(missing: list[ClockKey]) -> str:
    hosts = ", ".join(key[0] for key in missing[:8]) + (" …" if len(missing) > 8 else "")
    return (
        f"no collective that synchronises connects {hosts} with the other hosts, directly or through others; "
        "times of different hosts are not compared. An all_reduce or barrier over all ranks, once per step, is enough."
    )
