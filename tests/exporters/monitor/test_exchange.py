"""Ranks and the monitor over real sockets; what neighbours on the network may do, too."""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from commtrace.exporters.monitor.exchange import (
    _MOST_CONNECTIONS,
    MonitorClient,
    MonitorError,
    MonitorServer,
    ServerError,
)
from commtrace.exporters.monitor.messages import (
    GREETING,
    HEADER_BYTES,
    MOST_BYTES,
    NONCE_BYTES,
    SECONDS,
    Reply,
    encoded,
    header,
    mac_of,
)
from commtrace.exporters.monitor.rendezvous import Address, AddressError
from commtrace.exporters.monitor.store import MonitorStore
from tests.exporters.monitor.conftest import TOKEN
from tests.exporters.monitor.made_reports import report, stopped
from tests.waiting import until

LIMIT_SECONDS = 30.0
"""Bounded waits take 3 s, on a busy machine somewhat more; what nothing bounds never ends."""


def test_a_request_is_answered(client: MonitorClient, store: MonitorStore) -> None:
    assert client.exchange(report(1, 7)) == Reply()
    assert client.exchange(stopped(2)) == Reply()
    assert (store.windows(), store.hangs()) == ([report(1, 7).window], {2: stopped(2).report})


def test_a_report_that_the_monitor_refuses_is_an_error_with_its_reason(client: MonitorClient) -> None:
    with pytest.raises(MonitorError, match="refuses: the job has 4 ranks; rank 9 is not one of them"):
        client.exchange(report(9, 7))


def test_it_listens_where_it_was_told_and_nowhere_else(server: MonitorServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.address.port), timeout=LIMIT_SECONDS)
    with pytest.raises(ServerError, match=r"cannot listen at 192\.0\.2\.1:29555"):
        MonitorServer(Address("192.0.2.1", 29_555), TOKEN, lambda request: Reply())
    with pytest.raises(ServerError, match=f"cannot listen at {server.address}"):
        MonitorServer(server.address, TOKEN, lambda request: Reply())


