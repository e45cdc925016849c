"""Findings on clusters that are described, not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.analysis.communication.links import find_slow_links
from commtrace.benchmarks.facts import RankFacts
from commtrace.benchmarks.judgement import (
    LaunchedJob,
    PreflightVerdict,
    judge_absent,
    judge_affinity,
    judge_devices,
    judge_interfaces,
    judge_links,
    judge_reached,
    judge_settings,
    judge_within_nodes,
)
from tests.benchmarks.rank_facts import facts


def cluster(**changes: dict[str, object]) -> dict[int, RankFacts]:
    """Return six ranks on three nodes; ``rank3={...}`` changes one."""
    return {rank: facts(rank, **changes.get(f"rank{rank}", {})) for rank in range(6)}


def test_a_sound_cluster_has_no_findings() -> None:
    sound = cluster()

    assert list(judge_absent(sound, LaunchedJob(6), 30)) == []
    assert list(judge_reached(sound, {rank: [] for rank in sound})) == []
    assert list(judge_settings(sound)) == []
    assert list(judge_interfaces(sound)) == []
    assert list(judge_affinity(sound)) == []


NOT_THERE = "did not start, or did not reach rank 0, within 30 s"
GPU_NODES = ("gpu0", "gpu1", "gpu2")


def without(*absent: int) -> dict[int, RankFacts]:
    return {
        rank: replace(one, scheduler_node=f"gpu{rank // 2}") for rank, one in cluster().items() if rank not in absent
    }


@pytest.mark.parametrize(
    ("absent", "expected", "nodes", "more"),
    [
        # Slurm says which nodes the job has
        ((2, 3), LaunchedJob(6, 2, GPU_NODES), ("gpu1",), "; no rank came from gpu1"),
        ((2, 3), LaunchedJob(6, None, GPU_NODES), ("gpu1",), "; no rank came from gpu1"),
        # two of three nodes are missing: which ranks belong to which is not needed
        ((2, 3, 4, 5), LaunchedJob(6, 2, GPU_NODES), ("gpu1", "gpu2"), "; no rank came from gpu1, gpu2"),
        # Slurm's list has a node more than the job
        ((2, 3), LaunchedJob(6, None, (*GPU_NODES, "gpu3")), (), "; no rank came from gpu1, gpu3"),
        ((2, 3), LaunchedJob(6, 2, (*GPU_NODES, "gpu3")), (), "; no rank came from gpu1, gpu3"),
        # a rank beside it told the name of the node
        ((3,), LaunchedJob(6, 2), ("node1",), ""),
        # nobody tells the name
        (
            (2, 3),
            LaunchedJob(6, 2),
            (),
            "; these are the ranks of node 1, counted from 0 as --node-rank of torchrun; ranks came from node0, node2",
        ),
        ((3,), LaunchedJob(6), (), "; ranks came from node0, node1, node2"),
    ],
)
def test_absent_ranks(absent: tuple[int, ...], expected: LaunchedJob, nodes: tuple[str, ...], more: str) -> None:
    (found,) = judge_absent(without(*absent), expected, 30)
    who = f"ranks {absent[0]}–{absent[-1]}" if len(absent) > 1 else f"rank {absent[0]}"

    assert (found.nodes, found.text) == (nodes, f"{who} {NOT_THERE}{more}")


def test_absent_ranks_and_absent_nodes_are_each_named() -> None:
    beside, alone = judge_absent(without(1, 4, 5), LaunchedJob(6, 2, GPU_NODES), 30)

    assert (beside.nodes, beside.text) == (("node0",), f"rank 1 {NOT_THERE}")
    assert (alone.nodes, alone.text) == (("gpu2",), f"ranks 4–5 {NOT_THERE}; no rank came from gpu2")


@pytest.mark.parametrize(("of_rank", "listed"), [("host{}", "host{}.cluster"), ("host{}.cluster", "host{}")])
def test_a_node_is_the_same_with_its_domain_and_without(of_rank: str, listed: str) -> None:
    present = {rank: facts(rank, node=name, host=name) for rank in range(4) for name in [of_rank.format(rank // 2)]}
    nodes = tuple(listed.format(number) for number in range(4))

    (found,) = judge_absent(present, LaunchedJob(8, 2, nodes), 30)

    assert found.nodes == nodes[2:]
    assert found.text == f"ranks 4–7 {NOT_THERE}; no rank came from {nodes[2]}, {nodes[3]}"


def test_nodes_named_by_their_addresses_are_told_apart() -> None:
    present = {rank: facts(rank, node="10.0.0.1", host="10.0.0.1") for rank in range(2)}

    (found,) = judge_absent(present, LaunchedJob(4, 2, ("10.0.0.1", "10.0.0.2")), 30)

    assert found.nodes == ("10.0.0.2",)


def test_a_spare_node_of_the_list_is_not_blamed_though_ranks_are_missing_from_two_others() -> None:
    present = {rank: facts(rank) for rank in range(4)}
    five = tuple(f"node{number}" for number in range(5))

    (spare,) = judge_absent(present, LaunchedJob(8, None, five), 30)
    (sure,) = judge_absent(present, LaunchedJob(8, None, five[:4]), 30)

    assert spare.nodes == ()
    assert spare.text == f"ranks 4–7 {NOT_THERE}; no rank came from node2, node3, node4"
    assert sure.nodes == ("node2", "node3")


def test_ranks_that_are_not_numbered_node_by_node_name_no_node() -> None:
    (found,) = judge_absent(without(3), LaunchedJob(6, 6), 30)

    assert found.nodes == ()


def test_a_rank_that_nobody_reaches_a_pair_that_does_not_and_a_silent_one() -> None:
    unreached = {0: [4], 1: [4], 2: [4], 3: [4], 4: [], 5: [4, 0]}
    dead, pair = list(judge_reached(cluster(), unreached))[::-1]
    assert (dead.nodes, dead.text) == (("node2",), "no rank reaches rank 4 at 10.0.0.2 (eth0)")
    assert (pair.nodes, pair.text) == (("node2", "node0"), "rank 5 cannot reach rank 0 at 10.0.0.0 (eth0)")

    (silent,) = judge_reached(cluster(), {0: [3], 1: [3], 2: [3], 3: None, 4: [3], 5: [3]})
    assert (silent.nodes, silent.text) == (("node1",), "rank 3 started, but no longer answers")


def test_a_version_and_a_variable_that_differ_name_the_few() -> None:
    versions, missing, value = judge_settings(
        cluster(
            rank2={"versions": {"torch": "2.13.0", "NCCL": "2.27.5"}},
            rank4={"environment": {}},
            rank5={"environment": {"NCCL_DEBUG": "INFO"}},
        )
    )

    assert (versions.check, versions.nodes) == ("versions", ("node1",))
    assert versions.text == "NCCL is '2.27.5' on rank 2, and '2.28.3' on the others"
    assert missing.text == "NCCL_DEBUG is not set on rank 4, and 'WARN' on the others"
    assert value.text == "NCCL_DEBUG is 'INFO' on rank 5, and 'WARN' on the others"


def test_interfaces_that_others_cannot_use() -> None:
    loopback, missing, slow = judge_interfaces(
        cluster(
            rank0={"address": "127.0.0.1"},
            rank3={"missing_interfaces": ["NCCL_SOCKET_IFNAME=ib0"]},
            rank4={"interface": "eth1", "interface_mbits": 1_000},
            rank5={"interface": "eth1", "interface_mbits": 1_000},
        )
    )

    assert (loopback.nodes, loopback.text[:38]) == (("node0",), "rank 0 has only the loopback address t")
    assert missing.text == "NCCL_SOCKET_IFNAME=ib0: node1 has no such interface"
    assert slow.text == "node2 reaches the others through eth1 with 1000 Mbit/s, other nodes have 200000 Mbit/s"


def test_the_loopback_is_right_on_a_single_host() -> None:
    one_host = {rank: replace(one, host="a", address="127.0.0.1") for rank, one in cluster().items()}

    assert list(judge_interfaces(one_host)) == []


def test_cores_and_devices_that_ranks_share() -> None:
    cores, far, device = judge_affinity(
        cluster(
            rank0={"cores": [0], "device_cores": []},
            rank1={"cores": [0], "device_cores": []},
            rank3={"cores": [0, 1]},
            rank5={"device_id": "uuid-4"},
        )
    )

    assert (cores.nodes, cores.text) == (("node0",), "ranks 0–1 share 1 of 4 cores: bind each to its own")
    assert (far.nodes, far.text) == (("node1",), "rank 3 may not run on a core next to its GPU (2–3)")
    assert (device.nodes, device.text) == (("node2",), "ranks 4–5 use the same GPU")


def test_ranks_that_may_run_on_every_core_share_them_rightly() -> None:
    unbound = {rank: replace(one, cores=[0, 1, 2, 3], host="a") for rank, one in cluster().items()}

    assert [one.text for one in judge_affinity(unbound)] == []


@pytest.mark.parametrize(("rate", "count"), [(0.91, 0), (0.89, 1)])
def test_a_gpu_that_is_slower_by_a_tenth(rate: float, count: int) -> None:
    rates = {rank: 700e12 * (rate if rank == 3 else 1) for rank in range(6)}
    found = list(judge_devices(cluster(), rates, "cuda"))

    assert len(found) == count
    assert [one.text for one in found] == [
        "the device of rank 3 multiplies matrices at 89% of the median rate" for _ in range(count)
    ]


def measured(ranks: tuple[int, ...], nodes: tuple[str, ...], milliseconds: float) -> Measurement:
    time = MeasuredSpread(*[milliseconds * 1e6] * 3)
    return Measurement("all_reduce", ranks, nodes, 256 << 20, "bfloat16", 10, time)


def test_a_node_whose_pairs_are_all_slow_is_named_alone() -> None:
    pairs = [
        measured((0, 1, 2, 3), ("node0", "node1"), 30),
        measured((2, 3, 4, 5), ("node1", "node2"), 30),
        measured((0, 1, 4, 5), ("node0", "node2"), 10),
        measured((0, 1, 6, 7), ("node0", "node3"), 10),
        measured((4, 5, 6, 7), ("node2", "node3"), 10),
        measured((2, 3, 6, 7), ("node1", "node3"), 30),
    ]
    found = list(judge_links(find_slow_links(NetworkBaseline({}, tuple(pairs)).links())))

    assert [one.nodes for one in found] == [("node1",)] * 3
    assert found[0].text.startswith("node0 and node1 reach 13.4 GB/s, other nodes 40.3 GB/s")


def test_a_node_that_is_slow_within() -> None:
    own = [measured((2 * n, 2 * n + 1), (f"node{n}",), 50 if n == 1 else 2) for n in range(3)]
    (found,) = judge_within_nodes(own)

    assert found.nodes == ("node1",)


def test_the_verdict_is_a_sentence() -> None:
    nodes = ("node0", "node1", "node2")
    (absent,) = judge_absent({0: facts(0)}, LaunchedJob(2, 1, ("node0", "gpu1")), 30)
    good = PreflightVerdict(nodes, (), 6, ("started",), 1.5)

    assert good.sentence() == "Good: 6 ranks on 3 nodes passed all checks."
    alone = PreflightVerdict(nodes[:1], (), 2, ("started",), 1.5)
    assert alone.sentence() == "Good: 2 ranks on 1 node passed all checks."
    bad = PreflightVerdict((*nodes, "gpu1"), (absent,), 6, (), 31.0)
    assert bad.sentence() == "Not good: 1 of 4 nodes have problems: gpu1."
    assert bad.broken == ("gpu1",)
