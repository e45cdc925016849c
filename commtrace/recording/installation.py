"""Check that installed packages fit: pyarrow with numpy, and the versions that commtrace was tried with."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.errors import InstallationError
from commtrace.recording import launchers

_logger = logging.getLogger("commtrace")

PAGE: Final = "docs/support.md"


class Tried(NamedTuple):
    """The oldest and the newest version that commtrace was tried with: major and minor number."""

    oldest: tuple[int, int]
    newest: tuple[int, int]


TRIED: Final[Mapping[str, Tried]] = {
    "torch": Tried((2, 4), (2, 15)),
    "megatron-core": Tried((0, 12), (0, 19)),
    "deepspeed": Tried((0, 15), (0, 19)),
}
"""The one place that says so; docs/support.md has what was found."""

_warned: set[str] = set()


def own_command() -> str:
    """Return how a shell calls commtrace, for a command to copy: by its path where it is not on PATH."""
    if shutil.which("commtrace"):
        return "commtrace"
    script = Path(sys.executable).with_name("commtrace")
    if not os.access(script, os.X_OK):
        return f"{shlex.quote(sys.executable)} -m commtrace"
    try:
        short = str(script).removeprefix(f"{os.getcwd()}{os.sep}")
    except OSError:  # the directory was removed
        return shlex.quote(str(script))
    return shlex.quote(short if os.sep in short else f"./{short}")


def import_pyarrow() -> None:
    """Import pyarrow, which may not fit numpy; raise InstallationError, with the command to run, if that fails."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise InstallationError(
            f"pyarrow cannot be imported ({error}). Install one that works with numpy 1 and with numpy 2: "
            "pip install 'pyarrow>=15,<26'"
        ) from error


def warn_if_untried(package: str, version: str) -> None:
    """Warn, once for each package, of a version that commtrace was not tried with. It is recorded all the same."""
    number = re.match(r"(\d+)\.(\d+)", version)
    tried = TRIED[package]
    if launchers.local_rank(os.environ):  # one rank of a node says it for all
        return
    if package in _warned or number is None or tried.oldest <= _minor(number) <= tried.newest:
        return
    _warned.add(package)
    oldest, newest = (".".join(map(str, end)) for end in tried)
    _logger.warning(
        "commtrace was tested with %s %s to %s; %s is recorded as far as possible: see %s and commtrace doctor",
        package, oldest, newest, version, PAGE,
    )  # fmt: skip


def _minor(number: re.Match[str]) -> tuple[int, int]:
    return int(number[1]), int(number[2])
