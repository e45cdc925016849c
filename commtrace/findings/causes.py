"""The causes of lost time: one table of what each is called and what to do about it.

>>> format_cause("backward"), CAUSES["gc"].activity
('slow backward', 'collecting garbage')
>>> advice("stage_imbalance", 2)
'Move layers from this stage to others, or count embedding and output layer as layers when the model is cut.'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

RANKS: Final = "ranks"
HOST: Final = "host"
TENSOR_GROUP: Final = "tensor_group"
STAGE: Final = "stage"
LINK: Final = "link"
NETWORK: Final = "network"
JOB: Final = "job"

PLACES: Final = (RANKS, HOST, TENSOR_GROUP, STAGE, LINK, NETWORK, JOB)
"""Places of lost time: ranks that have nothing else in common; a host or a tensor-parallel group with nearly all of its
ranks slow; a pipeline stage; a link between ranks; the network of hosts; changing ranks of the job, or all."""

DATA: Final = "data"
GC: Final = "gc"
CHECKPOINT: Final = "checkpoint"
EVALUATION: Final = "evaluation"


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of lost time."""

    words: str
    advice: str  # to whom it strikes on one rank
    of_several: str = ""  # on several; empty: the same
    of_all: str = ""  # where all ranks do it; empty: that of several
    at_host: str = ""  # where nearly all ranks of a host have it; empty: by the number of ranks
    at_tensor_group: str = ""
    activity: str = ""  # of a rank meanwhile, which others see as waiting for it
    phase: str = ""  # the only slow one
    mended_at: Literal["device", "link", "process", "division"] = "process"
    """``division``: of the model or the input, whichever ranks compute it."""
    part: Literal["imbalance_ns", "input_ns", "exposed_communication_ns", "rest_ns"] = "imbalance_ns"
    """The part of lost time (LostTime) that holds the cost."""
    is_pause: bool = False  # has spans of its own that are no work
    is_meant: bool = False  # a pause that a program makes on purpose


_PROFILE: Final = (
    "Profile the {phase} here and on another rank (a recompilation, a hook, a wait of the script, offloading, other "
    "kernels): a slow device would be slow in the other phases too."
)
_LOOK_AT_HOST: Final = (
    "Look at this host (CPU load, memory pressure, power and clock limits, other jobs); take it out of the job to "
    "confirm."
)
_LOOK_AT_GROUP: Final = (
    "Look at what these ranks share (host, switch, power), and at the slowest of them first: the others of a group "
    "may work next to it rather than wait for it."
)
_SPAN: Final = "if the script does it, as reading input without a DataLoader, commtrace.span(...) gives it a name."


def _slow_phase(phase: str) -> Cause:
    return Cause(f"slow {phase}", _PROFILE.format(phase=phase), phase=phase)


