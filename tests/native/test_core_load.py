"""Many calls: of several threads, under signals, with forks and with recordings that begin and end in between."""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.collectives.functional import FunctionalCapture, FunctionalWaits
from commtrace.trace import schema
from tests.capture.recording import Recording, fake_backend
from tests.native.forked import in_child
from tests.process_groups import world_group

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("native_engine")]


@contextmanager
def timer(interval_seconds: float) -> Iterator[list[int]]:
    """Interrupt the main thread all the time; yields a list that holds how often."""
    count = [0]

    def handle(*_: object) -> None:
        count[0] += 1

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, interval_seconds, interval_seconds)
    try:
        yield count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


FUNCTIONS: Any = torch.ops._c10d_functional

# Its new name, since torch 2.13.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Launches:
    """All kinds of calls of one thread, on a group of its own; counts those that are to be recorded."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.tensor, self.large = torch.zeros(4), torch.zeros(16)
        self.launched = 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            dist.all_reduce(self.tensor, group=self.group)
            dist.broadcast(self.tensor, 0, group=self.group)
            all_gather(self.large, self.tensor, group=self.group)
            dist.all_reduce(self.tensor, group=self.group, async_op=True).wait()
            dist.send(self.tensor, 1, group=self.group)
            sent = dist.isend(self.tensor, 2, group=self.group, tag=3)
            assert sent is not None
            sent.wait()
            FUNCTIONS.wait_tensor(FUNCTIONS.all_reduce(self.tensor, "sum", self.group.group_name))
            self.launched += 7


@contextmanager
def capturing(recording: Recording) -> Iterator[None]:
    """With the methods of ``ProcessGroup`` replaced, and the functional operators."""
    with recording.capturing():
        functional = FunctionalCapture(recording.tracer, FunctionalWaits(recording.tracer))
        functional.install()
        try:
            yield
        finally:
            functional.uninstall()


def fork_and_wait(group: Any) -> None:
    """Fork a child that communicates, and wait for its end."""

    def communicates() -> bool:
        for _ in range(10):
            dist.all_reduce(torch.zeros(4), group=group)
        return True

    assert in_child(communicates, 60.0)


def in_threads(actions: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    return threads


def _check(recording: Recording, launched: int) -> None:
    rows = recording.rows(schema.COLLECTIVE, schema.P2P)
    dropped = recording.recorder.dropped
    num_dropped = dropped.get("collective", 0) + dropped.get("p2p", 0)
    assert len(rows) + num_dropped == launched
    assert len({row.id for row in rows}) == len(rows)
    assert len({(row.kind, row.name, row.group, row.seq, row.peer) for row in rows}) == len(rows)
    assert [text for text in recording.warnings() if "switched off" in text] == []


@pytest.mark.parametrize("rounds", [2_000, pytest.param(42_000, marks=pytest.mark.thorough)])
def test_each_of_a_million_calls_is_recorded_or_counted_as_dropped(rounds: int) -> None:
    with fake_backend():
        threads = [Launches(dist.new_group([0, 1, 2, 3])) for _ in range(4)]
        for _ in range(2):  # one recording after another
            recording = Recording(capacity=200_000)
            for launches in threads:
                launches.launched = 0
            with capturing(recording), timer(0.0005) as interrupted:
                running = in_threads([partial(launches.run, rounds // 2) for launches in threads])
                forks = 0
                while any(thread.is_alive() for thread in running):
                    recording.recorder.flush()
                    if forks < 10:
                        forks += 1
                        fork_and_wait(threads[0].group)
                for thread in running:
                    thread.join()
            _check(recording, sum(launches.launched for launches in threads))
            assert interrupted[0] > 10


def test_recordings_begin_and_end_while_threads_call() -> None:
    with fake_backend():
        is_over = threading.Event()
        failures: list[BaseException] = []

        def train(launches: Launches) -> None:
            try:
                while not is_over.is_set():
                    launches.run(20)
            except BaseException as error:
                failures.append(error)

        trained = [Launches(dist.new_group([0, 1, 2, 3])) for _ in range(4)]
        threads = in_threads([partial(train, launches) for launches in trained])
        num_rows = 0
        try:
            for _ in range(60):
                recording = Recording()
                with capturing(recording):
                    time.sleep(0.005)
                rows = recording.rows(schema.COLLECTIVE, schema.P2P)
                num_rows += len(rows)
                assert len({(row.kind, row.name, row.group, row.seq, row.peer) for row in rows}) == len(rows)
                assert recording.warnings() == []
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert failures == []
        assert num_rows > 100


class InterruptedCallError(Exception):
    """What a signal's handler raises."""


