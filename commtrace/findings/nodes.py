"""How to keep a node out of the next job.

>>> exclude_nodes(job[3:4], job)                                     # doctest: +SKIP
'sbatch --exclude=node7'
"""

from __future__ import annotations

from collections.abc import Iterable

from commtrace.trace.metadata import KUBERNETES, KUBERNETES_NODE, SLURM_NODE, RankMetadata


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
