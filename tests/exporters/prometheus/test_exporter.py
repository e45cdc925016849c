"""The endpoint, the target file and the textfile of a rank, with real sockets and files."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, write_to_textfile

from commtrace.config import Config, PrometheusConfig
from commtrace.errors import ConfigurationError
from commtrace.exporters.live import live_view
from commtrace.exporters.prometheus import exporter as exporter_module
from commtrace.exporters.prometheus.exporter import (
    EndpointExporter,
    TargetFile,
    TextfileExporter,
    open_prometheus,
    reachable,
)
from commtrace.recording.recorder import Recorder
from tests.exporters.prometheus.steps import rank, summary
from tests.free_ports import free_port
from tests.trace.rows import mark, metadata
from tests.waiting import until


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[EndpointExporter]:
    opened = EndpointExporter(Config(), rank(tmp_path))
    yield opened
    opened.close()


def scrape(exporter: EndpointExporter, context: ssl.SSLContext | None = None, **headers: str) -> str:
    endpoint = exporter.endpoint
    request = urllib.request.Request(f"{endpoint.scheme}://localhost:{endpoint.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        text: str = answer.read().decode()
    return text


def test_a_rank_listens_on_loopback_and_tells_its_steps(exporter: EndpointExporter) -> None:
    exporter.step(summary(), [])

    assert exporter.endpoint.address == "127.0.0.1"
    assert "commtrace_step_duration_seconds_count 1.0" in scrape(exporter)
    assert "# EOF" in scrape(exporter, Accept="application/openmetrics-text; version=1.0.0")


def test_the_target_file_says_where_and_who(exporter: EndpointExporter, tmp_path: Path) -> None:
    path = tmp_path / "prometheus" / "rank-00003.json"
    assert not path.exists()
    exporter.step(summary(), [])

    assert json.loads(path.read_text()) == [
        {
            "targets": [f"127.0.0.1:{exporter.endpoint.port}"],
            "labels": {
                "run_id": "r1", "rank": "3", "node": "alpha", "local_rank": "3", "tp": "1", "pp": "0", "dp": "1",
            },
        }
    ]  # fmt: skip
    exporter.close()
    assert list(path.parent.iterdir()) == []


def test_a_place_that_becomes_known_later_is_reported(tmp_path: Path) -> None:
    live = rank(tmp_path)
    exporter = EndpointExporter(Config(prometheus=PrometheusConfig(targets=tmp_path / "all")), live)
    exporter.step(summary(), [])
    live.learn(mark("topology", {"coordinates": {"pp": 4}}))
    exporter.step(summary(1), [])

    labels = json.loads((tmp_path / "all" / "r1-rank-00003.json").read_text())[0]["labels"]
    exporter.close()

    assert labels["pp"] == "4"


def test_rank_0_removes_targets_of_ranks_that_are_no_more(tmp_path: Path) -> None:
    for name in ("rank-00007.json", "rank-00008.json", "rank-00031.json", "other.json"):
        (tmp_path / name).write_text("[]")
        (tmp_path / f"r1-{name}").write_text("[]")
    TargetFile(str(tmp_path), rank(number=3))
    assert len(list(tmp_path.iterdir())) == 8
    TargetFile(str(tmp_path), rank(number=0))

    left = [
        "other.json",
        "r1-other.json",
        "r1-rank-00007.json",
        "rank-00007.json",
        "rank-00008.json",
        "rank-00031.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", "127.0.0.1:9400"),
        ("0.0.0.0", f"{socket.gethostname()}:9400"),
        ("::", f"{socket.gethostname()}:9400"),
        ("::1", "[::1]:9400"),
        ("node-3", "node-3:9400"),
    ],
)
def test_the_target_is_an_address_that_others_can_reach(address: str, expected: str) -> None:
    assert reachable(address, 9400) == expected


def test_the_ranks_of_a_node_take_consecutive_ports(tmp_path: Path) -> None:
    first = free_port()
    exporter = EndpointExporter(Config(prometheus=PrometheusConfig(port=first)), rank(tmp_path, number=1, local_rank=1))

    assert exporter.endpoint.port == first + 1
    exporter.close()


def test_a_port_in_use_is_reported_once_and_everything_else_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        view = live_view(Config(export="prometheus", prometheus=PrometheusConfig(port=port)))
        (collector,) = view(metadata(), tmp_path, Recorder(list), lambda: None, str)
        collector.close()

    assert len(caplog.records) == 1
    assert f"cannot listen on 127.0.0.1:{port} for Prometheus" in caplog.text
    assert "Leave COMMTRACE_PROMETHEUS_PORT away for a free port" in caplog.text


def test_only_those_who_know_the_password_are_told_anything(tmp_path: Path) -> None:
    (tmp_path / "auth").write_text("scraper:sécret\n")
    exporter = EndpointExporter(Config(prometheus=PrometheusConfig(auth_file=tmp_path / "auth")), rank(tmp_path))
    exporter.step(summary(), [])
    right, wrong = (base64.b64encode(f"scraper:{word}".encode()).decode() for word in ("sécret", "guess"))

    assert "commtrace_last_step" in scrape(exporter, Authorization=f"Basic {right}")
    refused: tuple[dict[str, Any], ...] = ({}, {"Authorization": f"Basic {wrong}"})
    for headers in refused:
        with pytest.raises(urllib.error.HTTPError, match="401") as refusal:
            scrape(exporter, **headers)
        assert b"commtrace_" not in refusal.value.read()
        refusal.value.close()
    exporter.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2", "-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", "key.pem", "-out", "cert.pem", *subject]
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: no certificate to test with")
    return directory


def test_tls_is_spoken_and_said_in_the_target_file(tmp_path: Path, certificate: Path) -> None:
    files = PrometheusConfig(certfile=certificate / "cert.pem", keyfile=certificate / "key.pem")
    exporter = EndpointExporter(Config(prometheus=files), rank(tmp_path))
    exporter.step(summary(), [])

    scraped = scrape(exporter, ssl.create_default_context(cafile=str(certificate / "cert.pem")))
    labels = json.loads((tmp_path / "prometheus" / "rank-00003.json").read_text())[0]["labels"]
    exporter.close()

    assert "commtrace_last_step" in scraped
    assert labels["__scheme__"] == "https"


def test_clients_without_a_certificate_are_not_let_in(tmp_path: Path, certificate: Path) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    config = Config(prometheus=PrometheusConfig(certfile=cert, keyfile=key, client_cafile=cert))
    exporter = EndpointExporter(config, rank(tmp_path))
    stranger, known = (ssl.create_default_context(cafile=cert) for _ in range(2))
    known.load_cert_chain(cert, key)

    assert "commtrace_spans_total" in scrape(exporter, known)
    with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|EOF"):
        scrape(exporter, stranger)
    assert "commtrace_spans_total" in scrape(exporter, known)
    exporter.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_silent_connection_holds_up_neither_prometheus_nor_the_end(
    tls: bool, tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    files = PrometheusConfig(certfile=cert, keyfile=key) if tls else PrometheusConfig()
    monkeypatch.setattr(exporter_module, "_CLIENT_SECONDS", 2.0)
    exporter = EndpointExporter(Config(prometheus=files), rank(tmp_path))
    with socket.create_connection(("localhost", exporter.endpoint.port), timeout=60) as silent:
        scraped = scrape(exporter, ssl.create_default_context(cafile=cert) if tls else None)
        closing = threading.Thread(target=exporter.close, daemon=True)
        closing.start()
        closing.join(60)
        assert silent.recv(1) == b"", "its connection is closed after a while"

    assert "commtrace_spans_total" in scraped
    assert not closing.is_alive()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"certfile": "c.pem"}, "TLS needs both"),
        ({"client_cafile": "ca.pem"}, "needs TLS"),
        ({"auth_file": "/no/such/file"}, "cannot be read"),
        ({"certfile": "/no/c.pem", "keyfile": "/no/k.pem"}, "cannot be used for TLS"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_prometheus(Config(prometheus=PrometheusConfig(**options)), rank(tmp_path))


def test_the_textfile_holds_samples_with_identity_and_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "SECONDS_BETWEEN", 0.01)
    exporter = open_prometheus(Config(prometheus=PrometheusConfig(textfile=tmp_path)), rank(tmp_path))
    assert isinstance(exporter, TextfileExporter)
    path = tmp_path / "commtrace-r1-rank-00003.prom"
    for step in (0, 1):
        exporter.step(summary(step), [])
        wanted = (
            f'commtrace_last_step{{dp="1",local_rank="3",node="alpha",pp="0",rank="3",run_id="r1",tp="1"}} {step}.0'
        )
        until(partial(_holds, path, wanted))
    exporter.close()

    assert list(tmp_path.iterdir()) == []


def _holds(path: Path, line: str) -> bool:
    return path.exists() and line in path.read_text()


def test_a_textfile_that_cannot_be_written_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "SECONDS_BETWEEN", 0.01)
    attempts = SimpleQueue[str]()

    def write(path: str, registry: CollectorRegistry) -> None:
        attempts.put(path)
        write_to_textfile(path, registry)

    monkeypatch.setattr(exporter_module, "write_to_textfile", write)
    exporter = TextfileExporter(Config(prometheus=PrometheusConfig(textfile=tmp_path / "missing")), rank(tmp_path))
    for step in range(5):
        exporter.step(summary(step), [])
        attempts.get(timeout=60)
    exporter.close()

    assert [record.getMessage().split("(")[0] for record in caplog.records] == [
        f"commtrace: cannot write {tmp_path}/missing/commtrace-r1-rank-00003.prom "
    ]