def test_exceptions_of_signals_within_calls_leave_all_in_order() -> None:
    def handle(*_: object) -> None:
        raise InterruptedCallError

    with fake_backend():
        tensor, caught = torch.zeros(4), 0
        recording = Recording(capacity=1_000_000)
        name = dist.distributed_c10d._get_default_group().group_name
        before = signal.signal(signal.SIGALRM, handle)
        try:
            with capturing(recording):
                counters: Any = recording.tracer.groups.state(world_group()).collective_seq
                end = time.monotonic() + 3
                while time.monotonic() < end:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.0003)
                        while True:
                            dist.all_reduce(tensor)
                            FUNCTIONS.wait_tensor(FUNCTIONS.all_reduce(tensor, "sum", name))
                    except InterruptedCallError:
                        caught += 1
                        recording.recorder.flush()
                launched = counters.launched
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        rows = recording.rows(schema.COLLECTIVE)

    assert caught > 50
    assert sorted(row.seq for row in rows) == list(range(launched))
    assert recording.warnings() == []


def resident_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
@pytest.mark.parametrize("rounds", [500, pytest.param(33_000, marks=pytest.mark.thorough)])
def test_calls_leave_no_memory_behind(rounds: int) -> None:
    with fake_backend():
        launches = Launches(dist.group.WORLD)
        recording = Recording(capacity=100_000)

        def run(rounds: int) -> None:
            for _ in range(rounds // 500):
                launches.run(500)
                recording.recorder.flush()
                recording.sink.rows.clear()
            gc.collect()

        with capturing(recording):
            run(3_000)  # the ring, the blocks and the pools are in use then
            before = resident_kib()
            run(rounds)
            grown_kib = resident_kib() - before
        assert grown_kib < 4_096


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
@pytest.mark.parametrize("recordings", [30, pytest.param(200, marks=pytest.mark.thorough)])
def test_recordings_leave_next_to_no_memory_behind(recordings: int) -> None:
    with fake_backend():
        launches = Launches(dist.group.WORLD)

        def run(number: int) -> None:
            for _ in range(number):
                recording = Recording()
                with capturing(recording):
                    launches.run(5)
                recording.rows()
                recording.tracer.groups.states.clear()
            gc.collect()

        run(20)
        before = resident_kib()
        run(recordings)
        assert resident_kib() - before < 1_024 + 20 * recordings


def test_profilers_see_the_calls_by_their_names() -> None:
    def profiled() -> set[str]:
        profiler = cProfile.Profile()
        with fake_backend():
            profiler.enable()
            dist.all_reduce(torch.zeros(4))
            dist.broadcast(torch.zeros(4), 0)
            dist.all_reduce(torch.zeros(4), async_op=True).wait()
            profiler.disable()
        statistics: Any = pstats.Stats(profiler)
        functions = statistics.stats
        return {name for (file, _, name) in functions if file == "~" and ("allreduce" in name or "broadcast" in name)}

    def seen_by_profile_function() -> list[str]:
        names: list[str] = []

        def profile(_frame: object, event: str, function: Any) -> None:
            if event == "c_call" and function.__name__ in ("allreduce", "broadcast", "wait"):
                names.append(function.__name__)

        with fake_backend():
            sys.setprofile(profile)
            try:
                dist.all_reduce(torch.zeros(4))
                dist.broadcast(torch.zeros(4), 0)
            finally:
                sys.setprofile(None)
        return names

    expected = seen_by_profile_function()
    recording = Recording()
    with fake_backend():
        recording.tracer.groups.register_known_groups()
    with capturing(recording):
        assert seen_by_profile_function() == expected
        assert any("allreduce" in name for name in profiled())
    assert set(expected) >= {"allreduce", "broadcast"}
