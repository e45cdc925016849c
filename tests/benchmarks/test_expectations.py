from __future__ import annotations

import pytest

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.benchmarks.expectations import ExpectedShare, Rate, decisive, expected_busbw, shares

MIB = 1 << 20
TWO_NODES = ["a"] * 8 + ["b"] * 8
NIC = Rate("400Gbit/s", 50.0)
NVLINK = Rate("450GB/s", 450.0)


def measured(
    gbps: float,
    num_bytes: int = 64 * MIB,
    operation: str = "broadcast",  # its busbw is its algbw
    group: str = "world",
    ranks: tuple[int, ...] = tuple(range(16)),
) -> Measurement:
    nodes = tuple(dict.fromkeys(TWO_NODES[rank] for rank in ranks))
    time = num_bytes / gbps
    return Measurement(operation, ranks, nodes, num_bytes, "bfloat16", 20, MeasuredSpread(time, time, time), group)


@pytest.mark.parametrize(
    ("operation", "ranks", "expected"),
    [
        ("all_reduce", range(8), 50),  # one node
        ("all_to_all", range(8), 50),
        ("gather", range(8), 50 / 7),  # the root receives seven tensors over its link
        ("all_reduce", range(16), 8 * 50),  # a ring through each NIC of a node
        ("broadcast", range(16), 8 * 50),
        ("all_gather", [0, 8], 50),  # --group across
        ("all_reduce", [0, 1, 2, 8], 50),  # the second node has one NIC in it
        ("all_to_all", range(16), 50 * 15 / 8),  # eight of fifteen parts go through the NIC of a GPU
        ("scatter", range(16), 50 / 8),
        ("send", [0, 15], 50),
    ],
)
def test_the_busbw_that_a_rate_of_each_rank_allows(operation: str, ranks: list[int], expected: float) -> None:
    assert expected_busbw(operation, list(ranks), TWO_NODES, 50.0) == pytest.approx(expected)


def test_the_best_of_the_three_largest_sizes_counts() -> None:
    sizes = [measured(gbps, 2**power * MIB) for power, gbps in enumerate([390.0, 300.0, 320.0, 310.0])]
    (found,) = shares(NetworkBaseline({}, tuple(sizes)), {"": NIC}, TWO_NODES)

    assert found == ExpectedShare(sizes[2], NIC, 400.0)
    assert (found.ratio, found.is_enough) == (0.8, True)


def test_a_group_has_the_rate_of_its_name_and_else_that_of_all() -> None:
    rows = (measured(360.0, group="node", ranks=tuple(range(8))), measured(100.0))

    both = shares(NetworkBaseline({}, rows), {"": NIC, "node": NVLINK}, TWO_NODES)
    one = shares(NetworkBaseline({}, rows), {"node": NVLINK}, TWO_NODES)

    assert [(share.best.group, share.expected_gbps) for share in both] == [("node", 450.0), ("world", 400.0)]
    assert [share.best.group for share in one] == ["node"]
    assert decisive(both) == both[1]
    assert not both[1].is_enough


def test_a_size_that_does_not_fill_all_links_decides_only_alone() -> None:
    rows = (measured(40.0, operation="send", ranks=(0, 15)), measured(20.0, operation="send", ranks=(1, 9)))
    alone = shares(NetworkBaseline({}, rows), {"": NIC}, TWO_NODES)
    beside = shares(NetworkBaseline({}, (*rows, measured(320.0))), {"": NIC}, TWO_NODES)

    assert decisive(alone) == alone[1]
    assert decisive(beside) == beside[2]
    assert decisive(()) is None


def test_a_share_is_judged_as_it_is_printed() -> None:
    assert ExpectedShare(measured(74.6), NIC, 100.0).is_enough
    assert not ExpectedShare(measured(74.4), NIC, 100.0).is_enough
