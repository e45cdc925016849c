"""Asks an address that may be slow, wrong, or gone."""

from __future__ import annotations

import base64
import http.client
import urllib.error
import urllib.parse
import urllib.request
from typing import Final

from commtrace.errors import CommtraceError

_SECONDS: Final = 10.0
_MOST_BYTES: Final = 64 << 20
"""A Prometheus that watches ten thousand ranks answers some megabytes."""


class MetricsError(CommtraceError):
    """An address gave no metrics."""


def fetch(url: str, **parameters: str) -> str:
    """What a GET answers.

    Args:
        url: http or https, with ``user:password@`` before the host where it wants credentials.
        parameters: of the query.

    Raises:
        MetricsError: no answer, or not a good one.
    """
    parts = urllib.parse.urlsplit(url)
    asked = shown(url) + (f"?{urllib.parse.urlencode(parameters)}" if parameters else "")
    request = urllib.request.Request(asked)
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_header("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            told: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        why = " (credentials: http://USER:PASSWORD@HOST:PORT/…)" if error.code == 401 else ""
        raise MetricsError(f"{shown(url)} answers {error.code} {error.reason}{why}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise MetricsError(f"{shown(url)} does not answer: {reason}. Is the job running, the address right?") from error
    if len(told) > _MOST_BYTES:
        raise MetricsError(f"{shown(url)} answers more than {_MOST_BYTES:,} bytes: those are no metrics of a job.")
    return told.decode("utf-8", errors="replace")


def shown(url: str) -> str:
    """The address without its credentials: what may be printed."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
