"""What ranks are told in return: how slow they are; and what a monitor outside of the job has found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commtrace.config import Config, MonitorConfig, OtlpConfig
from commtrace.errors import CommtraceError
from commtrace.exporters.monitor.exchange import MonitorClient, MonitorError
from commtrace.exporters.monitor.exporter import MonitorExporter
from commtrace.exporters.monitor.messages import MonitorFindings, PeerBaseline, Reply, Report, Request, WatchedJob
from commtrace.exporters.monitor.rendezvous import Address
from commtrace.findings.finding import SLOW
from commtrace.findings.status import FOUND, JobMeans, JobView, LiveEvent
from commtrace.live.monitoring.job_steps import JobStep, RankStep
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from tests.e2e.launch import REPOSITORY
from tests.exporters.monitor.conftest import TOKEN
from tests.factory import metadata
from tests.live.findings import SECOND, silent_finding, slow_finding

MS = 1_000_000
FOREVER = 3_600.0
SECONDS = 60.0


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[MonitorExporter]:
    config = Config(
        export="monitor,prometheus", monitor=MonitorConfig(store="127.0.0.1:1", token=TOKEN, seconds=FOREVER)
    )
    one = MonitorExporter(config, LiveRank(metadata(0), tmp_path))
    yield one
    one.close()


def report(window: int, work_ms: int, steps: int = 40) -> WindowReport:
    return WindowReport(0, "node0", 3, window, steps, work_ns=(work_ms * MS, 0, 0, 0, 0, 5 * MS) if steps else (0,) * 6)


def reply(window: int, work_ms: float) -> Reply:
    return Reply(baseline=PeerBaseline(0, window, work_ms * MS))


@pytest.mark.parametrize(
    ("otlp", "export", "tells", "asks"),
    [
        (OtlpConfig(), "monitor,otlp", True, False),
        (OtlpConfig(ranks="3,1"), "monitor,otlp", True, True),
        (OtlpConfig(level="none", metrics=True), "monitor,otlp", False, False),
        (OtlpConfig(), "monitor,prometheus", False, False),
    ],
)
def test_times_of_steps_are_told_for_spans_and_asked_for_by_the_rank_that_sends_those_of_the_job(
    otlp: OtlpConfig, export: str, tells: bool, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(export=export, otlp=otlp, monitor=MonitorConfig(store="127.0.0.1:1", token=TOKEN, seconds=FOREVER))
    one = MonitorExporter(config, LiveRank(metadata(1, world_size=4), tmp_path))
    requests: list[Request] = []
    of_all = JobStep(5, 0, 90, 210, 4)

    def exchange(request: Request) -> Reply:
        requests.append(request)
        return Reply(job_steps=(of_all,))

    monkeypatch.setattr(one, "_exchange", exchange)
    one.step(StepSummary("run", 1, 5, 100, 100, {}, {}), ())
    one._report(7)
    one.close()

    (received,) = requests
    assert isinstance(received, Report)
    epoch = one._rank.epoch_ns
    assert received.window.step_times == ((RankStep(5, 0, epoch(100), epoch(200)),) if tells else ())
    assert (received.asks_job_steps, one._rank.job_steps) == (asks, {(5, 0): of_all} if asks else {})


def test_it_is_the_work_of_the_window_that_was_joined_last(exporter: MonitorExporter) -> None:
    def score() -> float | None:
        return exporter._rank.score

    exporter._learn(report(6, 55), Reply())
    assert score() is None
    exporter._learn(report(7, 95), reply(6, 50.0))
    assert score() == 1.2
    exporter._learn(report(8, 0, steps=0), reply(6, 50.0))
    assert score() == 1.2, "nothing has been joined since"
    exporter._learn(report(9, 0, steps=0), reply(7, 50.0))
    assert score() == 2.0


def test_it_is_not_known_without_others_or_without_a_monitor(exporter: MonitorExporter) -> None:
    def score() -> float | None:
        return exporter._rank.score

    exporter._learn(report(6, 55), reply(6, 50.0))
    assert score() == 1.2
    exporter._failed(CommtraceError("gone"))
    assert score() is None
    exporter._learn(report(7, 55), reply(7, 50.0))
    exporter._learn(report(8, 55), reply(8, 0.0))
    assert score() is None


def test_rank_0_shows_what_a_monitor_outside_of_the_job_finds(exporter: MonitorExporter, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "commtrace", "monitor", "--serve", "127.0.0.1:0", "-o", str(tmp_path)]
    live = exporter._rank
    environment = {**os.environ, "COMMTRACE_MONITOR_TOKEN": TOKEN}
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env=environment) as monitor:
        try:
            assert monitor.stderr is not None
            assert monitor.stderr.readline() == "Waiting for a job. In its environment, on every node:\n"
            export, _, address = monitor.stderr.readline().strip().rpartition("=")
            assert export == "export COMMTRACE_EXPORT=monitor COMMTRACE_MONITOR_STORE"
            client = MonitorClient(Address.parse(address), TOKEN)
            deadline, window = time.monotonic() + SECONDS, 0
            while not any(finding.kind == SLOW for finding in live.findings):
                assert time.monotonic() < deadline
                window += 1
                for rank in range(4):
                    received = client.exchange(
                        Report(WatchedJob("run", 0, 4, 0.5), slow_rank_2(rank, window), (), rank == 0)
                    )
                    if rank == 0:
                        exporter._learn_findings(received)
                time.sleep(0.2)
        finally:
            monitor.kill()
    assert live.joins
    assert [(one.rank, one.cause) for one in live.findings if one.kind == SLOW] == [(2, "compute")]
    # Ranks whose reports this process was too slow to send are silent meanwhile.
    assert [one.finding.rank for one in live.events if one.finding.kind == SLOW] == [2]
    exporter._failed(CommtraceError("gone"))
    assert live.findings == ()


def slow_rank_2(rank: int, window: int) -> WindowReport:
    work = 80 if rank == 2 else 60
    waiting = {"dp": (100 - work) * MS}
    return WindowReport(
        rank, "node0", 0, window, 40, duration_ns=100 * MS, work_ns=(work * MS, 0, 0, 0, 0, 0), exposed_ns=waiting
    )


@pytest.mark.parametrize("asks_job", [False, True])
def test_a_rank_that_shows_the_job_asks_for_it_and_exports_no_second_series(
    asks_job: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(export="monitor,wandb", monitor=MonitorConfig(store="127.0.0.1:1", token=TOKEN, seconds=FOREVER))
    one = MonitorExporter(config, LiveRank(metadata(1, world_size=4), tmp_path))
    one._rank.asks_job = asks_job
    means = JobMeans(40, 4, 2 * MS, {"compute": MS}, {"dp": MS})
    silent = LiveEvent(FOUND, 5 * SECOND, silent_finding(2), "Rank 2 is silent.")
    requests: list[Request] = []

    def exchange(request: Request) -> Reply:
        requests.append(request)
        return Reply(findings=MonitorFindings((slow_finding(2),), (silent,), means))

    monkeypatch.setattr(one, "_exchange", exchange)
    one._report(7)
    (received,) = requests
    assert isinstance(received, Report)
    assert received.asks_findings is asks_job
    assert one._rank.job == (JobView((slow_finding(2),), (silent,), means) if asks_job else None)
    assert (one._rank.joins, one._rank.findings, list(one._rank.events)) == (False, (), [])

    one._failed(MonitorError("it is gone"))
    assert one._rank.job is None
    one.close()
