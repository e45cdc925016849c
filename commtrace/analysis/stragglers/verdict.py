"""The verdict on one straggler."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from commtrace.analysis.clocks.time_of_day import iso_utc
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run

RANKS: Final = "ranks"
HOST: Final = "host"
TENSOR_GROUP: Final = "tensor_group"
STAGE: Final = "stage"
LINK: Final = "link"
NETWORK: Final = "network"
JOB: Final = "job"

PLACES: Final = (RANKS, HOST, TENSOR_GROUP, STAGE, LINK, NETWORK, JOB)
"""Where time is lost: on ranks that have nothing else in common; a host or a tensor-parallel group, nearly all of whose
ranks are slow; a pipeline stage; a link between ranks; the network of hosts; now one rank, now another of the job."""

CAUSES: Final = (
    "compute",
    "forward",
    "backward",
    "optimizer",
    "throttled_device",
    "communication",
    "data",
    "gc",
    "checkpoint",
    "evaluation",
    "late_launch",
    "stage_imbalance",
    "sequence_length_imbalance",
    "unknown",
)
"""Why: ``forward``, ``backward`` and ``optimizer`` where only that phase is slow, ``compute`` where all work is;
``late_launch`` where a phase begins late, and nothing that has a span came before it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the ranks that a verdict names.

    Attributes:
        excess_ms_per_step: what it works beyond what is normal.
        share_ms_per_step: what a step would still lose to it with every other slow rank mended; None where there are
            too many to try. Ranks that are slow side by side each cost all of it.
        alone_ms_per_step: what a step would save if only this one were mended.
    """

    rank: int
    host: str
    excess_ms_per_step: float
    share_ms_per_step: float | None = None
    alone_ms_per_step: float | None = None


class Stretch(NamedTuple):
    """Steps of a run in which one thing held, from the first to the last, and what it cost in each.

    ``since_ns`` and ``until_ns`` are epoch ns; None where these are not known.
    """

    first: int
    last: int
    cost_ms_per_step: float
    since_ns: int | None = None
    until_ns: int | None = None

    def to_json(self) -> JsonObject:
        return {
            "first": self.first,
            "last": self.last,
            "cost_ms_per_step": self.cost_ms_per_step,
            "since_utc": _iso(self.since_ns),
            "until_utc": _iso(self.until_ns),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause of lost time.

    Attributes:
        rank: the slowest of those that are slow; −1 where the cause moves between ranks.
        host: its node; empty where the cause moves.
        place: where time is lost, one of PLACES.
        cause: why, one of CAUSES.
        who: rank, host or stage as a sentence names it.
        cost_ms_per_step: what a step would save without it, everything else that is named mended as well: the median
            over steps; the mean of pauses and of what lasts for a part of the run.
        gpu_hours_per_day: the same over all devices of the job, if it runs all day.
        persistence: share of the steps in which it costs at least half of that.
        occurrence: of what happened in few steps only: ``once, in step 7: 2.2 s``; else empty.
        evidence: the numbers that speak for it.
        next_step: what to do.
        members: the ranks that it names, slowest first; empty where it names none.
        stretches: where it does not last all the run, the steps in which it does.
        since_step: the first step in which it was found; −1 before that was looked up.
        since_ns: when that step began, epoch ns; None where that is not known.
    """

    rank: int
    host: str
    place: str
    cause: str
    who: str
    cost_ms_per_step: float
    gpu_hours_per_day: float
    persistence: float
    evidence: str
    next_step: str
    occurrence: str = ""
    members: tuple[Member, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    since_step: int = -1
    since_ns: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the slow ranks, slowest first."""
        return tuple(member.rank for member in self.members) or ((self.rank,) if self.rank >= 0 else ())

    def to_json(self) -> JsonObject:
        told = asdict(self)
        del told["since_ns"]
        stretches = [stretch.to_json() for stretch in self.stretches]
        return {**told, "stretches": stretches, "since_utc": _iso(self.since_ns)}


def _iso(epoch_ns: int | None) -> str | None:
    return None if epoch_ns is None else iso_utc(epoch_ns)


def cause_in_words(cause: str) -> str:
    """Return ``stage imbalance``, ``slow backward``; ``cause unknown`` where the evidence does not tell."""
    if cause in PHASES:
        return f"slow {PHASES[cause]}"
    if cause in _NOUNS:
        return _NOUNS[cause]
    return "cause unknown" if cause == "unknown" else cause.replace("_", " ")


def on_gpu(run: Run) -> bool:
    """Return whether the job ran on GPUs, as far as was recorded."""
    device = run.any_metadata.device
    return bool(device) and not device.endswith("cpu") and not device.startswith("simulated")


PHASES: Final = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
"""The causes that are one phase, in words."""

_NOUNS: Final = {"data": "input", "gc": "garbage collection"}

ACTIVITY: Final = {
    "data": "waiting for input",
    "gc": "collecting garbage",
    "checkpoint": "saving",
    "evaluation": "evaluating",
}
"""What a rank does, of the causes that have spans of their own."""

NEXT_STEP: Final = {
    "compute": (
        "Look at the device while the job runs (clocks, temperature, power limit, errors, other processes), and move a "
        "slow rank to another device to see whether the delay moves with it."
    ),
    "throttled_device": (
        "The driver holds the clock of this device down: check its cooling, power supply and power limit, and take the "
        "node out of the job until that is mended."
    ),
    "communication": (
        "Test the links of this rank (NIC counters, cable, NVLink state, routing) and compare with a bandwidth test "
        "between the same hosts."
    ),
    "data": (
        "Give the input pipeline of this rank more workers or a deeper prefetch, and check the storage that it reads."
    ),
    "gc": "Call gc.disable() or gc.freeze() and collect on all ranks in the same step, every few hundred steps.",
    "checkpoint": (
        "Save on all ranks at once, each its own part (torch.distributed.checkpoint), or asynchronously: while one "
        "rank saves, all others wait for it."
    ),
    "evaluation": (
        "Evaluate on all ranks, each its own part, or in a job beside this one: while one rank evaluates, all others "
        "wait for it."
    ),
    "stage_imbalance": (
        "Move layers from this stage to others, or count embedding and output layer as layers when the model is cut."
    ),
    "sequence_length_imbalance": "Balance microbatches by the work of their sequences, not by their number of tokens.",
    "late_launch": (
        "See what this process does on the CPU before that phase (py-spy record), and what else runs on its cores; "
        "if the script does it, as reading input without a DataLoader, commtrace.span(...) gives it a name."
    ),
    "unknown": (
        "Put commtrace.span(...) around what this rank does outside forward and backward, so that the time gets a name."
    ),
}
"""What to do about each cause, where one rank is named."""

_NEXT_STEP_OF_SEVERAL: Final = {
    "compute": (
        "Look at the devices of these ranks while the job runs (clocks, temperature, power limit, errors, other "
        "processes), and move one of them to another device to see whether the delay moves with it."
    ),
    "throttled_device": (
        "The driver holds the clocks of these devices down: check their cooling, power supply and power limit, and "
        "take their nodes out of the job until that is mended."
    ),
    "communication": (
        "Test the links of these ranks (NIC counters, cables, NVLink state, routing) and compare with a bandwidth test "
        "between the same hosts."
    ),
    "data": (
        "Give the input pipelines of these ranks more workers or a deeper prefetch, and check the storage that they "
        "read."
    ),
    "late_launch": (
        "See what these processes do on the CPU before that phase (py-spy record), and what else runs on their cores; "
        "if the script does it, as reading input without a DataLoader, commtrace.span(...) gives it a name."
    ),
    "unknown": (
        "Put commtrace.span(...) around what these ranks do outside forward and backward, so that the time gets a name."
    ),
}


ONLY_PHASE: Final = "Only the {phase} takes longer; the other phases are as fast as elsewhere."

SLOW_PHASE: Final = (
    "Profile the {phase} here and on another rank (a recompilation, a hook, offloading, other kernels): a slow device "
    "would be slow in the other phases too."
)
"""What to do where one phase is slow."""


NOW_AND_THEN: Final = (
    "See what happens in those steps (logging, a recompilation, another process on the host, a device that throttles "
    "for moments): in the others the work takes as long as elsewhere."
)
"""What to do where work takes longer in some steps only."""


_NEXT_STEP_AT: Final = {
    HOST: (
        "Look at this host (CPU load, memory pressure, power and clock limits, other jobs); take it out of the job to "
        "confirm."
    ),
    TENSOR_GROUP: (
        "Look at what these ranks share (host, switch, power), and at the slowest of them first: the others of a group "
        "may work next to it rather than wait for it."
    ),
}
"""What to do where all ranks of a place are slow in all that they do."""

STAGE_THAT_CHANGED: Final = (
    "Its layers are the same as before: look at the devices and hosts of this stage (clocks, power, other processes), "
    "and at what its layers do that they did not do before (a recompilation, other kernels, more tokens for an expert)."
)
"""What to do where a stage is slower than it was: to move layers is for one that has had too many from the start."""

_INPUT_OF_HOST: Final = (
    "Look at the storage that this host reads its input from (mount, cache, network), and give its ranks more workers "
    "or a deeper prefetch."
)


def next_step(cause: str, num_ranks: int, place: str = RANKS) -> str:
    """Return what to do about a cause that so many ranks of a place have."""
    if cause in PHASES:
        return SLOW_PHASE.format(phase=PHASES[cause])
    if cause in ("compute", "late_launch", "unknown") and place in _NEXT_STEP_AT:
        return _NEXT_STEP_AT[place]
    if cause == "data" and place == HOST:
        return _INPUT_OF_HOST
    several = _NEXT_STEP_OF_SEVERAL.get(cause) if num_ranks > 1 else None
    return several or NEXT_STEP[cause]
