"""What was lost, in words."""

from __future__ import annotations

from dataclasses import replace

from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.cli.views.lost_time import lost_time_lines

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
