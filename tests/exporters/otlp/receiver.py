"""A receiver of OTLP protobuf over HTTP: what a collector does with a request, and nothing else.

As a process of its own, which kills itself when it has got spans: `python -m tests.exporters.otlp.receiver PORT_FILE`.
"""

from __future__ import annotations

import gzip
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """Listens until it is closed; afterwards another one can listen on the same port."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[Any] = []
        self.resources: list[Mapping[str, Any]] = []
        self.metrics: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.seconds_per_request = 0.0
        self._connections: list[socket.socket] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(receiver.seconds_per_request)
                receiver.take(self.path, dict(self.headers.items()), body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Not on stderr."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def process_request(self, request: Any, client_address: Any) -> None:
                receiver._connections.append(request)
                super().process_request(request, client_address)

            def handle_error(self, *_: Any) -> None:
                """The other side went away: what the tests are about."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Decode a request as the protocol says."""
        self.headers.append(headers)
        raw = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        if path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(raw))
            return
        assert path == "/v1/traces", path
        for of_resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.resources.append(attributes(of_resource.resource))
            for scope in of_resource.scope_spans:
                self.spans.extend(scope.spans)

    def close(self) -> None:
        """End as a process does: with its connections, which clients keep open, too."""
        self._server.shutdown()
        for connection in self._connections:
            with suppress(OSError):  # the other side may have closed it
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join(5)


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver(port)
    try:
        yield receiver
    finally:
        receiver.close()


def attributes(message: Any) -> dict[str, Any]:
    """Of a span, a link or a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in message.attributes}


if __name__ == "__main__":
    alone = Receiver()
    Path(sys.argv[1]).write_text(str(alone.port))
    end = time.monotonic() + 120
    while not alone.spans and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
