"""The verdict on one straggler."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from commtrace.analysis.clocks.time_of_day import iso_utc_if_known
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class NamedRank:
    """One of the ranks that a verdict names."""

    rank: int
    host: str
    excess_ms_per_step: float  # of its work over normal
    # Lost to it in a step with every other slow rank mended; None if there are too many to try. Ranks that are slow
    # side by side each cost all of it.
    share_ms_per_step: float | None = None
    alone_ms_per_step: float | None = None  # saved in a step if only this rank were mended


class VerdictStretch(NamedTuple):
    """Steps of a run in which one thing held, from the first to the last."""

    first: int
    last: int
    cost_ms_per_step: float
    since_ns: int | None = None  # epoch; None if unknown
    until_ns: int | None = None  # epoch; None if unknown

    def to_json(self) -> JsonObject:
        return {
            "first": self.first,
            "last": self.last,
            "cost_ms_per_step": self.cost_ms_per_step,
            "since_utc": iso_utc_if_known(self.since_ns),
            "until_utc": iso_utc_if_known(self.until_ns),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause of lost time."""

    rank: int  # the slowest; −1 if the cause moves between ranks
    host: str  # its node; empty if the cause moves
    place: str  # one of PLACES
    cause: str  # one of CAUSES
    who: str  # rank, host or stage as a sentence names it
    # Saved in a step with everything else that is named mended as well: the median over steps; the mean of pauses and
    # of what lasts for a part of the run.
    cost_ms_per_step: float
    gpu_hours_per_day: float  # the same over all devices of the job, if it runs all day
    persistence: float  # share of the steps in which it costs at least half of that
    evidence: str
    next_step: str
    occurrence: str = ""  # of what happened in few steps only: ``once, in step 7: 2.2 s``
    share_of_step: float = 0.0  # the cost, of the mean step
    members: tuple[NamedRank, ...] = ()  # slowest first
    stretches: tuple[VerdictStretch, ...] = ()  # the steps in which it lasts, if these are not all
    since_step: int = -1  # the first step in which it costs at least half of that; −1 if none does
    first_compared_step: int = -1  # of the run; what began before cannot be dated; −1 before that is looked up
    since_ns: int | None = None  # begin of that step, epoch; None if unknown
    cost_is_bound: bool = False  # it costs no more than that

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the slow ranks, slowest first."""
        return tuple(member.rank for member in self.members) or ((self.rank,) if self.rank >= 0 else ())

    def to_json(self) -> JsonObject:
        fields = asdict(self)
        del fields["since_ns"], fields["first_compared_step"]
        stretches = [stretch.to_json() for stretch in self.stretches]
        return {**fields, "stretches": stretches, "since_utc": iso_utc_if_known(self.since_ns)}


def on_gpu(run: Run) -> bool:
    """Return whether the job ran on GPUs, as far as was recorded."""
    return is_gpu(run.any_metadata.device)


def is_gpu(device: str) -> bool:
    """Return whether the name of a rank's device is that of a GPU."""
    return bool(device) and not device.endswith("cpu") and not device.startswith("simulated")
