"""A monitor that listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from commtrace.exporters.monitor.exchange import MonitorClient, MonitorServer
from commtrace.exporters.monitor.messages import WatchedJob
from commtrace.exporters.monitor.rendezvous import Address
from commtrace.exporters.monitor.store import MonitorStore

TOKEN = "a secret of sixteen bytes".replace(" ", "-")
JOB = WatchedJob("run", 0, 4, 4.0)


@pytest.fixture
def store() -> MonitorStore:
    return MonitorStore(JOB)


@pytest.fixture
def server(store: MonitorStore) -> Iterator[MonitorServer]:
    server = MonitorServer(Address("127.0.0.1", 0), TOKEN, store.answer)
    yield server
    server.close()


@pytest.fixture
def client(server: MonitorServer) -> MonitorClient:
    return MonitorClient(server.address, TOKEN)


@pytest.fixture
def client_with(server: MonitorServer) -> Callable[[str], MonitorClient]:
    """A client with some token."""
    return lambda token: MonitorClient(server.address, token)
