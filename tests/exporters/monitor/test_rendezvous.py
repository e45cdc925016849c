"""The monitor's address in the job's own store, and what a neighbour may have put there."""

from __future__ import annotations

import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from commtrace.errors import ConfigurationError
from commtrace.exporters.monitor import rendezvous
from commtrace.exporters.monitor.rendezvous import (
    Address,
    RendezvousError,
    checked_token,
    find,
    host_for_ranks,
    make_token,
    new_token,
    publish,
    read_token,
    token_path,
)
from tests.exporters.monitor.conftest import TOKEN

torch = pytest.importorskip("torch")
KEY = "commtrace/monitor/run/0"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The job's store: a real one, which would wait for what is not there."""
    from torch.distributed import PrefixStore, TCPStore

    tcp = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    store = PrefixStore("default_pg", tcp)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    return store


def test_the_address_that_rank_0_publishes_is_found(store: Any) -> None:
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
    with pytest.raises(RendezvousError, match="no valid address of a monitor"):
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


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "config" / "commtrace" / "monitor-token"
    token = make_token(path)
    assert (make_token(path), read_token(path)) == (token, token)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert new_token() != new_token()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_file_that_others_can_read_is_not_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    make_token(path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 257, "has spaces in it", "not-ascii-ééééééééééé", "a\n" * 20])
def test_an_impossible_token_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    for refused in (lambda: checked_token(text), lambda: read_token(path)):
        with pytest.raises(ConfigurationError, match="16 to 256") as error:
            refused()
        assert not text or text not in str(error.value)


def test_a_fifo_a_directory_or_nothing_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_token(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigurationError, match="COMMTRACE_MONITOR_TOKEN"):
            read_token(path)
    with pytest.raises(ConfigurationError, match="COMMTRACE_MONITOR_TOKEN"):
        make_token(tmp_path / "fifo" / "token")


def test_it_is_kept_where_configuration_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/of-mine")
    assert token_path() == Path("/etc/of-mine/commtrace/monitor-token")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert token_path() == Path("/home/me/.config/commtrace/monitor-token")


def test_without_a_home_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigurationError, match="Set COMMTRACE_MONITOR_TOKEN"):
        token_path()
