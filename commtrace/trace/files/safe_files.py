"""Write files in a folder into which others may write: a link or file that somebody has put there is not followed."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def open_new(path: Path) -> int:
    """Create a file and return its descriptor for writing; raise FileExistsError if there is something already."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)


def open_to_append(path: Path) -> int:
    """Open or create a file for appending and return its descriptor; raise OSError if the path is a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666)


def replace_file(path: Path, content: str) -> None:
    """Put a whole file in the place of whatever has that name; raise OSError if that fails."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(open_new(unfinished), "w", encoding="utf-8") as file:
            file.write(content)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # it was not made, or the disk is read-only by now
            unfinished.unlink()
        raise
