"""The process that sends for a rank: it dies with the rank, may die before it, and every span is accounted for."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from commtrace.config import Config, OtlpConfig
from commtrace.exporters.otlp import exporter as exporter_module
from commtrace.exporters.otlp import process_sender as process_module
from commtrace.exporters.otlp.exporter import OtlpExporter
from commtrace.exporters.otlp.process_sender import ProcessSender
from commtrace.trace import side_process
from tests.e2e.launch import REPOSITORY
from tests.exporters.otlp.made import SECONDS, live_rank, run_steps
from tests.exporters.otlp.receiver import attributes, receiving
from tests.waiting import until

CONFIG = Config(otlp=OtlpConfig(level="modules"))


def worker_of(exporter: OtlpExporter) -> int:
    until(lambda: exporter._worker is not None and exporter._worker.pid > 0)
    assert exporter._worker is not None
    return exporter._worker.pid


def is_there(pid: int) -> bool:
    """Whether there is such a process, a zombie included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_ends_with_the_recording_and_leaves_nothing_behind(opened: Callable[..., OtlpExporter]) -> None:
    exporter = opened()
    pid = worker_of(exporter)
    exporter.close()

    assert not is_there(pid)


def test_one_that_is_killed_is_replaced_and_what_it_had_is_counted(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "RESTART_SECONDS", 0.5)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = opened()
        account = exporter.account
        run_steps(exporter, 0, 2)
        until(lambda: account.sent == 18)
        killed = worker_of(exporter)
        os.kill(killed, signal.SIGKILL)
        run_steps(exporter, 2, 1)
        until(lambda: account.total_dropped == 9)
        run_steps(exporter, 3, 4)
        until(lambda: account.sent + account.total_dropped == account.produced)
        exporter.close()

    assert not is_there(killed)
    assert (account.produced, account.sent, account.dropped["unanswered"]) == (63, 54, 9)
    assert len(receiver.spans) == 54
    last = [span for span in receiver.spans if span.name == "step"][-1]
    assert attributes(last)["commtrace.otlp.dropped_spans"] == 9
    assert receiver.resources[-1]["dl.tensor_parallel.rank"] == 0, "the new one was told of the topology, too"
    assert [one.message for one in caplog.records if "exit code -9" in one.message] != []
    assert len([one for one in caplog.records if "is gone" in one.message]) == 1


def test_one_that_is_frozen_holds_up_neither_the_harvester_nor_the_end(opened: Callable[..., OtlpExporter]) -> None:
    exporter = opened()
    frozen = worker_of(exporter)
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    run_steps(exporter, 0, 5)
    exporter.close()

    assert time.monotonic() - began < SECONDS
    assert not is_there(frozen)
    account = exporter.account
    assert (account.produced, account.sent, account.total_dropped) == (45, 0, 45)


def test_a_thread_sends_when_no_process_can_be_started(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = opened()
        run_steps(exporter, 0, 2)
        until(lambda: exporter.account.sent == 18)
        exporter.close()

    assert len(receiver.spans) == 18
    assert "are sent by a thread" in caplog.text


def test_signals_that_a_launcher_sends_to_all_do_not_end_it(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = opened()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker_of(exporter), number)  # it has just been started
        run_steps(exporter, 0, 2)
        until(lambda: exporter.account.sent == 18)
        exporter.close()

    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "the rank still gets its own"


def starts_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_process, "_PROGRAM", f"import time; time.sleep({seconds}); {side_process._PROGRAM}")


def test_a_recording_that_ends_before_it_is_ready_loses_nothing(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts_after(2 * exporter_module.CLOSE_SECONDS, monkeypatch)
    monkeypatch.setattr(exporter_module, "START_SECONDS", SECONDS)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = opened()
        run_steps(exporter, 0, 2)
        exporter.close()

    assert (exporter.account.sent, exporter.account.total_dropped, len(receiver.spans)) == (18, 0, 18)
    assert caplog.records == []


def test_one_that_does_not_get_ready_is_not_waited_for_without_end(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts_after(SECONDS, monkeypatch)
    monkeypatch.setattr(exporter_module, "START_SECONDS", 0.2)
    monkeypatch.setattr(exporter_module, "CLOSE_SECONDS", 0.2)
    exporter = opened()
    pid = worker_of(exporter)
    run_steps(exporter, 0, 1)
    exporter.close()
    exporter._thread.join(SECONDS)

    assert not is_there(pid)
    assert exporter.account.dropped["at_the_end"] == 9


def test_one_that_has_nothing_to_send_is_not_waited_for(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts_after(SECONDS, monkeypatch)
    monkeypatch.setattr(exporter_module, "START_SECONDS", SECONDS)
    exporter = opened()
    pid = worker_of(exporter)
    began = time.monotonic()
    exporter.close()

    assert time.monotonic() - began < SECONDS / 2
    exporter._thread.join(SECONDS)
    assert not is_there(pid)
    assert caplog.records == []


def test_it_is_let_go_where_the_script_installs_a_provider_before_the_first_step(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = opened()
    pid = worker_of(exporter)
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    run_steps(exporter, 0, 2)
    until(lambda: exporter.account.sent == 18)

    assert not is_there(pid)
    assert len(memory.get_finished_spans()) == 18
    exporter.close()
    provider.shutdown()


_RANK = """
import os, sys, time
from pathlib import Path
from commtrace.config import Config
from commtrace.exporters.otlp.exporter import open_otlp
from commtrace.live.rank import LiveRank
from tests.trace.rows import metadata
exporter = open_otlp(Config(), LiveRank(metadata(), Path()))
while exporter._worker is None:
    time.sleep(0.01)
print(exporter._worker.pid, flush=True)
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
        worker = int(rank.stdout.readline())
        modules, _, child = rank.stdout.readline().rpartition(" ")
        forked = int(child)
        rank.send_signal(signal.SIGKILL)
        rank.wait(SECONDS)
        until(lambda: not is_there(worker) or _is_zombie(worker))
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


def test_spans_after_the_end_are_counted() -> None:
    sender = ProcessSender(CONFIG, live_rank(0))
    sender.close(SECONDS)
    settled: list[tuple[int, bool | None]] = []
    sender.send([], lambda count, was_sent: settled.append((count, was_sent)))

    assert settled == []
    assert 0.0 < sender.pause_seconds <= process_module.RESTART_SECONDS
