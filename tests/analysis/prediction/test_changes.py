"""What users write for changes."""

from __future__ import annotations

import pytest

from commtrace.analysis.prediction.changes import BandwidthChange, Changes, LatencyChange, OverlapChange, parse_layers
from commtrace.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "change", "phrase"),
    [
        ("tp=2x", BandwidthChange("tp", 2.0), "tp bandwidth × 2"),
        ("all=0.5x", BandwidthChange("all", 0.5), "all bandwidth × 0.5"),
        ("dp=100GB/s", BandwidthChange("dp", gbps=100.0), "dp bandwidth 100 GB/s"),
        ("dp=800Gbit/s", BandwidthChange("dp", gbps=100.0), "dp bandwidth 100 GB/s"),
    ],
)
def test_bandwidth_is_a_factor_or_a_rate(text: str, change: BandwidthChange, phrase: str) -> None:
    assert BandwidthChange.parse(text) == change
    assert change.describe() == phrase


@pytest.mark.parametrize(
    ("text", "change", "phrase"),
    [
        ("pp=0.5x", LatencyChange("pp", factor=0.5, is_added=True), "pp latency × 0.5"),
        ("pp=20us", LatencyChange("pp", ns=20_000), "pp latency 20 µs"),
        ("pp=+1.5ms", LatencyChange("pp", ns=1_500_000, is_added=True), "pp latency + 1500 µs"),
        ("tp=-5µs", LatencyChange("tp", ns=-5_000, is_added=True), "tp latency − 5 µs"),
    ],
)
def test_latency_is_a_factor_a_time_or_a_difference(text: str, change: LatencyChange, phrase: str) -> None:
    assert LatencyChange.parse(text) == change
    assert change.describe() == phrase


@pytest.mark.parametrize("text", ["tp", "tp=", "=2x", "tp=fast", "tp=0x", "tp=1.2.3x", "dp=100Gb/s"])
def test_a_text_that_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--bandwidth"):
        BandwidthChange.parse(text)


@pytest.mark.parametrize("text", ["pp=5", "pp=+5x", "pp=5 minutes", "pp=..us"])
def test_a_text_that_is_no_latency_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--latency"):
        LatencyChange.parse(text)


def test_overlap_is_perfect_or_none() -> None:
    assert OverlapChange.parse("dp=perfect") == OverlapChange("dp", is_perfect=True)
    assert OverlapChange.parse("dp=none") == OverlapChange("dp", is_perfect=False)
    with pytest.raises(ConfigurationError, match="perfect or none"):
        OverlapChange.parse("dp=half")


@pytest.mark.parametrize("text", ["", "8,", "8;9", "0,8"])
def test_layers_are_counts(text: str) -> None:
    assert parse_layers("--layers", "8,9, 7") == (8, 9, 7)
    with pytest.raises(ConfigurationError, match="--layers"):
        parse_layers("--layers", text)


def test_only_changes_of_the_order_or_length_of_phases_rebuild_the_pipeline() -> None:
    assert not Changes(bandwidth=(BandwidthChange("tp", 2.0),), without_slow_ranks=(3,)).rebuilds
    assert all(
        changes.rebuilds
        for changes in (
            Changes(schedule="gpipe"),
            Changes(chunks=2),
            Changes(microbatches=4),
            Changes(layers=(1, 2)),
            Changes(recompute=False),
        )
    )
    assert Changes(without_slow_ranks=(1, 3), recompute=False, layers=(1, 2)).describe() == (
        "ranks 1, 3 as fast as the others",
        "layers per stage 1, 2",
        "recompute off",
    )
