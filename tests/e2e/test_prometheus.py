"""A real Prometheus scrapes a real job of four ranks: all panels and rules have data, and the slow rank is named.

On a busy machine a scrape may come too late, and a rank may really be slow for a moment: what comes true is waited for.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.live.summary import trace_id
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e import prometheus
from tests.e2e.launch import Completed, fork
from tests.json_reading import read_back
from tools.grafana.dashboards import dashboards
from tools.grafana.overview import ALERTS, FINDINGS, LAUNCH_BOUND
from tools.prometheus_rules import Timing, alerts, recording_rules, write

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(700),  # it waits for as long as a busy machine needs
    pytest.mark.skipif(prometheus.PROGRAM is None, reason="prometheus is not installed: apt-get install prometheus"),
]

WINDOW = "8s"
TIMING = Timing(window=WINDOW, short_window=WINDOW, baseline="4s", stalled=20, gone=WINDOW)
SLOW_RANK = "1"
EMPTY_WHILE_NOBODY_IS_SLOW = {
    f"commtrace / {title}"
    for title in (f"Overview: {ALERTS}", f"Fleet: {ALERTS}", f"Overview: {FINDINGS}", "Overview: Slow since")
}
EMPTY_WITHOUT_GPUS = {
    "commtrace / Node: Tensor cores active",
    "commtrace / Node: Occupancy",
    f"commtrace / Overview: {LAUNCH_BOUND}",
    f"commtrace / Rank: {LAUNCH_BOUND}",
}
EMPTY_UNLESS_A_RANK_HANGS = {"commtrace / Health of commtrace: Ranks that wait"}
SPLIT = "commtrace_exposed_split_seconds_total"
SECONDS = 120
"""Most that is waited for one thing."""


class Job:
    """The training job and the Prometheus that watches it."""

    def __init__(self, directory: Path, server: prometheus.Prometheus) -> None:
        self.directory = directory
        self.server = server
        self.slow_file = directory / "slow"
        self.stop_file = directory / "stop"
        self.targets = directory / "targets"

    def has_data(self, expr: str) -> bool:
        return bool(self.server.query(expr))

    def stragglers(self) -> list[str]:
        return [labels["rank"] for labels in self.server.firing() if labels["alertname"] == "CommtraceStraggler"]

    def of_all_ranks(self, expr: str) -> list[prometheus.Sample]:
        """Wait for a sample of each rank: one whose last scrape failed has none."""

        def found() -> list[prometheus.Sample]:
            samples = self.server.query(expr)
            return samples if len(samples) == 4 else []

        return prometheus.until(found, SECONDS, lambda: self.server.query(expr))


def panels() -> Iterator[tuple[str, str]]:
    """Where each panel's expression is, and the expression with Grafana's variables filled in; an hour is 4 s."""
    values = {
        "$__rate_interval": WINDOW, "$__range": "20s", "$run_id": "watched", "$rank": ".*", "$node": ".*",
        "offset 1h": f"offset {TIMING.baseline}",
    }  # fmt: skip
    for dashboard in read_back(dashboards()).values():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"]
                for variable, value in values.items():
                    expr = expr.replace(variable, value)
                yield f"{dashboard['title']}: {panel['title']}", expr


def test_panels_rules_and_alerts_see_a_real_run(tmp_path: Path) -> None:
    targets, rules = tmp_path / "targets", tmp_path / "rules"
    for directory in (targets, rules):
        directory.mkdir()
    write(rules, TIMING, interval="1s")
    replicas = Measurement("all_reduce", (0, 1), ("here",), 400_000, "float32", 20, MeasuredSpread(1e6, 1e6, 1e6))
    NetworkBaseline({"backend": "gloo"}, (replicas,)).save(tmp_path / "baseline.json")
    environment = {
        "COMMTRACE_BASELINE_FILE": str(tmp_path / "baseline.json"),
        "COMMTRACE_DIR": str(tmp_path / "run"),
        "COMMTRACE_RUN_ID": "watched",
        "COMMTRACE_EXPORT": "prometheus,monitor",
        "COMMTRACE_MONITOR_SECONDS": "1",
        "COMMTRACE_PROMETHEUS_TARGETS": str(targets),
    }
    program: list[str | Path] = ["tests/e2e/programs/monitored_training.py", tmp_path]
    with (
        ThreadPoolExecutor(1) as pool,
        prometheus.running(tmp_path, targets, rules) as server,
        _critical_path(tmp_path),
    ):
        training = pool.submit(fork, program, 4, environment, 550)
        job = Job(tmp_path, server)
        try:
            _nobody_is_slow(job)
            _everything_has_data(job)
            _the_parts_are_the_step(job)
            _exemplars_lead_to_traces(job)
            _the_slow_rank_is_named(job)
            _the_others_wait_and_it_does_not(job)
            _the_share_of_the_baseline_is_that_of_the_rank_that_waits_least(job)
            _alerts_survive_a_restart_of_prometheus(job)
            _training_goes_on_without_prometheus(job)
        finally:
            job.stop_file.touch()
            completed: Completed = training.result()
    assert completed.returncode == 0, completed.stdout
    assert list(targets.iterdir()) == []
    for trace in load_run(tmp_path / "run").ranks.values():
        steps = trace.spans.step[trace.spans.kind == schema.STEP].tolist()
        assert (trace.closed, trace.dropped, steps) == (True, {}, list(range(len(steps))))


@contextmanager
def _critical_path(directory: Path) -> Iterator[None]:
    """Served meanwhile by ``commtrace metrics``, which reads the files of the ranks."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "commtrace",
        "metrics",
        directory / "run",
        "--serve",
        "127.0.0.1:0",
        "--every",
        "1",
    ]
    environment = {**os.environ, "COMMTRACE_PROMETHEUS_TARGETS": str(directory / "targets")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()


def _nobody_is_slow(job: Job) -> None:
    """Longer than the alert would need, and counted from when there is a score for every rank."""
    job.of_all_ranks("commtrace:straggler_score:ratio")
    prometheus.until(lambda: job.has_data("min_over_time(commtrace:straggler_score:ratio[8s] offset 8s)"), SECONDS)
    prometheus.until(lambda: not job.stragglers(), SECONDS, lambda: job.server.query("commtrace:straggler_score:ratio"))
    ranks = {sample.labels["rank"]: sample.labels for sample in job.of_all_ranks("commtrace_last_step")}
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert {name: ranks["3"][name] for name in ("run_id", "pp", "dp", "tp", "local_rank")} == {
        "run_id": "watched", "pp": "1", "dp": "1", "tp": "0", "local_rank": "3",
    }  # fmt: skip


def _everything_has_data(job: Job) -> None:
    job.of_all_ranks(f"sum by (rank) (rate({SPLIT}[{WINDOW}])) > 0")
    empty = {*EMPTY_WHILE_NOBODY_IS_SLOW, *EMPTY_UNLESS_A_RANK_HANGS, *EMPTY_WITHOUT_GPUS}
    expressions = {
        **{title: expr for title, expr in panels() if title not in empty},
        **{rule.record: rule.record for rule in recording_rules(TIMING)},
        **{f"{alert.name}: {one}": one for alert in alerts(TIMING) for one in alert.operands},
    }

    def without_data() -> list[str]:
        return [name for name, expr in expressions.items() if not job.has_data(expr)]

    prometheus.until(lambda: not without_data(), SECONDS, without_data)
    assert [rule["name"] for rule in job.server.rules() if rule["health"] != "ok"] == []


def _the_parts_are_the_step(job: Job) -> None:
    parts = [
        "sum without (phase) (commtrace_compute_seconds_total)",
        "sum without (operation, role) (commtrace_exposed_seconds_total)",
        *(f"commtrace_{part}_seconds_total" for part in ("bubble", "data", "checkpoint", "gc", "between", "other")),
    ]
    rest = job.of_all_ranks(f"{' + '.join(parts)} - commtrace_step_duration_seconds_sum")
    assert [sample.value for sample in rest] == pytest.approx([0.0] * 4, abs=1e-6)


def _exemplars_lead_to_traces(job: Job) -> None:
    found = prometheus.until(lambda: job.server.exemplars("commtrace_step_duration_seconds_bucket"), SECONDS)
    steps = {f"{trace_id('watched', step):032x}" for step in range(2_000)}

    assert {exemplar["labels"]["trace_id"] for exemplar in found} <= steps


def _the_slow_rank_is_named(job: Job) -> None:
    job.slow_file.touch()

    def its_alerts() -> list[Mapping[str, Any]]:
        found = job.server.alerts("CommtraceStraggler")
        return found if [one["labels"]["rank"] for one in found] == [SLOW_RANK] else []

    (alert,) = prometheus.until(its_alerts, SECONDS, lambda: job.server.query("commtrace:straggler_score:ratio"))
    assert f"commtrace straggler {job.directory / 'run'}. On " in alert["annotations"]["description"], alert

    def without_data() -> list[str]:
        empty = EMPTY_UNLESS_A_RANK_HANGS | EMPTY_WITHOUT_GPUS
        return [title for title, expr in panels() if title not in empty and not job.has_data(expr)]

    def named() -> list[str]:
        found = job.server.query('commtrace_finding_cost_seconds{kind="slow"}')
        return [sample.labels["finding_rank"] for sample in found]

    prometheus.until(lambda: not without_data(), SECONDS, without_data)
    prometheus.until(lambda: named() == [SLOW_RANK], SECONDS, named)
    _every_rank_tells_how_slow_it_is(job)
    _the_slow_rank_is_on_the_critical_path(job)


def _the_slow_rank_is_on_the_critical_path(job: Job) -> None:
    """Forward of the slow rank, 0.15 s of a step of 0.3 s; its replica, which works as long as ever, is not on it."""

    def shares() -> dict[tuple[str, str], float]:
        rate = f"sum by (rank, kind) (rate(commtrace_critical_path_seconds_total[{WINDOW}]))"
        told = job.server.query(f"{rate} / ignoring (rank, kind) group_left () sum({rate})")
        return {(one.labels["rank"], one.labels["kind"]): one.value for one in told}

    prometheus.until(lambda: shares().get((SLOW_RANK, "forward"), 0) > 0.35, SECONDS, shares)
    prometheus.until(lambda: shares().get(("0", "forward"), 0) < 0.1, SECONDS, shares)


def _every_rank_tells_how_slow_it_is(job: Job) -> None:
    """It works 0.205 s per step, its replica 0.105 s; the two ranks of the other stage the same as each other."""

    def scores() -> dict[str, float]:
        return {one.labels["rank"]: one.value for one in job.server.query("commtrace_straggler_score_ratio")}

    def is_as_expected() -> bool:
        told = scores()
        return len(told) == 4 and told.pop(SLOW_RANK) > 1.5 and max(told.values()) < 1.3

    prometheus.until(is_as_expected, SECONDS, scores)


def _the_others_wait_and_it_does_not(job: Job) -> None:
    """The replica of the slow rank waits for it in their all_reduce; what is known never exceeds what was exposed."""

    def rate(part: str) -> dict[str, float]:
        told = job.server.query(f'sum by (rank) (rate({SPLIT}{{role="dp", part="{part}"}}[{WINDOW}]))')
        return defaultdict(lambda: math.nan, {sample.labels["rank"]: sample.value for sample in told})

    prometheus.until(
        lambda: rate("wait")["0"] > 10 * rate("transfer")["0"], SECONDS, lambda: (rate("wait"), rate("transfer"))
    )
    prometheus.until(lambda: rate("wait")[SLOW_RANK] < 0.2 * rate("wait")["0"], SECONDS, lambda: rate("wait"))
    exposed = "sum without (part) (commtrace_exposed_split_seconds_total) - commtrace_exposed_seconds_total > 1e-6"
    assert job.server.query(exposed) == []


def _the_share_of_the_baseline_is_that_of_the_rank_that_waits_least(job: Job) -> None:
    """Of what was measured there, and of nothing else; the replica of the slow rank waits for it 0.1 s."""

    def shares() -> dict[str, float]:
        told = job.server.query("commtrace_communication_baseline_ratio")
        assert {(one.labels["operation"], one.labels["role"]) for one in told} <= {("all_reduce", "dp")}
        return {one.labels["rank"]: one.value for one in told}

    prometheus.until(lambda: len(shares()) == 4 and 0 < 2 * shares()["0"] < shares()[SLOW_RANK], SECONDS, shares)
    (most,) = job.server.query("commtrace:communication_baseline:max")
    assert most.labels["operation"] == "all_reduce"


def _alerts_survive_a_restart_of_prometheus(job: Job) -> None:
    """While it was not there nothing was forgotten, as no alert counts for how long something has been true."""

    def scores() -> object:
        return job.server.query("commtrace:straggler_score:ratio")

    prometheus.until(lambda: job.stragglers() == [SLOW_RANK], SECONDS, scores)
    job.server.stop()
    job.server.start()
    prometheus.until(lambda: job.stragglers() == [SLOW_RANK], SECONDS, scores)
    job.slow_file.unlink()
    prometheus.until(lambda: not job.stragglers(), SECONDS, scores)


def _training_goes_on_without_prometheus(job: Job) -> None:
    """It is killed while it scrapes once a second; ranks answer the next one that asks as before."""
    before = [last_step(job, rank) for rank in range(4)]
    job.server.kill()
    prometheus.until(lambda: all(last_step(job, rank) > before[rank] + 20 for rank in range(4)), SECONDS)


def last_step(job: Job, rank: int) -> int:
    """As the rank's own endpoint says."""
    (target,) = job.targets.glob(f"*rank-{rank:05d}.json")
    with urllib.request.urlopen(
        f"http://{json.loads(target.read_text())[0]['targets'][0]}/metrics", timeout=20
    ) as told:
        (line,) = [one for one in told.read().decode().splitlines() if one.startswith("commtrace_last_step ")]
    return int(float(line.split()[1]))