_TABLE: Final = {
    "compute": Cause(
        "compute",
        "Look at the device while the job runs (clocks, temperature, power limit, errors, other processes), and move "
        "a slow rank to another device to see whether the delay moves with it.",
        of_several="Look at the devices of these ranks while the job runs (clocks, temperature, power limit, errors, "
        "other processes), and move one of them to another device to see whether the delay moves with it.",
        at_host=_LOOK_AT_HOST,
        at_tensor_group=_LOOK_AT_GROUP,
        mended_at="device",
    ),
    "forward": _slow_phase("forward"),
    "backward": _slow_phase("backward"),
    "optimizer": _slow_phase("optimizer step"),
    "throttled_device": Cause(
        "throttled device",
        "The driver holds the clock of this device down: check its cooling, power supply and power limit, and take "
        "the node out of the job until that is mended.",
        of_several="The driver holds the clocks of these devices down: check their cooling, power supply and power "
        "limit, and take their nodes out of the job until that is mended.",
        mended_at="device",
    ),
    "host": Cause(
        "late host",
        "See what this process does on the CPU while it launches (py-spy record), what else runs on its cores and to "
        "which it is bound (NUMA, frequency); fewer, larger kernels, torch.compile or CUDA graphs need fewer launches.",
        of_several="See what these processes do on the CPU while they launch (py-spy record), what else runs on their "
        "cores and to which they are bound (NUMA, frequency); fewer, larger kernels, torch.compile or CUDA graphs need "
        "fewer launches.",
        of_all="Launch less: larger microbatches, torch.compile, CUDA graphs and fused optimizers need fewer kernels; "
        "py-spy record shows what the processes do on the CPU meanwhile (logging, checks, .item(), input on the main "
        "thread).",
        at_host=_LOOK_AT_HOST,
        at_tensor_group=_LOOK_AT_GROUP,
    ),
    "communication": Cause(
        "communication",
        "Test the links of this rank (NIC counters, cable, NVLink state, routing) and compare with a bandwidth test "
        "between the same hosts.",
        of_several="Test the links of these ranks (NIC counters, cables, NVLink state, routing) and compare with a "
        "bandwidth test between the same hosts.",
        mended_at="link",
        part="exposed_communication_ns",
    ),
    DATA: Cause(
        "input",
        "Give the input pipeline of this rank more workers or a deeper prefetch, and check the storage that it reads.",
        of_several="Give the input pipelines of these ranks more workers or a deeper prefetch, and check the storage "
        "that they read.",
        of_all="Give the input pipelines more workers or a deeper prefetch, and check the storage that they read.",
        at_host="Look at the storage that this host reads its input from (mount, cache, network), and give its ranks "
        "more workers or a deeper prefetch.",
        activity="waiting for input",
        part="input_ns",
        is_pause=True,
    ),
    GC: Cause(
        "garbage collection",
        "Call gc.disable() or gc.freeze() and collect on all ranks in the same step, every few hundred steps.",
        activity="collecting garbage",
        part="rest_ns",
        is_pause=True,
    ),
    CHECKPOINT: Cause(
        "checkpoint",
        "Save on all ranks at once, each its own part (torch.distributed.checkpoint), or asynchronously: while one "
        "rank saves, all others wait for it.",
        of_all="Save asynchronously, or less often.",
        activity="saving or loading a checkpoint",
        part="rest_ns",
        is_pause=True,
        is_meant=True,
    ),
    EVALUATION: Cause(
        "evaluation",
        "Evaluate on all ranks, each an equal part, or in a separate job: while one rank evaluates, all others "
        "wait for it.",
        of_all="Evaluate less often, or in a separate job.",
        activity="evaluating",
        part="rest_ns",
        is_pause=True,
        is_meant=True,
    ),
    "late_launch": Cause(
        "late launch",
        "See what this process does on the CPU before that phase (py-spy record), and what else runs on its cores; "
        + _SPAN,
        of_several="See what these processes do on the CPU before that phase (py-spy record), and what else runs on "
        "their cores; " + _SPAN,
        at_host=_LOOK_AT_HOST,
        at_tensor_group=_LOOK_AT_GROUP,
    ),
    "stage_imbalance": Cause(
        "stage imbalance",
        "Move layers from this stage to others, or count embedding and output layer as layers when the model is cut.",
        mended_at="division",
    ),
    "sequence_length_imbalance": Cause(
        "sequence length imbalance",
        "Balance microbatches by the work of their sequences, not by their number of tokens.",
        mended_at="division",
    ),
    "unknown": Cause(
        "cause unknown",
        "Put commtrace.span(...) around what this rank does outside forward and backward, so that the time gets a "
        "name.",
        of_several="Put commtrace.span(...) around what these ranks do outside forward and backward, so that the time "
        "gets a name.",
        at_host=_LOOK_AT_HOST,
        at_tensor_group=_LOOK_AT_GROUP,
        activity="doing something that no span names",
    ),
}

CAUSES: Final[Mapping[str, Cause]] = _TABLE
"""By name, those of findings: ``forward``, ``backward`` and ``optimizer`` if only that phase is slow, ``compute`` if
all work is; ``host`` if the device waits for its host to launch it; ``late_launch`` if a phase begins late, and nothing
that has a span came before it."""

PAUSES: Final = tuple(name for name, cause in CAUSES.items() if cause.is_pause)
MEANT: Final = tuple(name for name, cause in CAUSES.items() if cause.is_meant)
"""Pauses that a program makes on purpose: a single one is reported if it costs enough and no other rank takes part."""


def _mended_at(*places: str) -> frozenset[str]:
    return frozenset(name for name, cause in CAUSES.items() if cause.mended_at in places)


