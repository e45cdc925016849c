"""Addresses without the secrets in them, for logs and errors."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.parse


def redacted_url(url: str) -> str:
    """Return ``scheme://host:port/…``: paths, queries and user names hold tokens and passwords."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
        if not host.isprintable():
            raise ValueError("control characters")
    except ValueError:
        return "a URL that cannot be read"
    shown = f"{parts.scheme}://{host}{port}"
    return shown if parts.path in ("", "/") and not parts.query else f"{shown}/…"


def http_reason(error: Exception) -> str:
    """Return why a request failed, without the address, which urllib's own messages may repeat."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {reason.verify_message}"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason if isinstance(reason, Exception) else error).__name__
