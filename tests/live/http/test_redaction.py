"""Addresses in logs."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import urllib.error
from email.message import Message

import pytest

from commtrace.live.http.redaction import http_reason, redacted_url

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://hook:9", "http://hook:9"),
        ("https://hooks.example.com/services/s3cret", "https://hooks.example.com/…"),
        ("https://me:s3cret@hooks.example.com/", "https://hooks.example.com"),
        ("https://hooks.example.com?token=s3cret", "https://hooks.example.com/…"),
        ("http://[::1/s3cret", "a URL that cannot be read"),
        ("http://host:s3cret", "a URL that cannot be read"),
        ("s3cret", ":///…"),
    ],
)
def test_a_redacted_address_keeps_its_host(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (urllib.error.HTTPError("http://s3cret", 403, SECRET, Message(), io.BytesIO()), "HTTP status 403"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (urllib.error.URLError(socket.gaierror(-2, "Name or service not known")), "Name or service not known"),
        (urllib.error.URLError("unknown url type: s3cret"), "URLError"),
        (TimeoutError(SECRET), "TimeoutError"),
        (http.client.InvalidURL("nonnumeric port: 's3cret@host'"), "InvalidURL"),
        (ValueError("unknown url type: 's3cret'"), "ValueError"),
        (urllib.error.URLError(ssl.SSLError(1, "wrong version number")), "wrong version number"),
    ],
)
def test_the_reason_does_not_repeat_the_address(error: Exception, reason: str) -> None:
    assert http_reason(error) == reason
