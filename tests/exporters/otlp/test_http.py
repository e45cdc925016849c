"""Receivers that do not answer as they should: nothing is raised, nothing fills the memory, no secret is logged."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.metrics.export import MetricsData

from commtrace.config import Config, OtlpConfig
from commtrace.errors import ConfigurationError
from commtrace.exporters.otlp.exporter import OtlpExporter
from commtrace.exporters.otlp.http import HttpMetrics, HttpSpans
from tests.exporters.otlp.made import SECONDS, is_settled, job_spans, run_steps
from tests.exporters.otlp.receiver import receiving
from tests.free_ports import free_port
from tests.waiting import until

SECRET = "s3cret"
SECONDS_OF_A_REQUEST = 1.0
MIB = 1 << 20


class Answering:
    """Reads requests and answers each with the same bytes, the last of them again and again if it is told to.

    Attributes:
        sent: how many bytes were taken by whoever asked, or by the buffers between.
        connections: how many there were.
    """

    def __init__(self, answer: bytes, *, again: bytes = b"", pause_seconds: float = 0.0) -> None:
        self._pause_seconds = pause_seconds
        self.sent = self.connections = 0
        self._answer, self._again = answer, again
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        with socket.create_connection(("127.0.0.1", self.port), SECONDS):
            self._thread.join(SECONDS)
        self._socket.close()

    def _serve(self) -> None:
        while not self._ends.is_set():
            connection, _ = self._socket.accept()
            self.connections += 1
            with connection:
                connection.settimeout(SECONDS_OF_A_REQUEST)
                try:
                    while self._read(connection):
                        self._send(connection)
                except OSError:  # the other side has gone, or has sent nothing for long
                    continue

    def _read(self, connection: socket.socket) -> bool:
        head, body = b"", b""
        while b"\r\n\r\n" not in head:
            part = connection.recv(65_536)
            if not part:
                return False
            head, _, body = (head + part).partition(b"\r\n\r\n")
            head += b"\r\n\r\n" if b"\r\n\r\n" in head + part else b""
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        while len(body) < length:
            body += connection.recv(65_536)
        return True

    def _send(self, connection: socket.socket) -> None:
        connection.sendall(self._answer)
        while self._again and not self._ends.is_set():
            connection.sendall(self._again)
            self._ends.wait(self._pause_seconds)
            self.sent += len(self._again)


@contextmanager
def answering(answer: bytes, *, again: bytes = b"", pause_seconds: float = 0.0) -> Iterator[Answering]:
    server = Answering(answer, again=again, pause_seconds=pause_seconds)
    try:
        yield server
    finally:
        server.close()


ENDLESS = {
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n", b"x" * 65_536),
    "chunks": (b"HTTP/1.1 500 no\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65_536 + b"\r\n"),
    "zipped": (b"HTTP/1.1 500 no\r\nContent-Encoding: gzip\r\nContent-Length: 999999999999\r\n\r\n", b"x" * 65_536),
    "elsewhere": (b"HTTP/1.1 308 on\r\nLocation: /x\r\nContent-Length: 999999999999\r\n\r\n", b"x" * 65_536),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"x" * 60_000 + b"\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_no_more_is_read_of_an_answer_than_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, again = ENDLESS[name]
    with answering(answer, again=again) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(SECONDS_OF_A_REQUEST))
        sink = HttpSpans()
        assert sink.export(job_spans()[0]) == (name == "body"), "only this one is a success"
        sink.shutdown()
        assert server.connections == 1, "nobody asks again"

    assert server.sent < 32 * MIB, "buffers of the two sockets, and headers of at most 6 MiB"


@pytest.mark.parametrize("signal", ["spans", "metrics"])
def test_spans_that_were_sent_and_not_answered_have_an_unknown_outcome(
    signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(SECONDS_OF_A_REQUEST))
    outcomes = []
    with answering(b"") as silent, answering(b"HTTP/1.1 400 no\r\nContent-Length: 0\r\n\r\n") as unwilling:
        for port in (silent.port, unwilling.port, free_port()):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
            if signal == "spans":
                spans = HttpSpans()
                outcomes.append(spans.export(job_spans()[0]))
                spans.shutdown()
            else:
                metrics = HttpMetrics()
                outcomes.append(metrics.export(MetricsData([])))
                metrics.shutdown()

    assert outcomes == [None, False, False]


def test_after_a_short_answer_the_connection_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine") as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.port}")
        sink = HttpSpans()
        assert [sink.export(job_spans(step)[0]) for step in range(3)] == [True] * 3
        sink.shutdown()

        assert server.connections == 1


DRIPPING = {
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"x", True),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", True),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n", None),
    "a header": (b"HTTP/1.1 200 OK\r\nX-A: ", b"b", None),
    "the status": (b"HTTP/1.1 ", b"2", None),
    "a refusal": (b"HTTP/1.1 400 no\r\nContent-Length: 60000\r\n\r\n", b"x", False),
}


@pytest.mark.parametrize("name", DRIPPING)
def test_an_answer_that_comes_byte_by_byte_holds_nothing_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time for the socket; the exchange as a whole has a limit."""
    answer, again, outcome = DRIPPING[name]
    with answering(answer, again=again, pause_seconds=0.1) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(SECONDS_OF_A_REQUEST))
        sink = HttpSpans()
        begin = time.monotonic()
        assert sink.export(job_spans()[0]) is outcome
        took = time.monotonic() - begin
        sink.shutdown()

    assert took < 3 * SECONDS_OF_A_REQUEST


