from __future__ import annotations

import json

import pytest
from msgspec import structs

from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.metadata import Group, GroupMember, RankMetadata, group_id, measures_durations
from tests.trace.rows import metadata


def test_json_and_back() -> None:
    original = metadata(rank=3, world_size=4, environment={"NCCL_DEBUG": "WARN"})

    assert RankMetadata.from_json(original.to_json()) == original


def test_fields_of_a_newer_version_are_left_out() -> None:
    newer = {**json.loads(metadata().to_json()), "rack": "r7"}

    assert RankMetadata.from_json(json.dumps(newer)) == metadata()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("Yes", True), ("0", False), ("", False)])
def test_the_environment_says_whether_nccl_measures(value: str, expected: bool) -> None:
    assert measures_durations({"TORCH_NCCL_ENABLE_TIMING": value}) is expected
    assert not measures_durations({})


def test_every_member_gets_the_same_number_in_whatever_order_it_lists_the_ranks() -> None:
    assert group_id([0, 2, 4], 0) == group_id((4, 0, 2), 0)


def test_files_hold_the_number_so_it_never_changes() -> None:
    assert group_id([0, 1], 0) == 1815600291025650016


def test_groups_are_told_apart_by_members_and_by_order_of_creation() -> None:
    numbers = {
        group_id(ranks, ordinal) for ranks in ([0], [1], [0, 1], [0, 1, 2], [12], [1, 2]) for ordinal in range(3)
    }

    assert len(numbers) == 18
    assert all(0 <= number < 2**63 for number in numbers)


def test_size_is_the_number_of_members() -> None:
    assert Group(id=1, ranks=(0, 4, 8), ordinal=0, role="dp").size == 3


def test_a_group_at_a_store_of_its_own_whose_members_are_all_of_this_world_is_one_of_this_world() -> None:
    members = [GroupMember("a" * 16, "run", rank, "host", rank) for rank in (3, 1)]
    group = Group(7, (), 0, "unknown", members=tuple(members))

    assert (group.of_world("a" * 16).id, group.of_world("a" * 16).ranks) == (7, (1, 3))
    assert not group.of_world("a" * 16).is_over_worlds
    assert group.of_world("b" * 16) is group
    assert group.of_world("") is group
    assert structs.replace(group, members=(members[0], None)).of_world("a" * 16).is_over_worlds
    assert [group.rank_in_world(peer, "a" * 16) for peer in (0, OUTSIDE, OUTSIDE + 1, OUTSIDE + 2)] == [
        0, 3, 1, OUTSIDE + 2,
    ]  # fmt: skip
