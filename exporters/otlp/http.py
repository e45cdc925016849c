"""Send OTLP over HTTP, and survive any answer of the receiver."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import requests
import urllib3
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client.metrics_core import Metric
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NewConnectionError

from commtrace.errors import ConfigurationError
from commtrace.exporters.otlp.metrics import metrics_data
from commtrace.live.http.deadline import Deadline

_MOST_BYTES: Final = 65_536
"""Limit of an answer, which is empty or a short error."""

_SECONDS: Final = 10.0
"""Limit of an exchange, if the SDK gives none."""

_BODY_SECONDS: Final = 0.5
"""Limit for the body of an answer, of which only the status is used: after it, the connection can serve again."""

_CREDENTIAL_PROVIDERS: Final = tuple(
    f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal}CREDENTIAL_PROVIDER" for signal in ("", "TRACES_", "METRICS_")
)

_Exporter = TypeVar("_Exporter")


class HttpSpans:
    """The SDK's exporter, which reads ``OTEL_EXPORTER_OTLP_*`` (or raises :class:`ConfigurationError`) and retries."""

    def __init__(self) -> None:
        self._session = _session()
        self._exporter: Any = _made(OTLPSpanExporter, self._session)  # its methods have no types

    def export(self, spans: Sequence[ReadableSpan]) -> bool | None:
        return _outcome(self._session, lambda: self._exporter.export(spans) is SpanExportResult.SUCCESS)

    def shutdown(self) -> None:
        self._exporter.shutdown()


class HttpMetrics:
    """The same for metrics."""

    def __init__(self) -> None:
        self._session = _session()
        self._exporter = _made(OTLPMetricExporter, self._session)

    def export(self, metrics: MetricsData) -> bool | None:
        return _outcome(self._session, lambda: self._exporter.export(metrics) is MetricExportResult.SUCCESS)

    def shutdown(self) -> None:
        self._exporter.shutdown()


class RunMetrics:
    """Sends metrics of a whole run, computed from its files; raises as :class:`HttpSpans` does."""

    def __init__(self) -> None:
        self._sink = HttpMetrics()
        self._start_ns = time.time_ns()

    def send(self, families: Iterable[Metric], run_id: str) -> bool:
        """Send the families of a Prometheus collector; return True if they were taken."""
        detected = Resource.create({"commtrace.run.id": run_id, "service.instance.id": run_id})
        named = {} if _has_name(detected) else {SERVICE_NAME: "commtrace"}
        resource = detected.merge(Resource(named))
        return self._sink.export(metrics_data(families, None, resource, self._start_ns, time.time_ns())) is True


class _WatchedConnections:
    """The open connections of a session, to be ended when the time of an exchange is over."""

    def __init__(self) -> None:
        self.open: weakref.WeakKeyDictionary[object, socket.socket] = weakref.WeakKeyDictionary()
        self.deadline: Deadline | None = None

    def begin(self, deadline: Deadline | None) -> None:
        self.deadline = deadline
        if deadline is not None:
            for connection in list(self.open.values()):
                deadline.watch(connection)

    def connected(self, owner: object, connection: socket.socket) -> None:
        self.open[owner] = connection.dup()  # the handle that TLS leaves as it is
        if self.deadline is not None:
            self.deadline.watch(connection)

    def closed(self, owner: object) -> None:
        connection = self.open.pop(owner, None)
        if connection is not None:
            connection.close()


class _BoundedAdapter(HTTPAdapter):
    """Makes connections that a deadline can end."""

    def __init__(self, watched: _WatchedConnections) -> None:
        self._watched = watched
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self._watch(self.poolmanager)

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*arguments, **options)
        self._watch(manager)
        return manager

    def _watch(self, manager: Any) -> None:
        manager.pool_classes_by_scheme = {
            scheme: type(
                pool.__name__, (pool,), {"ConnectionCls": _watched_connection(pool.ConnectionCls, self._watched)}
            )
            for scheme, pool in (("http", HTTPConnectionPool), ("https", HTTPSConnectionPool))
        }


def _watched_connection(kind: type[Any], watched: _WatchedConnections) -> type[Any]:
    class Watched(kind):  # type: ignore[misc]  # of which of two classes, the scheme says
        def _new_conn(self) -> socket.socket:
            connection: socket.socket = super()._new_conn()
            watched.connected(self, connection)
            return connection

        def close(self) -> None:
            watched.closed(self)
            super().close()

    return Watched


