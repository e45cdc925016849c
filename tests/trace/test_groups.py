from __future__ import annotations

from commtrace.trace.groups import Group, group_id


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
