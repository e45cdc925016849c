"""The critical path in words."""

from __future__ import annotations

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.cli.views.critical_path import critical_path_lines


def share(rank: int, kind: str, ns: int, role: str = "", uncertain_ns: int = 0) -> Share:
    return Share(rank, kind, role, ns, uncertain_ns)


def line(*shares: Share) -> str:
    (text,) = critical_path_lines(CriticalPath(num_steps=2, shares=shares))
    return text


def test_ranks_come_with_their_work_and_communication_by_role() -> None:
    assert (
        line(
            share(3, "backward", 40_000_000),
            share(3, "forward", 21_000_000),
            share(1, "transfer", 8_000_000, "dp"),
            share(2, "transfer", 4_000_000, "dp"),
            share(0, "forward", 25_000_000),
            share(3, "unknown", 2_000_000, "tp", uncertain_ns=2_000_000),
        )
        == "Critical path (50.0 ms a step): rank 3 61% (backward 40%, forward 21%), rank 0 25% (forward 25%), "
        "dp transfer 12%, tp unknown 2%; 2% cannot be told by these clocks"
    )


def test_ranks_that_have_little_are_told_together() -> None:
    shares = [share(rank, "forward", 4) for rank in range(25)]

    assert line(*shares).endswith(": 25 ranks 100% (forward 100%)")
    assert line(*shares, share(25, "input", 100)).endswith("rank 25 50% (input 50%), 25 other ranks 50% (forward 50%)")


def test_nothing_is_told_where_it_is_not_known() -> None:
    assert not [*critical_path_lines(None)]
