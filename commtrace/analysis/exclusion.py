"""What keeps the nodes of slow or failed ranks out of the next job, in the words of whatever started this one.

>>> keep_out([run.ranks[3].metadata])                           # doctest: +SKIP
'sbatch --exclude=node7'
"""

from __future__ import annotations

from collections.abc import Iterable

from commtrace.trace.metadata import KUBERNETES, KUBERNETES_NODE, SLURM_NODE, RankMetadata


def keep_out(ranks: Iterable[RankMetadata]) -> str:
    """Return a command, or what to do by hand, that keeps the nodes of these ranks out of the next job.

    ``sbatch --exclude=…`` where Slurm started the job; ``kubectl cordon …`` in Kubernetes, where a rank knows its node
    if NODE_NAME tells it and is found by its pod otherwise; else the lines of a hostfile. Empty for no ranks.
    """
    listed = list(ranks)
    slurm = {rank.environment[SLURM_NODE] for rank in listed if SLURM_NODE in rank.environment}
    if slurm:
        return f"sbatch --exclude={','.join(sorted(slurm))}"
    pods = [rank for rank in listed if KUBERNETES in rank.environment]
    if pods:
        return f"kubectl cordon {' '.join(sorted({_kubernetes_node(rank) for rank in pods}))}"
    hosts = sorted({rank.host for rank in listed})
    return f"take {', '.join(hosts)} out of the hostfile" if hosts else ""


def _kubernetes_node(rank: RankMetadata) -> str:
    told = rank.environment.get(KUBERNETES_NODE)
    return told or f"$(kubectl get pod {rank.host} -o jsonpath='{{.spec.nodeName}}')"