OF_DIVISION: Final = _mended_at("division")
"""The division of the work is to blame: ranks and hosts are only where it shows."""

OF_NO_RANK: Final = _mended_at("division", "link")
OF_A_NODE: Final = _mended_at("device", "link")
"""Causes that another node may remove."""

TRANSFER: Final = "transfer"

LOSSES: Final[Mapping[str, Cause]] = {
    "schedule": Cause(
        "waiting for pipeline neighbours (bubble)",
        "More microbatches or chunks, or stages of equal length, make it smaller.",
    ),
    "waiting": Cause(
        "waiting for the last rank to arrive",
        "Look at what this rank waited for itself.",
        of_all="Balance the ranks.",
        activity="communicating, or waiting itself",
    ),
    "imbalance": Cause(
        "uneven work",
        "Look at the length of the microbatches of this rank, and at its device.",
        of_all="Balance the ranks.",
        activity="computing for longer",
    ),
    TRANSFER: Cause("exposed communication", "Overlap it with compute, or send less.", part="exposed_communication_ns"),
    "idle": Cause(
        "idle devices",
        "See what the host of this rank does (input, synchronisation, slow launches).",
        of_all="The host launches work too slowly or waits: look at input, synchronisation and launch overhead.",
        activity="idle, as its host launched nothing",
    ),
    "memory": Cause(
        "exposed copies between host and device",
        "Copy during computation: from pinned memory, on a stream of its own.",
        activity="copying memory",
    ),
    "user": Cause(
        "spans of the script",
        "Move that work off this rank, or do it on all ranks together.",
        activity="in a span of the script's own",
    ),
    "between": Cause(
        "time between steps",
        "Name what the loop does there with commtrace.span(...), and do it less often or beside training.",
    ),
    "no_span": Cause(
        "time outside all spans",
        "Name it with commtrace.span(...) to see what it is.",
    ),
    "rest": Cause(
        "garbage collection, checkpoints, evaluation, launches, and the rest",
        "See in the table of ranks of commtrace summary which of them it is.",
        part="rest_ns",
    ),
    "unaligned_clock": Cause(
        "cause unknown", "Its clock cannot be compared with those of the ranks that wait: look at its own time."
    ),
}
"""Time that no finding explains, and activities of ranks that others wait for, beside those of :data:`CAUSES`."""

PART_OF_LOSS: Final = {
    "imbalance": "imbalance_ns",
    TRANSFER: "exposed_communication_ns",
    "schedule": "bubble_ns",
    DATA: "input_ns",
    "rest": "rest_ns",
}
"""The parts of lost time that are left when what findings cost is taken out, by cause."""

NOW_AND_THEN: Final = (
    "See what happens in those steps (logging, a recompilation, another process on the host, a device that throttles "
    "for moments): in the others the work takes as long as elsewhere."
)
"""Advice for work that takes longer in some steps only."""

STAGE_THAT_CHANGED: Final = (
    "Its layers are the same as before: look at the devices and hosts of this stage (clocks, power, other processes), "
    "and at what its layers do that they did not do before (a recompilation, other kernels, more tokens for an expert)."
)
"""Advice for a stage that is slower than it was; moving layers helps a stage that has had too many from the start."""


def format_cause(cause: str) -> str:
    """Return ``stage imbalance``, ``slow backward``; ``cause unknown`` without evidence.

    The cause may be one of another version, as a file of its monitor names it.
    """
    known = CAUSES.get(cause)
    return cause.replace("_", " ") if known is None else known.words


def cause_or_loss(name: str) -> Cause:
    """Return an entry of :data:`CAUSES` or :data:`LOSSES`; raise KeyError if it is in neither."""
    return CAUSES[name] if name in CAUSES else LOSSES[name]


def advice(name: str, num_ranks: int, place: str = RANKS) -> str:
    """Return what to do about a cause that so many ranks of a place have, or all ranks of the job (``JOB``)."""
    cause = cause_or_loss(name)
    if place == JOB and cause.of_all:
        return cause.of_all
    at_place = {HOST: cause.at_host, TENSOR_GROUP: cause.at_tensor_group}.get(place)
    several = cause.of_several if num_ranks > 1 or place == JOB else ""
    return at_place or several or cause.advice
