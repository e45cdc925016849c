"""When training has stopped, as far as one process knows, with a clock in our hands."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commtrace.capture.hangs.hang_watch import HangWatch, stacks_of_threads
from commtrace.trace import schema
from commtrace.trace.files.side_files import read_last_hang
from tests.capture.recording import Recording
from tests.factory import metadata

SECOND = 1_000_000_000


class Watched:
    """A process whose time passes when a test says so; the watch looks once a second."""

    def __init__(self, directory: Path, least_seconds: float = 5.0, rank: int = 3, session: int = 1_000) -> None:
        self.now = 100 * SECOND
        self.tracer = Recording().tracer
        self.watch = HangWatch(self.tracer, list, least_seconds, now=lambda: self.now)
        self.directory = directory / f"rank-{rank:05}"
        # As start() does, without the thread.
        self.watch._metadata = replace(metadata(rank, world_size=8), session=session)
        self.watch._directory = self.directory

    def train(self, steps: int, seconds_each: float = 1.0) -> None:
        for _ in range(steps):
            self.tracer.begin_step()
            self.wait(seconds_each)

    def wait(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds))):
            self.now += round(SECOND * seconds / max(1, round(seconds)))
            self.watch.look()

    def dumps(self) -> list[dict[str, Any]]:
        if self.watch._writing is not None:
            self.watch._writing.join(10)
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob("hang-*.json"))]


def test_a_process_that_trains_is_left_alone(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.train(50)
    assert (watched.watch.report, watched.dumps()) == (None, [])


def test_after_ten_typical_steps_without_movement_it_writes_what_it_is_in(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.train(10)
    with_phase = watched.tracer.enter(schema.FORWARD, "forward", microbatch=2)
    watched.wait(10)
    assert not watched.dumps()
    watched.wait(2)
    report = watched.watch.report
    assert report is not None
    assert (report.metadata.rank, report.activity.at[0]) == (3, 9)
    assert [phase.name for phase in report.activity.open] == ["forward"]
    (dump,) = watched.dumps()
    assert dump == report.to_json()
    watched.tracer.leave(with_phase)


def test_short_steps_are_given_the_least_time(tmp_path: Path) -> None:
    watched = Watched(tmp_path, least_seconds=30)
    watched.train(20)
    watched.wait(29)
    assert watched.watch.report is None
    watched.wait(3)
    assert watched.watch.report is not None


def test_long_steps_are_given_ten_of_them(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.train(5, seconds_each=20)
    watched.wait(175)
    assert watched.watch.report is None
    watched.wait(30)
    assert watched.watch.report is not None


@pytest.mark.parametrize("rank", [0, 3])
def test_one_hang_is_one_dump_and_its_end_is_noticed(
    rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path, rank=rank)
    watched.train(10)
    watched.wait(60)
    assert len(watched.dumps()) == 1
    watched.train(1)
    assert watched.watch.report is None
    messages = [one.message for one in caplog.records]
    assert ("commtrace: training goes on again on rank 0" in messages) == (rank == 0)
    assert bool(messages) == (rank == 0), "one rank of a thousand speaks"
    watched.wait(60)
    assert len(watched.dumps()) == 2


@pytest.mark.parametrize("kind", [schema.CHECKPOINT, schema.EVALUATION])
def test_saving_and_evaluating_are_given_more_time(kind: int, tmp_path: Path) -> None:
    # its state is given to exporters as well
    watched = Watched(tmp_path)
    watched.train(10)
    watched.tracer.enter(kind, "slow")
    watched.wait(90)
    assert watched.watch.report is None
    watched.wait(15)
    assert watched.watch.report is not None


def test_an_evaluation_of_many_short_phases_is_no_hang(tmp_path: Path) -> None:
    """No step, no communication, no phase that stays open: but batch after batch is evaluated."""
    watched = Watched(tmp_path)
    watched.train(10)
    for _ in range(30):
        watched.tracer.leave(watched.tracer.enter(schema.EVALUATION, "evaluation"))
        watched.tracer.recorder.flush()
        watched.wait(3)
    assert watched.watch.report is None
    watched.wait(12)
    assert watched.watch.report is not None


def test_before_three_steps_have_ended_it_is_given_more_time(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.train(3)
    watched.wait(47)
    assert watched.watch.report is None
    watched.wait(5)
    assert watched.watch.report is not None


def test_a_full_disk_costs_the_file_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(tmp_path, rank=0)
    watched.directory.parent.joinpath("rank-00000").write_text("in the way")
    watched.train(10)
    watched.wait(20)
    assert watched.watch.report is not None
    assert watched.dumps() == []
    assert "could not be written" in caplog.text


def test_the_report_of_an_earlier_attempt_is_kept(tmp_path: Path) -> None:
    for session in (7, 8):
        watched = Watched(tmp_path, session=session)
        watched.train(10)
        watched.wait(20)
        assert len(watched.dumps()) == session - 6
    for session in (7, 8):
        written = read_last_hang(watched.directory, session, [])
        assert written is not None
        assert written.metadata.session == session


def test_a_file_system_that_does_not_answer_keeps_nobody_from_watching(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, rank=0)
    answers = threading.Event()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: answers.wait(30))
    watched.train(10)
    watched.wait(20)
    first = watched.watch.report
    watched.train(1)
    watched.wait(20)
    assert first is not None
    assert watched.watch.report not in (None, first)
    assert "Its state is not written: the file system of the run does not answer." in caplog.text
    answers.set()
    assert watched.dumps() == []  # there is no folder, which the test has prevented


def test_stacks_tell_where_every_other_thread_is() -> None:
    ready, go = threading.Event(), threading.Event()

    def waits_here() -> None:
        ready.set()
        go.wait()

    thread = threading.Thread(target=waits_here, name="the one that waits")
    thread.start()
    ready.wait()
    stacks = {one.thread: one.frames for one in stacks_of_threads()}
    go.set()
    thread.join()
    assert any("waits_here" in frame for frame in stacks["the one that waits"])
    assert threading.current_thread().name not in stacks


def test_a_watch_that_is_stopped_while_it_starts_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = HangWatch(Recording().tracer, list, 5.0)
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def stopped_in_between(thread: threading.Thread) -> None:
        watch.stop()  # As the training thread does, while the harvester's starts the watch.
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", stopped_in_between)
    watch.start(tmp_path, metadata(0))
    (thread,) = started
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(("ends", "warnings"), [(True, 0), (False, 1)])
def test_a_watch_that_cannot_start_costs_nothing_else_and_is_told_unless_python_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool, warnings: int
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    watch = HangWatch(Recording().tracer, list, 5.0)
    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: not ends)

    watch.start(tmp_path, metadata(0))
    watch.stop()

    assert len([record for record in caplog.records if "watching for hangs" in record.getMessage()]) == warnings


def test_a_forked_child_waits_for_no_lock_of_the_watch(tmp_path: Path) -> None:
    watch = Watched(tmp_path).watch
    with watch._stop._cond:  # type: ignore[attr-defined]  # as its thread may at the moment of the fork
        child = threading.Thread(target=watch.abandon_after_fork, daemon=True)
        child.start()
        child.join(10)

        assert not child.is_alive()
