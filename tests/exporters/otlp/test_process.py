"""The process that sends for a rank: it dies with the rank, may die before it, and every span is accounted for."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commtrace.config import Config
from commtrace.exporters.otlp import process as process_module
from commtrace.exporters.otlp.exporter import OtlpExporter
from commtrace.exporters.otlp.process import HelperSender
from tests.e2e.launch import REPOSITORY
from tests.exporters.otlp.made import live_rank, step_rows, summary
from tests.exporters.otlp.receiver import attributes, receiving

SECONDS = 60.0
CONFIG = Config(otlp_level="modules")


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpExporter]:
    one = OtlpExporter(CONFIG, live_rank(0))
    yield one
    if one._thread.is_alive():
        one.close()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_steps(exporter: OtlpExporter, first: int, count: int) -> None:
    for step in range(first, first + count):
        exporter.step(summary(0, step), step_rows(0, step))


def helper_of(exporter: OtlpExporter) -> int:
    until(lambda: exporter._helper is not None and exporter._helper.pid > 0)
    assert exporter._helper is not None
    return exporter._helper.pid


def is_there(pid: int) -> bool:
    """Whether there is such a process, a zombie included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_ends_with_the_recording_and_leaves_nothing_behind(exporter: OtlpExporter) -> None:
    pid = helper_of(exporter)
    exporter.close()

    assert not is_there(pid)


def test_one_that_is_killed_is_replaced_and_what_it_had_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "RESTART_SECONDS", 0.5)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = OtlpExporter(CONFIG, live_rank(0))
        account = exporter.account
        run_steps(exporter, 0, 2)
        until(lambda: account.sent == 18)
        killed = helper_of(exporter)
        os.kill(killed, signal.SIGKILL)
        run_steps(exporter, 2, 1)
        until(lambda: account.total_dropped == 9)
        run_steps(exporter, 3, 4)
        until(lambda: account.sent + account.total_dropped == account.produced)
        exporter.close()

    assert not is_there(killed)
    assert (account.produced, account.sent, account.dropped["refused"]) == (63, 54, 9)
    assert len(receiver.spans) == 54
    last = [span for span in receiver.spans if span.name == "step"][-1]
    assert attributes(last)["commtrace.otlp.dropped_spans"] == 9
    assert receiver.resources[-1]["dl.tensor_parallel.rank"] == 0, "the new one was told of the topology, too"
    assert [one.message for one in caplog.records if "exit code -9" in one.message] != []
    assert len([one for one in caplog.records if "is gone" in one.message]) == 1


def test_one_that_is_frozen_holds_up_neither_the_harvester_nor_the_end(exporter: OtlpExporter) -> None:
    frozen = helper_of(exporter)
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    run_steps(exporter, 0, 5)
    exporter.close()

    assert time.monotonic() - began < 15.0
    assert not is_there(frozen)
    account = exporter.account
    assert (account.produced, account.sent, account.total_dropped) == (45, 0, 45)


def test_where_no_process_can_be_started_a_thread_sends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = OtlpExporter(CONFIG, live_rank(0))
        run_steps(exporter, 0, 2)
        until(lambda: exporter.account.sent == 18)
        exporter.close()

    assert len(receiver.spans) == 18
    assert "are sent by a thread" in caplog.text


def test_signals_that_a_launcher_sends_to_all_do_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = OtlpExporter(CONFIG, live_rank(0))
        run_steps(exporter, 0, 1)
        until(lambda: exporter.account.sent == 9)  # it has answered: it has taken its precautions
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(helper_of(exporter), number)
        run_steps(exporter, 1, 1)
        until(lambda: exporter.account.sent == 18)
        exporter.close()

    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


_RANK = """
import os, sys, time
from pathlib import Path
from commtrace.config import Config
from commtrace.exporters.otlp.exporter import open_otlp
from commtrace.live.rank import LiveRank
from tests.trace.rows import metadata
exporter = open_otlp(Config(), LiveRank(metadata(), Path()))
while exporter._helper is None:
    time.sleep(0.01)
print(exporter._helper.pid, flush=True)
forked = os.fork() if "fork" in sys.argv else -1
if forked == 0:
    exporter.abandon_after_fork()
    time.sleep(60)
print(sorted(name for name in sys.modules if name.split(".")[0] == "opentelemetry"), forked, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["", "fork"])
def test_it_does_not_outlive_a_rank_that_is_killed_and_the_rank_never_loads_the_sdk(how: str) -> None:
    rank = subprocess.Popen([sys.executable, "-c", _RANK, how], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    forked = -1
    try:
        assert rank.stdout is not None
        helper = int(rank.stdout.readline())
        modules, _, child = rank.stdout.readline().rpartition(" ")
        forked = int(child)
        rank.send_signal(signal.SIGKILL)
        rank.wait(SECONDS)
        until(lambda: not is_there(helper) or _is_zombie(helper))
    finally:
        rank.kill()
        if forked > 0:
            os.kill(forked, signal.SIGKILL)
        rank.communicate(timeout=SECONDS)

    assert "opentelemetry.sdk" not in modules


def _is_zombie(pid: int) -> bool:
    """Of a process whose parent is gone: whoever adopts it is not of our making."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_is_asked_after_the_end_is_counted() -> None:
    sender = HelperSender(CONFIG, live_rank(0))
    sender.close(SECONDS)
    settled: list[tuple[int, bool]] = []
    sender.send([], lambda count, was_sent: settled.append((count, was_sent)))

    assert settled == []
    assert 0.0 < sender.pause_seconds <= process_module.RESTART_SECONDS
