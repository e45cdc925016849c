"""Advice: lines that keep a node out of the next job."""

from __future__ import annotations

from dataclasses import replace

from commtrace.findings.nodes import exclude_nodes
from commtrace.trace.metadata import RankMetadata
from tests.factory import metadata


def on(host: str, rank: int = 0, **environment: str) -> RankMetadata:
    return replace(metadata(rank, node=host), host=host, environment=environment)


def test_slurm_is_told_by_its_own_names_of_the_nodes() -> None:
    ranks = [on("node9.cluster", SLURMD_NODENAME="node9"), on("node7.cluster", SLURMD_NODENAME="node7")]
    assert exclude_nodes([*ranks, ranks[0]], ranks) == "sbatch --exclude=node7,node9"


def test_kubernetes_cordons_the_node_of_a_pod() -> None:
    named = on("trainer-3", KUBERNETES_SERVICE_PORT="443", NODE_NAME="gpu-17")
    unnamed = on("trainer-3", KUBERNETES_SERVICE_PORT="443")
    assert exclude_nodes([named], [named]) == "kubectl cordon gpu-17"
    assert (
        exclude_nodes([unnamed], [unnamed])
        == "kubectl cordon $(kubectl get pod trainer-3 -o jsonpath='{.spec.nodeName}')"
    )


def test_the_hostfile_is_used_where_no_scheduler_is_known() -> None:
    job = [on("a"), on("b"), on("c")]
    assert exclude_nodes(job[1::-1], job) == "take a, b out of the hostfile"
    assert exclude_nodes([], job) == ""


def test_a_hostfile_that_would_be_empty_is_not_advised() -> None:
    assert exclude_nodes([on("a", 1)], [on("a", 0), on("a", 1)]) == "start it on another host"
    assert exclude_nodes([on("a"), on("b")], [on("a"), on("b")]) == "start it on other hosts"
