"""Serve a folder as a file system of FUSE, every request of which waits while there is a file FLAG.

    python frozen_fuse.py FOLDER MOUNT FLAG

The kernel keeps a process that has exited until such a request has been answered, as some network file systems have it.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

from fuse import FUSE, FuseOSError, Operations

ATTRIBUTES = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid")


class Frozen(Operations):
    """What the recorder asks of a file system."""

    def __init__(self, folder: Path, flag: Path) -> None:
        self._folder = folder
        self._flag = flag

    def __call__(self, operation: str, *arguments: Any) -> Any:
        while self._flag.exists():
            time.sleep(0.05)
        try:
            return super().__call__(operation, *arguments)
        except OSError as error:
            raise FuseOSError(error.errno or errno.EIO) from error

    def _real(self, path: str) -> str:
        return f"{self._folder}{path}"

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._real(path))
        return {name: getattr(status, name) for name in ATTRIBUTES}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._real(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._real(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._real(old), self._real(new))

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self._real(target))

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._real(path), length)

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


if __name__ == "__main__":
    FUSE(Frozen(Path(sys.argv[1]), Path(sys.argv[3])), sys.argv[2], foreground=True, attr_timeout=0, entry_timeout=0)
