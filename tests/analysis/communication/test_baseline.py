from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from commtrace.analysis.communication.baseline import (
    GroupKind,
    MeasuredSpread,
    Measurement,
    NetworkBaseline,
    read_baseline,
)
from commtrace.analysis.communication.links import find_slow_links
from commtrace.errors import ConfigurationError
from tests.json_reading import read_back

MIB = 1 << 20
WITHIN = GroupKind("all_reduce", 4, False)


def measured(
    num_bytes: int,
    mean_ns: float,
    operation: str = "all_reduce",
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    nodes: tuple[str, ...] = ("a",),
) -> Measurement:
    time = MeasuredSpread(mean_ns, mean_ns / 2, mean_ns * 2)
    return Measurement(operation, ranks, nodes, num_bytes, "float32", 20, time)


def baseline(*measurements: Measurement) -> NetworkBaseline:
    return NetworkBaseline({"backend": "gloo"}, measurements)


def test_the_mean_bandwidth_is_that_of_the_mean_time_and_the_smallest_that_of_the_longest() -> None:
    one = measured(8_000_000, 1_000_000)

    assert one.algbw_gbps == MeasuredSpread(8, 4, 16)
    assert one.busbw_gbps == MeasuredSpread(12, 6, 24)  # 2(n−1)/n


def test_a_time_between_two_sizes_is_on_a_line_in_logarithms() -> None:
    found = baseline(measured(MIB, 1_000), measured(4 * MIB, 16_000))

    assert found.duration_ns(WITHIN, MIB) == pytest.approx(1_000)
    assert found.duration_ns(WITHIN, 2 * MIB) == pytest.approx(4_000)
    assert found.duration_ns(WITHIN, 4 * MIB) == pytest.approx(16_000)


def test_a_size_far_from_all_that_were_measured_is_not_guessed() -> None:
    found = baseline(measured(MIB, 1_000), measured(4 * MIB, 4_000))

    assert found.duration_ns(WITHIN, MIB / 2) == pytest.approx(1_000)  # latency
    assert found.duration_ns(WITHIN, MIB / 2 - 1) is None
    assert found.duration_ns(WITHIN, 8 * MIB) == pytest.approx(8_000)
    assert found.duration_ns(WITHIN, 8 * MIB + 1) is None


def test_a_call_below_all_sizes_takes_as_long_as_the_smallest() -> None:
    found = baseline(measured(MIB, 1_000), measured(4 * MIB, 4_000), measured(MIB, 7_000, "send", (0, 1)))

    assert found.call_ns(WITHIN, 4) == pytest.approx(1_000)
    assert found.call_ns(GroupKind("recv", 4, False), 4) == pytest.approx(7_000)
    assert found.call_ns(WITHIN, 2 * MIB) == pytest.approx(2_000)
    assert found.call_ns(WITHIN, 8 * MIB + 1) is None
    assert found.call_ns(GroupKind("all_gather", 4, False), 4) is None


def test_its_own_group_counts_and_else_the_median_of_those_alike() -> None:
    groups = [tuple(range(first, first + 4)) for first in (0, 4, 8)]
    times = (1_000, 2_000, 9_000)
    found = baseline(*(measured(MIB, time, ranks=ranks) for ranks, time in zip(groups, times, strict=True)))

    assert found.duration_ns(WITHIN, MIB, ranks=groups[2]) == pytest.approx(9_000)
    assert found.duration_ns(WITHIN, MIB, ranks=(1, 2, 3, 4)) == pytest.approx(2_000)
    assert found.duration_ns(WITHIN, MIB) == pytest.approx(2_000)


def test_other_operations_sizes_of_groups_and_reaches_do_not_count() -> None:
    found = baseline(measured(MIB, 1_000))

    for kind in (
        GroupKind("all_gather", 4, False),
        GroupKind("all_reduce", 2, False),
        GroupKind("all_reduce", 4, True),
    ):
        assert found.duration_ns(kind, MIB) is None


@pytest.mark.parametrize("operation", ["send", "recv"])
def test_a_message_has_two_members_in_any_group(operation: str) -> None:
    found = baseline(measured(MIB, 1_000, "send", (0, 7), ("a", "b")))

    assert found.duration_ns(GroupKind(operation, 8, True), MIB) == pytest.approx(1_000)


def test_a_slow_pair_of_nodes_is_found_among_the_links() -> None:
    pairs = [((0, 1), ("a", "b")), ((0, 2), ("a", "c")), ((1, 2), ("b", "c"))]
    small = [measured(1 << 16, 1_000, ranks=ranks, nodes=nodes) for ranks, nodes in pairs]
    large = [measured(MIB, 9_000 if nodes == ("a", "c") else 1_000, ranks=ranks, nodes=nodes) for ranks, nodes in pairs]
    found = baseline(*small, *large)
    slow = find_slow_links(found.links())

    assert len(found.links()) == 3
    assert slow is not None
    assert [(link.source, link.target) for link in slow.links] == [("a", "c")]
    assert slow.links[0].gbps / slow.usual_gbps == pytest.approx(1 / 9)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = baseline(measured(MIB, 1_000.5), measured(2 * MIB, 2_000, nodes=("a", "b")))
    found.save(tmp_path / "baseline.json")

    assert read_baseline(tmp_path / "baseline.json") == found


def test_a_file_of_before_groups_had_names_is_read(tmp_path: Path) -> None:
    stored = read_back(baseline(measured(MIB, 1_000)).to_json())
    del stored["measurements"][0]["group"]
    (tmp_path / "baseline.json").write_text(json.dumps(stored))

    assert read_baseline(tmp_path / "baseline.json").measurements == (measured(MIB, 1_000),)


def test_groups_that_were_measured_at_the_same_time_are_told_apart_and_so_are_two_names_of_one_group() -> None:
    one, other, both = (
        [replace(measured(size, 1_000, ranks=ranks), group=group) for size in (MIB, 2 * MIB)]
        for group, ranks in [("node", (0, 1)), ("node", (2, 3)), ("world", (0, 1))]
    )
    found = baseline(one[0], other[0], one[1], other[1], *both)

    assert found.by_group() == [tuple(one), tuple(other), tuple(both)]


def test_a_file_that_is_none_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    content = baseline(measured(MIB, 1_000)).to_json()
    path.write_text(json.dumps(content)[:200])
    with pytest.raises(ConfigurationError, match=r"is no baseline .*bench collectives -o FILE` writes one"):
        read_baseline(path)
    path.write_text(json.dumps({**content, "format": "commtrace baseline 9"}))
    with pytest.raises(ConfigurationError, match="expected the format 'commtrace baseline 1'"):
        read_baseline(path)
    path.write_text(json.dumps(content).replace('"mean": 1000', '"mean": -1', 1))
    with pytest.raises(ConfigurationError, match="impossible numbers"):
        read_baseline(path)
