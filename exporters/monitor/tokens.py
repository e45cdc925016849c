"""The secret that a monitor shares with the ranks that report to it."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from commtrace.errors import ConfigurationError
from commtrace.options import is_token

_MOST_BYTES: Final = 1_024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_hex(32)


def checked_token(text: str) -> str:
    """Return ``text`` if it can be a token.

    Raises:
        ConfigurationError: it is too short, too long, or not printable ASCII.
    """
    if not is_token(text):
        raise ConfigurationError("the monitor's token must have 16 to 256 printable ASCII characters and no spaces")
    return text


def token_path() -> Path:
    """Return where the user's token is kept: ``~/.config/commtrace/monitor-token``.

    Raises:
        ConfigurationError: the user has no home directory.
    """
    try:
        directory = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    except RuntimeError as error:
        raise ConfigurationError(f"{error} Set COMMTRACE_MONITOR_TOKEN") from error
    return Path(directory) / "commtrace" / "monitor-token"


def read_token(path: Path) -> str:
    """Return the token in a file that only the user can read.

    Raises:
        ConfigurationError: there is none, others could read it, or it holds something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_mode & _OTHERS or status.st_uid != os.geteuid():
                raise ConfigurationError(f"{path} must be a file of yours that nobody else can read: chmod 600 {path}")
            return checked_token(file.read(_MOST_BYTES).decode("ascii", "replace").strip())
    except OSError as error:
        raise ConfigurationError(
            f"a monitor outside of the job shares a token with its ranks, and {path} cannot be read "
            f"({error.strerror}): set COMMTRACE_MONITOR_TOKEN to what `commtrace monitor` uses"
        ) from error


def make_token(path: Path) -> str:
    """Return the token in the file; create it, readable by the user only, if it is missing.

    Raises:
        ConfigurationError: it can be neither made nor read.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be made ({error.strerror}): set COMMTRACE_MONITOR_TOKEN") from error
    with open(descriptor, "w") as file:
        file.write(new_token() + "\n")
    return read_token(path)
