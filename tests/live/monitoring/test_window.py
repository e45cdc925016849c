"""What a rank tells about a window, and that it stays small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from commtrace.findings.status import JobMeans
from commtrace.live.monitoring.job_steps import MOST_REPORTED, RankStep
from commtrace.live.monitoring.waits import CALLS_OF_A_BLOCK, MOST_GROUPS, BlockReport, BlockTime
from commtrace.live.monitoring.window import Pause, ReportWindow, WindowReport, WorkSum, job_means, work_of
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.trace.metadata import ClockAnchor, DeviceState
from tests.factory import metadata
from tests.trace.rows import mark

MS = 1_000_000
BEGIN_NS = 1_700_000_000 * 10**9
"""The monotonic clock's zero, by the anchor of the factory."""


def step(
    number: int, *, forward: int = 60, data: int = 10, dp: int = 20, bubble: int = 5, other: int = 5
) -> StepSummary:
    """A step whose parts, in ms, add up."""
    duration = forward + data + dp + bubble + other
    return StepSummary(
        run_id="made-run",
        rank=3,
        step=number,
        start_ns=number * 1_000 * MS,
        duration_ns=duration * MS,
        compute_ns={"forward": forward * MS},
        exposed_ns={"dp": dp * MS},
        bubble_ns=bubble * MS,
        data_ns=data * MS,
        other_ns=other * MS,
    )


def window() -> ReportWindow:
    return ReportWindow(LiveRank(metadata(3, world_size=8, node="node1"), Path("run")))


def test_work_is_what_is_left_without_waiting() -> None:
    assert work_of(step(0)) == (60 * MS, 10 * MS, 0, 0, 0, 5 * MS)


def test_a_report_holds_the_means_of_its_steps() -> None:
    gathered = window()
    for number, forward in enumerate((60, 62, 70)):
        gathered.add(step(number, forward=forward))
    report = gathered.close(17, now_ns=2_500 * MS)
    assert report == WindowReport(
        rank=3,
        host="node1",
        stage=0,
        window=17,
        steps=3,
        last_step=2,
        age_ns=(2_500 - 2_000 - 110) * MS,
        duration_ns=104 * MS,
        work_ns=(64 * MS, 10 * MS, 0, 0, 0, 5 * MS),
        error_ns=round(1.4826 * 2 * MS / 3**0.5),  # the median deviation of 75, 77, 85 is 2
        exposed_ns={"dp": 20 * MS, "pp": 5 * MS},
        work_sums=tuple(
            WorkSum(number, 1, work_ms * MS, BEGIN_NS + number * 1_000 * MS)
            for number, work_ms in enumerate((75, 77, 85))
        ),
    )


def test_a_report_holds_what_the_driver_told_of_the_device_since_the_last_one() -> None:
    rank = LiveRank(metadata(3, world_size=8, node="node1"), Path("run"))
    rank.learn(mark("topology", {"device": {"name": "NVIDIA H100", "uuid": "GPU-1"}}))
    rank.learn(mark("device_state", {"at_ns": 5, "clock_mhz": 1095}))
    gathered = ReportWindow(rank)
    reports = [gathered.close(number, now_ns=MS) for number in (1, 2)]
    assert msgspec.json.decode(msgspec.json.encode(reports[0]), type=WindowReport) == reports[0]
    assert [(one.device_model, one.device_states) for one in reports] == [
        ("NVIDIA H100", (DeviceState(5, clock_mhz=1095),)),
        ("", ()),
    ]


def test_a_window_without_steps_says_how_long_ago_the_last_one_was() -> None:
    gathered = window()
    gathered.add(step(3))
    gathered.add(step(4))
    gathered.close(1, now_ns=4_100 * MS)
    report = gathered.close(2, now_ns=9_100 * MS)
    assert (report.steps, report.last_step, report.age_ns, report.work_ns) == (0, 4, 5_000 * MS, (0,) * 6)


def test_a_step_longer_than_a_window_is_told_together_with_the_next_one() -> None:
    """One alone tells nothing of how much steps scatter."""
    gathered = window()
    gathered.add(step(4, forward=60))
    alone = gathered.close(1, now_ns=4_100 * MS)
    gathered.add(step(5, forward=64))
    report = gathered.close(2, now_ns=9_100 * MS)
    assert (alone.steps, alone.last_step, alone.work_ns) == (0, 4, (0,) * 6)
    assert (report.steps, report.last_step, report.work_ns[0]) == (2, 5, 62 * MS)
    assert report.error_ns == round(1.4826 * 2 * MS / 2**0.5)


