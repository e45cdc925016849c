from __future__ import annotations

from pathlib import Path

from commtrace.live.rank import LiveRank
from commtrace.trace.metadata import DeviceState
from tests.trace.rows import mark, metadata


def test_identity_holds_the_place_in_every_dimension_under_names_that_can_be_labels() -> None:
    live = LiveRank(metadata(rank=5, node="n2"), Path("run"))
    live.learn(mark("topology", {"coordinates": {"pp": 1, "dp-shard": 2, "2d": 0, "rank": 9}}))

    assert live.identity() == {
        "run_id": "r1", "rank": "5", "node": "n2", "local_rank": "5", "pp": "1", "dp_shard": "2", "dim_2d": "0",
    }  # fmt: skip


def test_instants_are_put_on_the_wall_clock_by_the_newest_comparison() -> None:
    live = LiveRank(metadata(), Path("run"))
    assert live.epoch_ns(1_005) == 1_700_000_000_000_001_000
    assert live.clock() == (0, 20)

    live.learn(
        mark("clock_anchor", {"monotonic_ns": 2_005, "realtime_ns": 1_700_000_000_000_002_500, "bracket_ns": 60})
    )
    assert live.epoch_ns(2_005) == 1_700_000_000_000_002_500
    assert live.clock() == (500, 30)


def test_readings_of_the_device_are_told_once() -> None:
    live = LiveRank(metadata(), Path("run"))
    live.learn(mark("device_state", {"at_ns": 5, "clock_mhz": 1095, "slowdowns": ["power brake"]}))

    assert live.take_device_states() == (DeviceState(5, clock_mhz=1095, slowdowns=("power brake",)),)
    assert live.take_device_states() == ()
