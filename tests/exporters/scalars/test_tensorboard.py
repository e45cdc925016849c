"""Files of events, read by TensorBoard itself."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

import commtrace
from commtrace.exporters.scalars.series import DatedEvent, Point
from commtrace.findings.status import LiveEvent
from tests.live.findings import SECOND, silent_finding

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
)
from commtrace.exporters.scalars.tensorboard import EventFile  # noqa: E402

TAG = "commtrace/rank_0/step_seconds"


def point(step: int, seconds: float) -> Point:
    return Point("rank_0", step, 1_000.0 + step, {"step_seconds": seconds})


def scalars(directory: Path, tag: str = TAG) -> list[tuple[float, int, float]]:
    """Times, steps and values, as TensorBoard shows them."""
    shown = accumulator.EventAccumulator(str(directory)).Reload()
    return [(event.wall_time, event.step, event.value) for event in shown.Scalars(tag)]


def test_scalars_and_findings_have_the_steps_and_times_of_the_job(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "a" / "b")
    file.write([point(7, 0.5), Point("job", 6, 1_000.0, {"stragglers": 2.0})], [])
    silent = LiveEvent("found", 1_020 * SECOND, silent_finding(2), "Rank 2 is silent.")
    file.write([], [DatedEvent(7, silent)])

    shown = accumulator.EventAccumulator(str(tmp_path / "a" / "b")).Reload()
    assert shown.Tags()["scalars"] == [TAG, "commtrace/job/stragglers"]
    assert scalars(tmp_path / "a" / "b") == [(1_007.0, 7, 0.5)]
    assert scalars(tmp_path / "a" / "b", "commtrace/job/stragglers") == [(1_000.0, 6, 2.0)]
    (text,) = shown.Tensors("commtrace/findings/text_summary")
    assert (text.wall_time, text.step) == (1_020.0, 7)
    assert text.tensor_proto.string_val == [b"Rank 2 is silent."]
    file.close()


def test_steps_that_a_restarted_job_repeats_replace_those_before(tmp_path: Path) -> None:
    before = EventFile(tmp_path)
    before.write([point(step, 1.0) for step in (1, 2, 3)], [])
    before.close()
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / first.name.replace("tfevents.", "tfevents.0"))  # as if it were older
    after = EventFile(tmp_path)
    after.write([point(2, 2.0)], [])
    after.close()
    assert [(step, value) for _, step, value in scalars(tmp_path)] == [(1, 1.0), (2, 2.0)]


def test_a_disk_that_is_full_for_a_while_tears_no_record(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.write([point(1, 1.0)], [])
    (path,) = tmp_path.iterdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                file.write([point(step, 1.0)], [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.write([point(4, 1.0)], [])
    file.close()
    assert [step for _, step, _ in scalars(tmp_path)] == [1, 2, 3, 4]


def test_a_recording_writes_the_steps_of_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "tb" / "{run_id}"
    tensorboard = commtrace.config.TensorboardConfig(dir=folder)
    commtrace.start(
        commtrace.Config(dir=str(tmp_path / "run"), run_id="r1", export="tensorboard", tensorboard=tensorboard)
    )
    for step in range(100, 104):
        with commtrace.step(step), commtrace.span("work"):
            commtrace.count(tokens=10)
    commtrace.stop()
    points = scalars(tmp_path / "tb" / "r1")
    assert points[-1][1] == 103
    assert 0 < points[-1][2] < 60
    rates = scalars(tmp_path / "tb" / "r1", "commtrace/rank_0/tokens_per_second")
    assert rates[-1][2] > 0