REFUSALS = {
    "an error": b"HTTP/1.1 500 s3cret\r\nContent-Length: 6\r\n\r\ns3cret",
    "wants credentials": b"HTTP/1.1 401 no\r\nWWW-Authenticate: Basic realm=s3cret\r\nContent-Length: 0\r\n\r\n",
    "is elsewhere": b"HTTP/1.1 308 on\r\nLocation: /s3cret\r\nContent-Length: 0\r\n\r\n",
    "busy for a day": b"HTTP/1.1 503 busy\r\nRetry-After: 86400\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"\x00\xff\x1b[31m s3cret\r\n\r\n",
    "silent": b"",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_collector_that_refuses_costs_counted_spans_and_no_secret_is_logged(
    name: str,
    opened: Callable[..., OtlpExporter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    with answering(REFUSALS[name]) as server:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:{SECRET}@127.0.0.1:{server.port}/{SECRET}?k={SECRET}"
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET},{SECRET}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(SECONDS_OF_A_REQUEST))
        exporter = opened(config=Config(otlp=OtlpConfig(level="modules", process=False)))
        run_steps(exporter, 0, 1)
        until(lambda: is_settled(exporter))
        run_steps(exporter, 1, 1)
        exporter.close()

    account = exporter.account
    assert (account.produced, account.sent, account.total_dropped) == (18, 0, 18)
    assert "18 of 18 spans were not exported" in caplog.text
    assert "Traceback" not in caplog.text
    assert SECRET not in caplog.text + "".join(capfd.readouterr())


def test_one_that_does_not_speak_tls_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://127.0.0.1:{receiver.port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(SECONDS_OF_A_REQUEST))
        sink = HttpSpans()
        assert not sink.export(job_spans()[0])
        sink.shutdown()

    assert receiver.spans == []


@pytest.mark.parametrize("sink", [HttpSpans, HttpMetrics])
def test_an_address_that_cannot_be_read_is_not_repeated(
    sink: type[HttpSpans | HttpMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "true")  # reads its port at once
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:{SECRET}/@127.0.0.1:4318")
    with pytest.raises(ConfigurationError) as error:
        sink()

    assert SECRET not in str(error.value)
    assert error.value.__suppress_context__
