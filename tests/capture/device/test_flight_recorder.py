"""Durations out of the flight recorder's dump."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.collectives.nccl import LEGACY, NCCL2, NcclBackend
from commtrace.capture.device.flight_recorder import Entry, FlightRecorder, entries_of, match


def call(
    number: int, launched: int, returned: int, batch: int | None = None, group: str = "0", nccl: NcclBackend = NCCL2
) -> Any:
    state = SimpleNamespace(group=SimpleNamespace(name=group), nccl=nccl)
    return SimpleNamespace(
        id=number,
        batch=number if batch is None else batch,
        launch=SimpleNamespace(state=state),
        launched_at=launched,
        returned_at=returned,
    )


def test_an_entry_belongs_to_the_call_during_which_it_was_made() -> None:
    entries = [Entry(0, "0", 105, 7), Entry(1, "0", 115, None), Entry(2, "0", 125, 9), Entry(3, "1", 126, 11)]
    calls = [call(1, 100, 110), call(2, 111, 119), call(3, 120, 130), call(4, 120, 130, group="1"), call(5, 140, 150)]

    assert match(calls, entries) == {1: 7, 3: 9, 4: 11}


def test_an_entry_of_torchs_hook_comes_right_before_the_call_as_ours_tells_it() -> None:
    entries = [Entry(0, "0", 90, 1), Entry(1, "0", 98, 2), Entry(2, "0", 118, 3)]
    calls = [call(1, 100, 110), call(2, 120, 130), call(3, 140, 150)]

    assert match(calls, entries) == {1: 2, 2: 3}
    assert match([call(4, 10_000_000, 10_000_010)], entries) == {}


def test_a_call_of_which_nobody_told_that_it_was_handed_on_has_none() -> None:
    assert match([call(1, 100, 0)], [Entry(0, "0", 90, 1), Entry(1, "0", 200, 2)]) == {}


def test_of_two_entries_during_one_call_neither_is_taken() -> None:
    assert match([call(1, 100, 110)], [Entry(0, "0", 102, 7), Entry(1, "0", 104, 8)]) == {}


def test_members_of_a_bracket_share_its_one_duration() -> None:
    members = [call(1, 100, 130, batch=1), call(2, 110, 130, batch=1)]

    assert match(members, [Entry(0, "0", 105, None), Entry(1, "0", 112, None), Entry(2, "0", 125, 9)]) == {1: 9, 2: 9}
    assert match(members, [Entry(0, "0", 105, 4), Entry(1, "0", 112, 5)]) == {}


def test_what_may_have_been_overwritten_is_not_known() -> None:
    assert match([call(1, 100, 130)], [Entry(5, "0", 120, 7)]) == {}
    assert match([call(1, 100, 130)], [Entry(4, "1", 90, 1), Entry(5, "0", 120, 7)]) == {1: 7}


def test_each_backend_is_asked_for_its_own() -> None:
    def dump(backend: str) -> bytes:
        entry = {"record_id": 0, "process_group": ["0", ""], "time_created_ns": 105, "duration_ms": len(backend)}
        return json.dumps({"entries": [entry]}, separators=(",", ":")).encode()

    calls = [call(1, 100, 110, nccl=NCCL2), call(2, 100, 110, nccl=LEGACY)]

    assert FlightRecorder(dump).durations_ns(calls) == {1: 5_000_000, 2: 4_000_000}


@pytest.mark.parametrize("dump", [b"", b'{"version":"2.10"}', b'{"entries":[],"version":"2.10"}'])
def test_an_empty_dump_has_no_entries(dump: bytes) -> None:
    assert list(entries_of(dump)) == []


def test_a_torn_dump_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        list(entries_of(b'{"entries":['))


def test_torchs_own_recorder_is_read_and_its_clock_is_the_systems() -> None:
    c10d: Any = torch._C._distributed_c10d
    if torch.__version__ < (2, 11):
        pytest.skip("this torch has no flight recorder for gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = time.time_ns()
        dist.all_reduce(torch.ones(2))
        after = time.time_ns()
        name = dist.distributed_c10d._get_default_group().group_name
    finally:
        dist.destroy_process_group()

    entries = [entry for entry in entries_of(bytes(c10d._dump_fr_trace_json(True, False))) if entry.group == name]
    assert [entry.duration_ns for entry in entries if before <= entry.created_ns <= after] == [None]


@pytest.mark.usefixtures("world")
def test_torchs_hook_makes_its_entry_during_the_call_and_right_before_a_hook_that_comes_later() -> None:
    c10d: Any = torch._C._distributed_c10d
    if torch.__version__ < (2, 15):
        pytest.skip("this torch has no flight recorder of its own for each backend without one")
    group: Any = dist.distributed_c10d._get_default_group()
    handle = c10d.FlightRecorderHook.attach(group, list(range(4)))
    hooked: list[int] = []
    group.register_pre_hook(1 << 60, lambda _arguments: hooked.append(time.time_ns()))
    before = time.time_ns()
    dist.all_reduce(torch.ones(2))
    after = time.time_ns()
    group.unregister_pre_hook(1 << 60)
    handle.remove()

    (entry,) = [one for one in entries_of(c10d._dump_fr_trace_json(True, False, "fake")) if one.created_ns >= before]
    assert entry.group == group.group_name
    assert before <= entry.created_ns <= hooked[0] <= after
