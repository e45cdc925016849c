"""A real Prometheus for a test: it scrapes what target files name, and answers queries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests import waiting
from tests.free_ports import free_port

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")

T = TypeVar("T")

_CONFIGURATION = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}/*.yml"]
scrape_configs:
  - job_name: commtrace
    file_sd_configs: [{{files: ["{targets}/*.json"], refresh_interval: 1s}}]
"""


class Sample(NamedTuple):
    """One series of an answer and its newest value."""

    labels: Mapping[str, str]
    value: float


class Prometheus:
    """A server that runs."""

    def __init__(self, directory: Path, port: int, options: Sequence[str] = ()) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._directory = directory
        self._options = [
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with what it had stored if it ran before."""
        assert PROGRAM is not None
        with (self._directory / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, *self._options], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(self.is_ready, 60, lambda: (self._directory / "prometheus.log").read_text())

    def stop(self) -> None:
        """End it in order; in no order if that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it in the middle of what it does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process has used, user and system."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def query(self, expr: str) -> list[Sample]:
        """What an expression gives now."""
        result = self._get("/api/v1/query", query=expr)["result"]
        return [Sample(series["metric"], float(series["value"][1])) for series in result]

    def query_at(self, expr: str, seconds: float) -> list[Sample]:
        """What an expression gave then."""
        result = self._get("/api/v1/query", query=expr, time=str(seconds))["result"]
        return [Sample(series["metric"], float(series["value"][1])) for series in result]

    def query_range(self, expr: str, start: float, end: float, step: int) -> list[Sample]:
        """What an expression gave over a time: of each series the newest value."""
        found = self._get("/api/v1/query_range", query=expr, start=str(start), end=str(end), step=str(step))["result"]
        return [Sample(series["metric"], float(series["values"][-1][1])) for series in found]

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        path = f"/api/v1/label/{label}/values"
        return list(self._get(path, **{"match[]": selector, "start": str(start), "end": str(end)}))

    def firing(self) -> list[Mapping[str, str]]:
        """The labels of the alerts that fire."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    def alerts(self, name: str) -> list[Mapping[str, Any]]:
        """The alerts of this name that fire."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return [one for one in alerts if one["labels"]["alertname"] == name and one["state"] == "firing"]

    def rules(self) -> list[Mapping[str, Any]]:
        """All rules with their health."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def seconds_of_rule_groups(self) -> dict[str, float]:
        """How long the last evaluation of each group took."""
        return {group["name"]: group["evaluationTime"] for group in self._get("/api/v1/rules")["groups"]}

    def exemplars(self, expr: str) -> list[Mapping[str, Any]]:
        """The exemplars of the last minute."""
        now = time.time()
        found = self._get("/api/v1/query_exemplars", query=expr, start=str(now - 60), end=str(now))
        return [exemplar for series in found for exemplar in series["exemplars"]]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=120) as answer:
            return json.load(answer)["data"]


@contextmanager
def running(directory: Path, targets: Path, rules: Path) -> Iterator[Prometheus]:
    """Start a server that scrapes once a second, and end it."""
    (directory / "prometheus.yml").write_text(_CONFIGURATION.format(rules=rules, targets=targets))
    server = Prometheus(directory, free_port())
    try:
        server.start()
        yield server
    finally:
        server.stop()


def until(is_so: Callable[[], T], seconds: float, told: Callable[[], object] = str) -> T:
    """Wait as :func:`tests.waiting.until` does, and ask a server three times a second."""
    return waiting.until(is_so, seconds, told, every=0.3)
