"""Where the file system of a run is called: in this process, or in one beside it (:mod:`.file_process`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from commtrace.trace.files.safe_files import open_new

_T = TypeVar("_T")


class NewFile(Protocol):
    """A file that was made for writing; all methods raise OSError."""

    def write(self, content: bytes) -> None:
        """Write all of it."""

    def has_name(self) -> bool:
        """Return whether nobody has deleted it."""

    def sync(self) -> None:
        """Wait until it is on the disk."""

    def close(self) -> None: ...


class FileCalls(Protocol):
    """Where the file system of a run is called."""

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Return what a function of a module returns, or raise what it raises; all of it can be pickled.

        Raises:
            OSError: also where the process that would call it is gone.
        """

    def create(self, path: Path) -> NewFile:
        """Make a file; raise FileExistsError if there is something already."""

    def keep_copy(self, source: int, path: Path) -> Callable[[], None]:
        """Keep a copy of what is in the file with the descriptor ``source``; return what removes the copy.

        It outlives this process where nobody has removed it. Each new content takes the place of the one before.

        Raises:
            OSError: nothing can copy it without this process.
        """

    def note_end(self, path: Path) -> None:
        """Have it noted how this process ends, if it does without closing this.

        The file is named ``path`` with ``-`` and the number of a signal that its process group was sent before, or 0.
        Nothing is noted without a process that outlives this one.

        Raises:
            OSError: the process that would do so is gone.
        """


class _Here:
    """Calls in this process."""

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return function(*arguments)

    def create(self, path: Path) -> NewFile:
        return _FileHere(path)

    def keep_copy(self, source: int, path: Path) -> Callable[[], None]:
        raise OSError("no process beside this one could be started")

    def note_end(self, path: Path) -> None:
        pass


HERE: Final[FileCalls] = _Here()


class _FileHere:
    def __init__(self, path: Path) -> None:
        self._file: int | None = open_new(path)

    def write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._descriptor(), rest) :]

    def has_name(self) -> bool:
        return os.fstat(self._descriptor()).st_nlink > 0

    def sync(self) -> None:
        os.fsync(self._descriptor())

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _descriptor(self) -> int:
        if self._file is None:
            raise ValueError("the file is closed")
        return self._file

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()
