"""A receiver of OTLP over HTTP, whatever it answers."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from urllib3.exceptions import NewConnectionError

from commtrace.errors import ConfigurationError

_MOST_BYTES: Final = 65_536
"""Of an answer: receivers say nothing, or in a few words what they did not like."""

_CREDENTIAL_PROVIDERS: Final = tuple(
    f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal}CREDENTIAL_PROVIDER" for signal in ("", "TRACES_", "METRICS_")
)

_Exporter = TypeVar("_Exporter")


class HttpSpans:
    """The SDK's OTLP/HTTP exporter, which reads the ``OTEL_EXPORTER_OTLP_*`` variables and tries again by itself.

    Raises:
        ConfigurationError: a variable has a value that cannot be used.
    """

    def __init__(self) -> None:
        self._session = _session()
        self._exporter: Any = _made(OTLPSpanExporter, self._session)

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


class BoundedSession(requests.Session):
    """Reads no more of an answer than matters: whoever answers could otherwise fill the memory of the node.

    Attributes:
        is_unanswered: a request was sent to which no answer came, since this was last set to False.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_unanswered = False

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return that there is none: before it goes there, requests would read the whole body."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Return the answer without its body.

        Raises:
            requests.HTTPError: it says that the receiver is elsewhere, which the SDK takes for a success; or it is no
                HTTP, for which the SDK would ask again and again.
        """
        try:
            response = super().send(request, **{**kwargs, "stream": True})
        except requests.ConnectionError as error:
            if _is_no_http(error):
                raise requests.HTTPError("the receiver does not speak HTTP") from None
            self.is_unanswered |= not _was_never_sent(error)
            raise
        except requests.Timeout:  # while it was waited for the answer; one on connecting is a ConnectionError
            self.is_unanswered = True
            raise
        # A short body is read to its end, as only then the connection can be used again.
        response.raw.read(_MOST_BYTES)
        response.close()
        if 300 <= response.status_code < 400:
            raise requests.HTTPError(f"the receiver answers {response.status_code}, and is not looked for elsewhere")
        return response


def _was_never_sent(error: requests.ConnectionError) -> bool:
    """Return whether there was no connection on which a request could have been sent."""
    if isinstance(error, (requests.exceptions.ConnectTimeout, requests.exceptions.SSLError)):
        return True
    return any(isinstance(getattr(cause, "reason", None), NewConnectionError) for cause in error.args)


def _is_no_http(error: requests.ConnectionError) -> bool:
    """Return whether there was an answer, with endless headers for example."""
    # requests and urllib3 each wrap what http.client says.
    causes = [cause for outer in error.args for cause in getattr(outer, "args", ())]
    # A connection that is closed without an answer is both for http.client.
    return any(isinstance(cause, http.client.HTTPException) and not isinstance(cause, OSError) for cause in causes)


def _session() -> BoundedSession | None:
    """Return a session of ours, unless the variables name one."""
    return None if any(os.environ.get(name) for name in _CREDENTIAL_PROVIDERS) else BoundedSession()


def _made(exporter: Callable[..., _Exporter], session: BoundedSession | None) -> _Exporter:
    try:
        return exporter(session=session)
    except ValueError:  # Its text repeats the value, in which there may be a password.
        raise ConfigurationError("one of the variables OTEL_EXPORTER_OTLP_… has a value that cannot be used") from None


def _outcome(session: BoundedSession | None, export: Callable[[], bool]) -> bool | None:
    """Return whether a batch is taken; None where no answer came. If not, it is counted: errors of requests repeat the
    address, so that none is logged.
    """
    if session is not None:
        session.is_unanswered = False
    try:
        if export():
            return True
    except requests.RequestException:
        pass
    return None if session is not None and session.is_unanswered else False
