"""What is asked for metrics: with credentials if it wants them, and no error repeats them."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from commtrace.top import http
from commtrace.top.from_metrics import metrics_source
from commtrace.top.http import MetricsError, fetch

SECRET = "s3cret"


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers whoever has the password with the query, and 100 bytes at /much."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
            is_known = given == f"me:{SECRET}".encode()
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(b"x" * 100 if self.path == "/much" else self.path.encode())

        def log_message(self, *_: object) -> None:
            """Not on stderr."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(5)


def test_credentials_of_the_address_are_sent_with_the_request(server: HTTPServer) -> None:
    assert fetch(f"http://me:{SECRET}@127.0.0.1:{server.server_port}/api", query="a b") == "/api?query=a+b"


def test_who_is_refused_is_told_how_to_give_them(server: HTTPServer) -> None:
    with pytest.raises(MetricsError) as error:
        fetch(f"http://you:{SECRET}@127.0.0.1:{server.server_port}/metrics")

    assert str(error.value) == (
        f"http://127.0.0.1:{server.server_port}/… answers HTTP status 401 "
        "(credentials: http://USER:PASSWORD@HOST:PORT/…)"
    )


def test_no_more_is_read_than_metrics_of_a_job(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MOST_BYTES", 99)
    with pytest.raises(MetricsError, match="answers more than 99 bytes"):
        fetch(f"http://me:{SECRET}@127.0.0.1:{server.server_port}/much")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://me:{SECRET}@127.0.0.1:9/metrics", "http://127.0.0.1:9/… does not answer: Connection refused."),
        (f"http://me:{SECRET}/x@127.0.0.1:9/metrics", "a URL that cannot be read does not answer: InvalidURL."),
        (f"http://127.0.0.1:9/metrics?token={SECRET}", "http://127.0.0.1:9/… does not answer: Connection refused."),
        (f"http://[{SECRET}/metrics", "a URL that cannot be read does not answer: ValueError."),
    ],
)
def test_an_error_names_the_host_alone(url: str, message: str) -> None:
    with pytest.raises(MetricsError) as error:
        metrics_source(url, 5).look()

    assert str(error.value) == f"{message} Check that the job runs, and the address."
