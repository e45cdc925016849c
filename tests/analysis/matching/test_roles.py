from __future__ import annotations

from commtrace.analysis.matching.roles import UNKNOWN, find_roles
from commtrace.trace.metadata import Group
from tests.factory import Row, collective, group, make_run, p2p, span, stall

WORLD = group("world", 0, 1, 2, 3)
PIPELINE = group("pp", 0, 2)
TENSOR = group("tp", 0, 1)


def roles_of_rank_0(rows: list[Row], *groups: Group) -> list[tuple[str, int]]:
    """Role and group size of each row; −1 where there is none."""
    run = make_run({0: rows}, list(groups), world_size=4)
    roles = find_roles(run)
    found = roles.ranks[0]
    return [
        (roles.words[code] if code >= 0 else "", size)
        for code, size in zip(found.role.tolist(), found.group_size.tolist(), strict=True)
    ]


def test_a_collective_has_the_role_of_its_group() -> None:
    rows = [collective("all_reduce", WORLD, 0, 0, 1), collective("all_reduce", TENSOR, 0, 2, 3)]
    assert roles_of_rank_0(rows, WORLD, TENSOR) == [("world", 4), ("tp", 2)]


def test_a_message_between_stages_is_pipeline_communication_whatever_group_carried_it() -> None:
    rows = [p2p("send", WORLD, 2, 0, 0, 1), p2p("recv", WORLD, 3, 0, 2, 3), p2p("send", PIPELINE, 2, 0, 4, 5)]
    assert roles_of_rank_0(rows, WORLD, PIPELINE) == [("pp", 2), ("world", 4), ("pp", 2)]


def test_the_narrowest_pipeline_group_counts() -> None:
    whole = group("pp", 0, 1, 2, 3, ordinal=1)
    assert roles_of_rank_0([p2p("send", WORLD, 2, 0, 0, 1)], WORLD, whole, PIPELINE) == [("pp", 2)]
    assert roles_of_rank_0([p2p("send", WORLD, 3, 0, 0, 1)], WORLD, whole, PIPELINE) == [("pp", 4)]


def test_a_broadcast_from_another_stage_is_not_a_message() -> None:
    row = collective("broadcast", WORLD, 0, 0, 1, peer=2)
    assert roles_of_rank_0([row], WORLD, PIPELINE) == [("world", 4)]


def test_a_stall_has_the_role_of_what_it_waits_for() -> None:
    message = p2p("recv", WORLD, 2, 0, 0, 5, id=1)
    rows = [message, stall(message, 1, 5), span("forward", 6, 7)]
    assert roles_of_rank_0(rows, WORLD, PIPELINE) == [("pp", 2), ("pp", 2), ("", -1)]


def test_a_group_that_nobody_described_is_unknown() -> None:
    assert roles_of_rank_0([collective("all_reduce", TENSOR, 0, 0, 1)], WORLD) == [(UNKNOWN, -1)]
