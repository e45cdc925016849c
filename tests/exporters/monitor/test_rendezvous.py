"""The monitor's address in the job's own store, and what a neighbour may have put there."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from commtrace.exporters.monitor import rendezvous
from commtrace.exporters.monitor.address import Address
from commtrace.exporters.monitor.rendezvous import RendezvousError, find, host_for_ranks, publish
from tests.exporters.monitor.conftest import TOKEN

torch = pytest.importorskip("torch")
KEY = "commtrace/monitor/run/0"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The job's store: a real one, which would wait for what is not there."""
    from torch.distributed import PrefixStore, TCPStore

    tcp = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    store = PrefixStore("default_pg", tcp)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    return store


def test_what_rank_0_publishes_is_found(store: Any) -> None:
    assert find("run", 0) is None
    publish("run", 0, Address("10.0.0.5", 4711), TOKEN)
    assert find("run", 0) == (Address("10.0.0.5", 4711), TOKEN)
    assert (find("run", 1), find("other", 0)) == (None, None)


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff\xfe", b"[" * 100_000, b"x" * 1_000_000, b"{}", b'{"address": 5, "token": 5}',
     b'{"address": "host:99999", "token": "0123456789abcdef"}', b'{"address": "a b:1", "token": "0123456789abcdef"}',
     b'{"address": "host:1", "token": "short"}', b'{"address": "host:1", "token": "0123456789abcde\\u001b"}'],
)  # fmt: skip
def test_anything_else_in_its_place_is_an_error(store: Any, value: bytes) -> None:
    store.set(KEY, value)
    with pytest.raises(RendezvousError, match="no address of a monitor"):
        find("run", 0)


def test_ranks_on_one_host_use_the_address_of_the_store(store: Any) -> None:
    assert host_for_ranks() == "127.0.0.1"


def test_a_host_whose_name_leads_back_to_itself_uses_another_address(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        host, port = "node1", 29_500

    ways = {("node1", 29_500): "127.0.0.1", rendezvous._SOMEWHERE: "10.0.0.5"}
    monkeypatch.setattr(rendezvous, "_store_of_job", Elsewhere)
    monkeypatch.setattr(rendezvous, "_own_address", lambda host, port, otherwise=None: ways[host, port])
    assert host_for_ranks() == "10.0.0.5"
    ways["node1", 29_500] = "10.0.0.7"
    assert host_for_ranks() == "10.0.0.7"


def test_a_store_without_an_address_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_store_of_job", torch.distributed.HashStore)
    with pytest.raises(RendezvousError, match="HashStore, which has no address; start `commtrace monitor"):
        host_for_ranks()


def test_without_a_job_there_is_no_store() -> None:
    with pytest.raises(RendezvousError, match="not initialised"):
        find("run", 0)
