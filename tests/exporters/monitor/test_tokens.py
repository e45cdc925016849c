"""The secret that ranks and the monitor share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from commtrace.errors import ConfigurationError
from commtrace.exporters.monitor.tokens import checked_token, make_token, new_token, read_token, token_path


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
def test_what_can_be_no_token_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
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
