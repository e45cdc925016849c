"""The compose file and what it mounts: they parse, name what is there, and fit each other. Nothing is started."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.grafana.dashboards import dashboards

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "monitoring"
PROVISIONING = ROOT / "exporters" / "grafana" / "provisioning"
PROMTOOL = shutil.which("promtool")

SERVICE_KEYS = {"command", "environment", "image", "network_mode", "ports", "volumes"}
"""Of the Compose specification, those that are used: a mistyped one is an error there, too."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def services() -> dict[str, dict[str, Any]]:
    described: dict[str, dict[str, Any]] = read(FOLDER / "compose.yml")["services"]
    return described


def mounts() -> Iterator[tuple[str, str, str]]:
    """Service, what is mounted, and where, of every mount."""
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            # The default of a variable holds a colon itself.
            parts = re.fullmatch(r"(\$\{[^}]*\}|[^:]+):([^:]+):ro", volume)
            assert parts, volume
            yield name, parts[1], parts[2]


def mounted(service: str, target: str) -> Path:
    (source,) = (source for name, source, at in mounts() if (name, at) == (service, target))
    return (FOLDER / source).resolve()


def test_services_have_pinned_images_and_only_known_keys() -> None:
    assert set(read(FOLDER / "compose.yml")) == {"services"}
    for name, service in services().items():
        assert set(service) <= SERVICE_KEYS, name
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]
        assert not (service.get("network_mode") == "host" and "ports" in service), f"{name}: host has all ports"


def test_everything_that_is_mounted_is_there_and_every_configuration_is_one_that_is_mounted() -> None:
    for name, source, target in mounts():
        if not source.startswith("${"):
            assert (FOLDER / source).exists(), f"{name}: {source}"
        assert target.startswith("/")
    for name, service in services().items():
        named = [word.split("=")[1] for word in service.get("command", ()) if "config" in word.split("=")[0]]
        for path in named:
            assert mounted(name, path).is_file(), f"{name}: {path}"
    used = {path.name for path in FOLDER.glob("*.yml")} - {"compose.yml"}
    assert used == {Path(source).name for _, source, _ in mounts() if source.endswith(".yml")}


def test_prometheus_reads_the_rules_and_target_files_that_are_mounted() -> None:
    configuration = read(mounted("prometheus", "/etc/prometheus/prometheus.yml"))
    (pattern,) = configuration["rule_files"]
    rules = mounted("prometheus", str(Path(pattern).parent))
    assert sorted(path.name for path in rules.glob(Path(pattern).name)) == [
        "commtrace-alerts.yml", "commtrace-recording.yml",
    ]  # fmt: skip
    (files,) = configuration["scrape_configs"][0]["file_sd_configs"][0]["files"]
    targets = next(source for _, source, target in mounts() if target == str(Path(files).parent))
    directory = targets.removesuffix("}").partition(":-")[2]
    # What the instructions tell to make and to set.
    assert f"mkdir -p {directory}" in (FOLDER / "compose.yml").read_text()
    assert f"COMMTRACE_PROMETHEUS_TARGETS={directory}" in (ROOT / "docs" / "grafana.md").read_text()


def test_grafana_finds_its_data_sources_and_dashboards() -> None:
    grafana = services()["grafana"]
    (provider,) = read(PROVISIONING / "dashboards" / "commtrace.yml")["providers"]
    found = mounted("grafana", provider["options"]["path"])
    assert {path.name for path in found.glob("*.json")} == set(dashboards())
    assert mounted("grafana", "/etc/grafana/provisioning") == PROVISIONING
    sources = {source["uid"]: source for source in read(PROVISIONING / "datasources" / "commtrace.yml")["datasources"]}
    for source in sources.values():
        assert source["url"].removeprefix("$") in grafana["environment"]
    (destination,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["datasourceUid"] in sources
    assert destination["name"] == "trace_id"


def test_addresses_lead_to_who_listens_there() -> None:
    grafana, prometheus = services()["grafana"]["environment"], services()["prometheus"]["command"]
    assert f"--web.listen-address={_address(grafana['PROMETHEUS_URL'])}" in prometheus
    tempo = read(mounted("tempo", "/etc/tempo.yml"))
    assert services()["tempo"]["ports"] == [f"{_address(grafana['TEMPO_URL'])}:{tempo['server']['http_listen_port']}"]
    collector = read(mounted("otel-collector", "/etc/otelcol/config.yml"))
    listens = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert [port.rpartition(":")[2] for port in services()["otel-collector"]["ports"]] == [listens.rpartition(":")[2]]
    host, _, port = collector["exporters"]["otlp/tempo"]["endpoint"].partition(":")
    assert host in services()
    assert tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{port}")


def test_the_collectors_pipelines_use_what_is_defined() -> None:
    collector = read(FOLDER / "otel-collector.yml")
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline.get(part, ())) <= set(collector.get(part, {}))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_itself_accepts_its_configuration() -> None:
    command = [str(PROMTOOL), "check", "config", "--syntax-only", str(FOLDER / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _address(url: str) -> str:
    return url.removeprefix("http://")