class BoundedSession(requests.Session):
    """Bounds the time of an exchange and the part of an answer that is read: they could last, and be, without end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_unanswered = False  # True when a request got no answer
        self._watched = _WatchedConnections()
        for scheme in ("http://", "https://"):
            self.mount(scheme, _BoundedAdapter(self._watched))

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return None: requests would read the whole body before it follows a redirect."""

    def send(self, request: requests.PreparedRequest, **kwargs: object) -> requests.Response:
        """Return the answer without its body.

        Raises:
            requests.Timeout: there is no whole answer before the time is over.
            requests.HTTPError: it is a redirect, a success for the SDK; or no HTTP, which the SDK would retry for ever.
        """
        timeout = kwargs.get("timeout")
        with self._deadline(timeout if isinstance(timeout, (int, float)) else _SECONDS) as deadline:
            response = self._answer(request, kwargs, deadline)
        if response.headers.get("Content-Length") != "0":
            with self._deadline(_BODY_SECONDS), contextlib.suppress(OSError, urllib3.exceptions.HTTPError):
                # A connection can only be used again after its body was read to the end.
                response.raw.read(_MOST_BYTES)
        response.close()
        if 300 <= response.status_code < 400:
            raise requests.HTTPError(f"the receiver answers {response.status_code}; redirects are not followed")
        return response

    @contextlib.contextmanager
    def _deadline(self, seconds: float) -> Iterator[Deadline]:
        with Deadline(seconds) as deadline:
            self._watched.begin(deadline)
            try:
                yield deadline
            finally:
                self._watched.begin(None)

    def _answer(
        self, request: requests.PreparedRequest, options: Mapping[str, object], deadline: Deadline
    ) -> requests.Response:
        try:
            response = super().send(request, **{**options, "stream": True})
        except requests.RequestException as error:
            if deadline.is_over:
                self.is_unanswered = True
                raise requests.Timeout("the receiver does not answer in time") from None
            self._look_at(error)
            raise
        if deadline.is_over:  # an end of the connection among the headers counts as their end
            response.close()
            self.is_unanswered = True
            raise requests.Timeout("the receiver does not answer in time")
        return response

    def _look_at(self, error: requests.RequestException) -> None:
        """Note whether an answer is missing; raise requests.HTTPError if it is no HTTP."""
        if isinstance(error, requests.ConnectionError):
            if _is_no_http(error):
                raise requests.HTTPError("the receiver does not speak HTTP") from None
            self.is_unanswered |= not _was_never_sent(error)
        elif isinstance(error, requests.Timeout):
            self.is_unanswered = True  # after the request was sent; a timeout on connecting is a ConnectionError


def _was_never_sent(error: requests.ConnectionError) -> bool:
    """Return True if there was no connection to send the request on."""
    if isinstance(error, (requests.exceptions.ConnectTimeout, requests.exceptions.SSLError)):
        return True
    return any(isinstance(getattr(cause, "reason", None), NewConnectionError) for cause in error.args)


def _is_no_http(error: requests.ConnectionError) -> bool:
    """Return True if the answer was invalid, with endless headers for example."""
    # requests and urllib3 each wrap the exception of http.client.
    causes = [cause for outer in error.args for cause in getattr(outer, "args", ())]
    # A connection that is closed without an answer is both for http.client.
    return any(isinstance(cause, http.client.HTTPException) and not isinstance(cause, OSError) for cause in causes)


def _session() -> BoundedSession | None:
    """Return a bounded session; None if the variables name a credential provider, which brings its own."""
    return None if any(os.environ.get(name) for name in _CREDENTIAL_PROVIDERS) else BoundedSession()


def _made(exporter: Callable[..., _Exporter], session: BoundedSession | None) -> _Exporter:
    try:
        return exporter(session=session)
    except ValueError:  # its text repeats the value, which may hold a password
        raise ConfigurationError("one of the variables OTEL_EXPORTER_OTLP_… has a value that cannot be used") from None


def _outcome(session: BoundedSession | None, export: Callable[[], bool]) -> bool | None:
    """Return True if a batch was taken, None if no answer came. Errors are not logged, as they repeat the address."""
    if session is not None:
        session.is_unanswered = False
    try:
        if export():
            return True
    except requests.RequestException:
        pass
    return None if session is not None and session.is_unanswered else False


def _has_name(resource: Resource) -> bool:
    return not str(resource.attributes[SERVICE_NAME]).startswith("unknown_service")
