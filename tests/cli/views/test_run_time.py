"""The critical path in words."""

from __future__ import annotations

from dataclasses import replace

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.cli.views.run_time import critical_path_lines, lost_time_lines


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
        "dp transfer 12%, tp unknown 2%; 2% not resolved by these clocks"
    )


def test_ranks_that_have_little_are_told_together() -> None:
    shares = [share(rank, "forward", 4) for rank in range(25)]

    assert line(*shares).endswith(": 25 ranks 100% (forward 100%)")
    assert line(*shares, share(25, "input", 100)).endswith("rank 25 50% (input 50%), 25 other ranks 50% (forward 50%)")


def test_nothing_is_told_where_it_is_not_known() -> None:
    assert not [*critical_path_lines(None)]


HOUR = 3_600_000_000_000
LOST = LostTime(
    num_steps=10, gpus=None, steps_ns=2 * HOUR, ideal_ns=HOUR, stragglers_ns=HOUR // 2, imbalance_ns=HOUR // 500,
    exposed_communication_ns=HOUR // 4, bubble_ns=0, input_ns=HOUR // 4, rest_ns=-HOUR // 500,
)  # fmt: skip


def test_it_is_one_line_that_adds_up() -> None:
    assert [*lost_time_lines(LOST)] == [
        "Lost: 50% of 2.0 h in steps: stragglers 25% (30 min), imbalance <1%, exposed communication 12% (15 min), "
        "input 12% (15 min); ideal 50%"
    ]


def test_of_a_job_on_gpus_it_is_told_in_gpu_hours() -> None:
    (line,) = lost_time_lines(replace(LOST, gpus=64))

    assert line.startswith("Lost: 50% of 128 GPU-hours in steps: stragglers 25% (32 GPU-hours)")


def test_nothing_is_told_of_steps_that_were_not_replayed() -> None:
    assert not [*lost_time_lines(None)]