@pytest.mark.parametrize("every", [2, 3])
def test_pauses_every_few_steps_are_reported_by_step_and_left_out_of_the_work(every: int) -> None:
    gathered = window()
    for number in range(12):
        gathered.add(replace(step(number), gc_ns=500 * MS if number % every == 0 else 0))
    report = gathered.close(17, now_ns=0)

    assert report.pauses == tuple(
        Pause(2, number, 500 * MS, BEGIN_NS + number * 1_000 * MS) for number in range(0, 12, every)
    )
    assert report.steady_ns[2] == pytest.approx(0, abs=1)  # means are whole ns


def test_time_of_every_step_is_work() -> None:
    gathered = window()
    for number in range(12):
        gathered.add(step(number, data=10 + number % 3))
    assert gathered.close(17, now_ns=0).pauses == ()


def test_the_times_of_chosen_steps_are_reported_once_on_the_wall_clock() -> None:
    anchor = ClockAnchor(monotonic_ns=0, realtime_ns=10**18, bracket_ns=40)
    gathered = ReportWindow(LiveRank(metadata(3, world_size=8, anchor=anchor), Path("run")), times_every=2)
    for number in (1, 2, 3, 2):
        gathered.add(step(number))
    assert gathered.close(17, now_ns=0).step_times == (
        RankStep(2, 0, 10**18 + 2_000 * MS, 10**18 + 2_100 * MS),
        RankStep(2, 1, 10**18 + 2_000 * MS, 10**18 + 2_100 * MS),
    )
    gathered.add(step(4))
    assert [one.step for one in gathered.close(18, now_ns=0).step_times] == [4], "a single step, too"
    assert gathered.close(19, now_ns=0).step_times == ()


def test_the_newest_of_very_short_steps_are_reported() -> None:
    gathered = ReportWindow(LiveRank(metadata(3, world_size=8), Path("run")), times_every=1)
    for number in range(100):
        gathered.add(step(number))
    report = gathered.close(17, now_ns=0)

    assert [one.step for one in report.step_times] == list(range(100 - MOST_REPORTED, 100))
    message = msgspec.json.encode(report)
    assert len(message) < 6_000
    assert msgspec.json.decode(message, type=WindowReport) == report


def test_a_report_survives_its_message_and_stays_small() -> None:
    gathered = window()
    roles = dict.fromkeys(("tp", "dp", "cp", "ep", "embedding", "expert_dp", "world", "position"), 10**12)
    gathered.add(
        StepSummary("r" * 200, 3, 10**9, 10**18, 10**13, compute_ns={"forward": 10**12}, exposed_ns=roles, bubble_ns=1)
    )
    largest = tuple(
        BlockTime(2**62 + group, 3, 10**5, 10**8, (10**12,) * CALLS_OF_A_BLOCK) for group in range(MOST_GROUPS)
    )
    gathered.waits.newest = BlockReport(2**20, 10**6, largest)
    report = gathered.close(10**9, now_ns=2 * 10**18)
    message = msgspec.json.encode(report)
    assert len(message) < 1_200
    assert msgspec.json.decode(message, type=WindowReport) == report


@pytest.mark.parametrize(
    "message",
    [b"{}", b"[1, 2]", b"nonsense", b'{"rank": -1, "host": "a", "stage": 0, "window": 1}',
     b'{"rank": 1, "host": "a", "stage": 0, "window": 1e400}',
     b'{"rank": 1, "host": "a", "stage": 0, "window": 1, "work_ns": [1, 2, 3]}',
     b'{"rank": 1, "host": "a", "stage": 0, "window": 1, "exposed_ns": {"a": 99999999999999999999}}'],
)  # fmt: skip
def test_a_message_that_is_no_report_is_refused(message: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.json.decode(message, type=WindowReport)


def test_the_means_of_a_job_are_over_the_ranks_of_the_newest_window_and_add_up() -> None:
    def reported(rank: int, window: int, steps: int, compute_ns: int, exposed_ns: dict[str, int]) -> WindowReport:
        duration_ns = compute_ns + 20 + sum(exposed_ns.values())
        work_ns = (compute_ns, 20, 0, 0, 0, 0)
        return WindowReport(
            rank, "n", 0, window, steps, 40 + rank, 0, duration_ns=duration_ns, work_ns=work_ns, exposed_ns=exposed_ns
        )

    reports = [
        reported(0, 7, 5, 100, {"dp": 60}),
        reported(1, 7, 5, 120, {"dp": 20, "pp": 20}),
        reported(2, 7, 0, 0, {}),  # no step has ended there
        reported(3, 6, 5, 9_000, {}),  # silent since
    ]
    means = job_means(reports)
    assert means == JobMeans(
        step=41,
        ranks=2,
        step_ns=180,
        work_ns={"compute": 110, "data": 20, "gc": 0, "checkpoint": 0, "evaluation": 0, "unknown": 0},
        exposed_ns={"dp": 40, "pp": 10},
    )
    assert sum(means.work_ns.values()) + sum(means.exposed_ns.values()) == means.step_ns
    assert job_means(reports[2:3]) is None
    assert job_means([]) is None
