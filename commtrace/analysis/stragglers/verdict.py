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
"""Places of lost time: ranks that have nothing else in common; a host or a tensor-parallel group with nearly all of its
ranks slow; a pipeline stage; a link between ranks; the network of hosts; changing ranks of the job."""

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
"""Reasons: ``forward``, ``backward`` and ``optimizer`` if only that phase is slow, ``compute`` if all work is;
``late_launch`` if a phase begins late, and nothing that has a span came before it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the ranks that a verdict names."""

    rank: int
    host: str
    excess_ms_per_step: float  # of its work over normal
    # Lost to it in a step with every other slow rank mended; None if there are too many to try. Ranks that are slow
    # side by side each cost all of it.
    share_ms_per_step: float | None = None
    alone_ms_per_step: float | None = None  # saved in a step if only this rank were mended


class Stretch(NamedTuple):
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
            "since_utc": _iso(self.since_ns),
            "until_utc": _iso(self.until_ns),
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
    members: tuple[Member, ...] = ()  # slowest first
    stretches: tuple[Stretch, ...] = ()  # the steps in which it lasts, if these are not all
    since_step: int = -1  # the first step in which it was found; −1 before that is looked up
    since_ns: int | None = None  # begin of that step, epoch; None if unknown

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
    """Return ``stage imbalance``, ``slow backward``; ``cause unknown`` without evidence."""
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
"""Activities of ranks, by cause, for causes with spans of their own."""

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
"""Advice on each cause, for one rank."""

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
"""Advice for one slow phase."""


NOW_AND_THEN: Final = (
    "See what happens in those steps (logging, a recompilation, another process on the host, a device that throttles "
    "for moments): in the others the work takes as long as elsewhere."
)
"""Advice for work that takes longer in some steps only."""


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
"""Advice for places of which all ranks are slow in all that they do."""

STAGE_THAT_CHANGED: Final = (
    "Its layers are the same as before: look at the devices and hosts of this stage (clocks, power, other processes), "
    "and at what its layers do that they did not do before (a recompilation, other kernels, more tokens for an expert)."
)
"""Advice for a stage that is slower than it was; moving layers helps a stage that has had too many from the start."""

_INPUT_OF_HOST: Final = (
    "Look at the storage that this host reads its input from (mount, cache, network), and give its ranks more workers "
    "or a deeper prefetch."
)


def next_step(cause: str, num_ranks: int, place: str = RANKS) -> str:
    """Return the advice on a cause that so many ranks of a place have."""
    if cause in PHASES:
        return SLOW_PHASE.format(phase=PHASES[cause])
    if cause in ("compute", "late_launch", "unknown") and place in _NEXT_STEP_AT:
        return _NEXT_STEP_AT[place]
    if cause == "data" and place == HOST:
        return _INPUT_OF_HOST
    several = _NEXT_STEP_OF_SEVERAL.get(cause) if num_ranks > 1 else None
    return several or NEXT_STEP[cause]
