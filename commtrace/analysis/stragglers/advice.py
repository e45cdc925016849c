"""What to do about a straggler: where to look for its cause, and how to keep its node out of the next job.

>>> next_step("gc", 1)                                          # doctest: +SKIP
'Call gc.disable() or gc.freeze() and collect on all ranks in the same step, every few hundred steps.'
>>> exclude_nodes(job[3:4], job)                                     # doctest: +SKIP
'sbatch --exclude=node7'
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from commtrace.analysis.stragglers.verdict import HOST, PHASES, RANKS, TENSOR_GROUP
from commtrace.trace.metadata import KUBERNETES, KUBERNETES_NODE, SLURM_NODE, RankMetadata

NEXT_STEP: Final = {
    "compute": (
        "Look at the device while the job runs (clocks, temperature, power limit, errors, other processes), and move a "
        "slow rank to another device to see whether the delay moves with it."
    ),
    "throttled_device": (
        "The driver holds the clock of this device down: check its cooling, power supply and power limit, and take the "
        "node out of the job until that is mended."
    ),
    "host": (
        "See what this process does on the CPU while it launches (py-spy record), what else runs on its cores and to "
        "which it is bound (NUMA, frequency); fewer, larger kernels, torch.compile or CUDA graphs need fewer launches."
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
        "Evaluate on all ranks, each an equal part, or in a job beside this one: while one rank evaluates, all others "
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
    "host": (
        "See what these processes do on the CPU while they launch (py-spy record), what else runs on their cores and "
        "to which they are bound (NUMA, frequency); fewer, larger kernels, torch.compile or CUDA graphs need fewer "
        "launches."
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

SLOW_PHASE: Final = (
    "Profile the {phase} here and on another rank (a recompilation, a hook, a wait of the script, offloading, other "
    "kernels): a slow device would be slow in the other phases too."
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

LAUNCH_BOUND_JOB: Final = (
    "Launch less: larger microbatches, torch.compile, CUDA graphs and fused optimizers need fewer kernels; py-spy "
    "record shows what the processes do on the CPU meanwhile (logging, checks, .item(), input on the main thread)."
)
"""Advice where all devices wait for their hosts."""

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
    if cause in ("compute", "host", "late_launch", "unknown") and place in _NEXT_STEP_AT:
        return _NEXT_STEP_AT[place]
    if cause == "data" and place == HOST:
        return _INPUT_OF_HOST
    several = _NEXT_STEP_OF_SEVERAL.get(cause) if num_ranks > 1 else None
    return several or NEXT_STEP[cause]


def exclude_nodes(ranks: Iterable[RankMetadata], job: Iterable[RankMetadata]) -> str:
    """Return a command, or a hint, that keeps the nodes of these ranks out of the next job; empty without ranks."""
    listed = list(ranks)
    slurm = {rank.environment[SLURM_NODE] for rank in listed if SLURM_NODE in rank.environment}
    if slurm:
        return f"sbatch --exclude={','.join(sorted(slurm))}"
    pods = [rank for rank in listed if KUBERNETES in rank.environment]
    if pods:
        return f"kubectl cordon {' '.join(sorted({_kubernetes_node(rank) for rank in pods}))}"
    hosts = {rank.host for rank in listed}
    if hosts == {rank.host for rank in job}:
        return f"start it on {'other hosts' if len(hosts) > 1 else 'another host'}"
    return f"take {', '.join(sorted(hosts))} out of the hostfile" if hosts else ""


def _kubernetes_node(rank: RankMetadata) -> str:
    # Without NODE_NAME in its environment, a rank is found by its pod.
    node = rank.environment.get(KUBERNETES_NODE)
    return node or f"$(kubectl get pod {rank.host} -o jsonpath='{{.spec.nodeName}}')"
