"""Fetch a text over HTTP from an address that may be slow, wrong or gone."""

from __future__ import annotations

import base64
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Final

from commtrace.errors import CommtraceError
from commtrace.redaction import http_reason, redacted_url

_SECONDS: Final = 10.0
_MOST_BYTES: Final = 64 << 20
"""A Prometheus that watches ten thousand ranks answers some megabytes."""


class MetricsError(CommtraceError):
    """No metrics at this address."""


def fetch(url: str, **parameters: str) -> str:
    """Return the answer to a GET, with ``user:password@`` of the URL as credentials; raise MetricsError."""
    try:
        with urllib.request.urlopen(_request(url, parameters), timeout=_SECONDS) as answer:
            content: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()  # its body, that is
        why = " (credentials: http://USER:PASSWORD@HOST:PORT/…)" if error.code == 401 else ""
        raise MetricsError(f"{redacted_url(url)} answers {http_reason(error)}{why}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MetricsError(
            f"{redacted_url(url)} does not answer: {http_reason(error)}. Check that the job runs, and the address."
        ) from error
    if len(content) > _MOST_BYTES:
        raise MetricsError(
            f"{redacted_url(url)} answers more than {_MOST_BYTES:,} bytes, too much for the metrics of a job."
        )
    return content.decode("utf-8", errors="replace")


def _request(url: str, parameters: Mapping[str, str]) -> urllib.request.Request:
    """Return the request with the credentials in a header, as urllib does not accept them in the address."""
    parts = urllib.parse.urlsplit(url)
    asked = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = urllib.request.Request(asked + (f"?{urllib.parse.urlencode(parameters)}" if parameters else ""))
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_header("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())
    return request