def test_without_the_token_nothing_is_taken(
    client_with: Callable[[str], MonitorClient], store: MonitorStore, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with pytest.raises(MonitorError, match="is its COMMTRACE_MONITOR_TOKEN the same"):
            client_with("another-token-of-some-length").exchange(report(1, 7))
    assert store.windows() == []
    assert caplog.text.count("have different tokens") == 1, "a neighbour must not fill the log"
    assert TOKEN not in caplog.text


def test_a_request_that_was_overheard_is_not_taken_again(server: MonitorServer, store: MonitorStore) -> None:
    overheard = b""
    for attempt in range(2):
        with dialled(server) as (connection, nonce):
            if not attempt:
                body = encoded(report(1, 7))
                own = os.urandom(NONCE_BYTES)
                overheard = own + header(mac_of(TOKEN, b"request", (nonce, own), body), body) + body
            connection.sendall(overheard)
            assert bool(connection.recv(1)) == (not attempt)
        if not attempt:
            store._clear()
    assert store.windows() == []


@contextmanager
def dialled(server: MonitorServer) -> Iterator[tuple[socket.socket, bytes]]:
    """A connection, and the monitor's random number."""
    with socket.create_connection(server.address, timeout=LIMIT_SECONDS) as connection:
        greeting = connection.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        yield connection, greeting[len(GREETING) :]


def authentic(nonce: bytes, body: bytes) -> bytes:
    own = os.urandom(NONCE_BYTES)
    return own + header(mac_of(TOKEN, b"request", (nonce, own), body), body) + body


HOSTILE_BODIES = {
    "empty": b"",
    "no JSON": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "deep in what is not known": b'{"type":"report","z":' + b"[" * 100_000,
    "a number of many digits": b'{"type":"hang","rank":' + b"9" * 100_000 + b"}",
    "another type": b'{"type":"format_disk"}',
    "a range of 60 million": encoded(stopped(1)).replace(b"[0,4,1]", b"[0,60000000,1]"),
    "a negative interval": encoded(report(1, 7)).replace(b'"seconds":4.0', b'"seconds":-4.0'),
    "a job of a billion ranks": encoded(report(1, 7)).replace(b'"world_size":4', b'"world_size":1000000000'),
    "a name of 200 kB": encoded(report(1, 7)).replace(b"node0", b"n" * 200_000),
    "no text": encoded(report(1, 7)).replace(b"node0", b"\xff\xff"),
}


def test_a_client_that_comes_as_the_monitor_ends_is_no_error(
    server: MonitorServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert server._has_begun.wait(LIMIT_SECONDS)
    loop: Any = server._loop  # asyncio does not tell how many callbacks wait
    is_held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        goes_on.wait(LIMIT_SECONDS)

    loop.call_soon_threadsafe(hold)
    assert is_held.wait(LIMIT_SECONDS)
    with socket.create_connection((server.address.host, server.address.port), timeout=LIMIT_SECONDS):
        ending = threading.Thread(target=server.close)
        ending.start()
        until(lambda: loop._ready)
        goes_on.set()
        ending.join()

    assert caplog.text == ""


@pytest.mark.parametrize("body", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES.keys())
def test_whoever_has_the_token_can_send_nothing_that_hurts(
    body: bytes, server: MonitorServer, client: MonitorClient, store: MonitorStore
) -> None:
    tracemalloc.start()
    try:
        with dialled(server) as (connection, nonce):
            connection.sendall(authentic(nonce, body))
            answer = connection.recv(HEADER_BYTES, socket.MSG_WAITALL)
            assert b"refused" in connection.recv(struct.unpack("!I", answer[:4])[0], socket.MSG_WAITALL)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert (store.windows(), store.hangs()) == ([], {})
    assert client.exchange(report(1, 7)) == Reply()


@pytest.mark.parametrize("length", [MOST_BYTES + 1, 2**31, 2**32 - 1])
def test_a_message_that_says_it_is_too_long_is_not_read(
    length: int, server: MonitorServer, client: MonitorClient
) -> None:
    with dialled(server) as (connection, _):
        connection.sendall(bytes(NONCE_BYTES) + struct.pack("!I", length) + bytes(32))
        assert connection.recv(1) == b""
    assert client.exchange(report(1, 7)) == Reply()


def test_connections_that_send_nothing_are_closed_and_keep_nobody_out(
    server: MonitorServer, client: MonitorClient
) -> None:
    begin = time.monotonic()
    idle = [socket.create_connection(server.address, timeout=LIMIT_SECONDS) for _ in range(3 * _MOST_CONNECTIONS)]
    try:
        assert client.exchange(report(1, 7)) == Reply()
        for connection in idle:
            connection.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
            assert connection.recv(1) == b""
    finally:
        for connection in idle:
            connection.close()
    assert time.monotonic() - begin < LIMIT_SECONDS


def test_a_message_that_trickles_is_given_up(server: MonitorServer) -> None:
    begin = time.monotonic()
    with dialled(server) as (connection, _):
        connection.settimeout(0.2)
        while time.monotonic() - begin < LIMIT_SECONDS:
            try:
                connection.sendall(b"\0")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:  # reset
                break
    assert time.monotonic() - begin < LIMIT_SECONDS


def test_a_training_process_looks_at_a_limited_number_of_connections() -> None:
    """Each takes a fraction of a millisecond of the interpreter: a flood must not take it from training."""
    answered = 0

    def counted(request: object) -> Reply:
        nonlocal answered
        answered += 1
        return Reply()

    server = MonitorServer(Address("127.0.0.1", 0), TOKEN, counted, connections_per_second=20)
    stop, begin = threading.Event(), time.monotonic()

    def flood() -> None:
        while not stop.is_set():
            try:
                MonitorClient(server.address, TOKEN).exchange(report(1, 7))
            except MonitorError:
                continue

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    while time.monotonic() - begin < 1.5 or (answered < 5 and time.monotonic() - begin < LIMIT_SECONDS):
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    lasted = time.monotonic() - begin
    server.close()
    assert 5 <= answered <= 20 * lasted + 2


@pytest.fixture
def impostor() -> Iterator[tuple[Address, Callable[[Callable[[socket.socket], object]], None]]]:
    """Something else that listens; each connection is given to a function."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(LIMIT_SECONDS)

    def serve(answer: Callable[[socket.socket], object]) -> None:
        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    answer(connection)
                except OSError:
                    return  # the rank has gone

        threading.Thread(target=accept, daemon=True).start()

    yield Address(*listener.getsockname()), serve
    listener.close()


def _sends_forever(connection: socket.socket) -> None:
    connection.sendall(GREETING + bytes(NONCE_BYTES))
    while True:
        connection.sendall(bytes(1_000_000))


def _trickles(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"\0")
        time.sleep(0.2)


IMPOSTORS: dict[str, tuple[Callable[[socket.socket], object], str]] = {
    "answers nothing": (lambda connection: time.sleep(2 * SECONDS), "timed out|no whole answer"),
    "another service": (lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n" * 20), "not a commtrace monitor"),
    "a length of 4 GB": (
        lambda connection: connection.sendall(GREETING + bytes(NONCE_BYTES) + b"\xff" * HEADER_BYTES), "too long"
    ),
    "never ends": (_sends_forever, "COMMTRACE_MONITOR_TOKEN|reset|pipe|too long"),
    "trickles": (_trickles, "timed out|no whole answer|not a commtrace monitor"),
    "a reply without the token": (
        lambda connection: connection.sendall(GREETING + bytes(NONCE_BYTES) + header(bytes(32), b"{}") + b"{}"),
        "different tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "said"), IMPOSTORS.values(), ids=IMPOSTORS.keys())
def test_an_impostor_costs_a_rank_a_bounded_wait(
    answer: Callable[[socket.socket], object],
    said: str,
    impostor: tuple[Address, Callable[[Callable[[socket.socket], object]], None]],
) -> None:
    address, serve = impostor
    serve(answer)
    begin = time.monotonic()
    with pytest.raises(MonitorError, match=said):
        MonitorClient(address, TOKEN).exchange(report(1, 7))
    assert time.monotonic() - begin < LIMIT_SECONDS


def test_an_exchange_that_is_under_way_can_be_cut_from_another_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = MonitorClient(Address(*silent.getsockname()), TOKEN)
        threading.Timer(0.3, client.cut).start()
        with pytest.raises(MonitorError):
            client.exchange(report(1, 7))
        with pytest.raises(MonitorError, match="the job has ended"):
            client.exchange(report(1, 7))


def test_nobody_there_is_an_error_with_the_address(server: MonitorServer, client: MonitorClient) -> None:
    server.close()
    server.close()
    with pytest.raises(MonitorError, match=str(server.address)):
        client.exchange(report(1, 7))


def test_an_answer_that_fails_is_reported_and_the_monitor_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    failures = [RuntimeError("made")]

    def answer(request: object) -> Reply:
        if failures:
            raise failures.pop()
        return Reply()

    server = MonitorServer(Address("127.0.0.1", 0), TOKEN, answer)
    with caplog.at_level(logging.WARNING), pytest.raises(MonitorError):
        MonitorClient(server.address, TOKEN).exchange(report(1, 7))
    assert MonitorClient(server.address, TOKEN).exchange(report(1, 7)) == Reply()
    server.close()
    assert "could not answer a request" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:port", "host:99999", "h" * 300 + ":1", "a\nb:1", "1:²"]
)
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="write HOST:PORT"):
        Address.parse(text)


def test_addresses_are_read_as_they_are_written() -> None:
    for text in ("login1:29555", "10.0.0.5:1", "[::1]:29555"):
        assert str(Address.parse(text)) == text
    assert Address.parse("[fe80::1]:80") == ("fe80::1", 80)


def test_both_sides_need_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
from commtrace.exporters.monitor.rendezvous import Address
from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.exchange import MonitorClient
from commtrace.exporters.monitor.exchange import MonitorServer
from commtrace.exporters.monitor.store import MonitorStore
from tests.exporters.monitor.conftest import TOKEN, JOB
from tests.exporters.monitor.made_reports import report
store = MonitorStore()
server = MonitorServer(Address("127.0.0.1", 0), TOKEN, store.answer)
MonitorClient(server.address, TOKEN).exchange(report(1, 7))
Aggregator(JOB, []).join(store, 1.0)
print(store.job.run_id)
server.close()
"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (completed.stdout, completed.stderr) == ("run\n", "")
