"""Call the file system of a run from a process beside the rank, which can then end although it does not answer.

The kernel keeps a process that has exited until every call of a file system that it has begun has come back, and until
its open files are closed: on FUSE, and on some network file systems, for as long as the server does not answer. What a
rank waits for instead is a pipe, which ends with it.

The process imports neither torch nor numpy, and pyarrow only where it rewrites a segment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Set
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

from commtrace.trace import side_process
from commtrace.trace.files.file_calls import HERE, NewFile

_THAT_END: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals by which launchers and schedulers end a rank, often with its process group."""

_ORPHAN_SECONDS: Final = 0.3
_ORPHAN_LOOK_SECONDS: Final = 0.01
"""The kernel closes the descriptors of a process a moment before it has another one adopt its children."""

_T = TypeVar("_T")

_logger = logging.getLogger("commtrace")

_RESTART_SECONDS: Final = 10.0
_END_SECONDS: Final = 2.0

_LOOK_SECONDS: Final = 0.25
"""Interval at which copies are brought up to date."""
_PARENT_SECONDS: Final = 1.0
"""Interval at which the process asks whether its rank is still there: forked children of a rank keep its pipe open."""


class FileProcess:
    """Calls in a process beside this one, which is started by the first call, and anew when it has died.

    For several threads; a call that does not come back holds up the others. Where no process can be started, the calls
    are made here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._generation = 0
        self._started_at = 0.0
        self._end: Path | None = None
        """To be noted; each new process is told."""
        self._is_closed = False
        self._is_impossible = False

    @property
    def pid(self) -> int:
        """Return the process's pid; 0 without one."""
        return 0 if self._process is None else self._process.pid

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        with self._lock:
            if self._is_ready():
                result: _T = self._answer(function, *arguments)
                return result
        return HERE.call(function, *arguments)

    def create(self, path: Path) -> NewFile:
        with self._lock:
            if self._is_ready():
                return _FileElsewhere(self, self._answer("create", path), self._generation)
        return HERE.create(path)

    def keep_copy(self, source: int, path: Path) -> Callable[[], None]:
        with self._lock:
            if not self._is_ready():
                return HERE.keep_copy(source, path)
            assert self._connection is not None
            number = self._answer("keep_copy", path, sent=source)
            generation = self._generation

        def remove() -> None:
            with self._lock:
                if generation == self._generation and self._connection is not None:
                    self._answer("remove_copy", number)

        return remove

    def note_end(self, path: Path) -> None:
        with self._lock:
            self._end = path
            if self._is_ready():
                self._answer("note_end", path)

    def close(self) -> None:
        """Let the process end, which it does once it has done what it was asked for."""
        with self._lock:
            self._is_closed = True
            self._end = None
            if self._connection is not None:
                with contextlib.suppress(OSError):  # nobody waits for the answer
                    self._connection.send(("forget_end", ()))
            self._let_go()

    def __del__(self) -> None:
        self._let_go()  # of a recording that was never stopped: Python would warn of a process that nobody waited for

    def abandon_after_fork(self) -> None:
        """Close a forked child's copy of the connection, which would keep the process alive without the parent."""
        self._lock = threading.Lock()
        connection, process = self._connection, self._process
        self._connection = self._process = None
        self._is_closed = True
        if connection is not None:
            connection.close()
        if process is not None:
            process.returncode = 0  # the parent's: without a word of subprocess that nobody here has waited for it

    def has_file(self, generation: int) -> bool:
        """Return whether the process in which a file was made is there."""
        with self._lock:
            return generation == self._generation and self._connection is not None

    def of_file(self, generation: int, method: str, *arguments: Any) -> Any:
        """Call a method of the process in which a file was made; raise OSError if another one serves now."""
        with self._lock:
            if generation != self._generation or self._connection is None:
                raise OSError("the process that wrote this file is gone")
            return self._answer(method, *arguments)

    def _is_ready(self) -> bool:
        if self._is_closed:
            raise OSError("the recording has ended")
        if self._connection is None and not self._is_impossible:
            if self._generation and time.monotonic() < self._started_at + _RESTART_SECONDS:
                raise OSError("the process that writes the files of this rank has died; another one is started soon")
            self._start()
        return self._connection is not None

    def _answer(self, function: str | Callable[..., Any], *arguments: Any, sent: int | None = None) -> Any:
        connection, process = self._connection, self._process
        assert connection is not None
        assert process is not None
        try:
            connection.send((function, arguments))
            if sent is not None:
                _send_descriptor(connection, sent)
            has_worked, answer = connection.recv()
        except (EOFError, ConnectionError) as error:
            self._let_go()
            raise OSError(
                f"the process that writes the files of this rank has died (exit code {process.returncode})"
            ) from error
        except OSError:  # half a request is in the pipe, as where no descriptor was free to send another
            self._let_go()
            raise
        if has_worked:
            return answer
        raise answer

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._generation += 1
        try:
            self._process, self._connection = side_process.start(__name__, stderr=subprocess.DEVNULL)
            self._answer(os.getpid)  # what is called Python may be another program
        except (side_process.NotStartedError, OSError) as error:
            self._is_impossible = True
            _logger.info("commtrace: the files of this rank are written by its own process: %s", error)
            return
        if self._end is not None:
            self._answer("note_end", self._end)

    def _let_go(self) -> None:
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # It ends by itself; who ends first does not matter.
                process.wait(_END_SECONDS)


class _FileElsewhere:
    def __init__(self, process: FileProcess, number: int, generation: int) -> None:
        self._process = process
        self._number = number
        self._generation = generation

    def write(self, content: bytes) -> None:
        self._process.of_file(self._generation, "write", self._number, content)

    def has_name(self) -> bool:
        return bool(self._process.of_file(self._generation, "has_name", self._number))

    def sync(self) -> None:
        self._process.of_file(self._generation, "sync", self._number)

    def close(self) -> None:
        if self._process.has_file(self._generation):  # else it has ended with its process
            self._process.of_file(self._generation, "close", self._number)


class _Copy:
    """A file in memory, of which a copy is kept."""

    def __init__(self, source: int, path: Path) -> None:
        self._source = source
        self._path = path
        self._copied = 0

    def look(self) -> None:
        """Bring the copy up to date. On a full disk it is tried again."""
        size = os.fstat(self._source).st_size
        if size == self._copied:
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._copied = 0
            if size:
                self._write(os.pread(self._source, size, 0))
                self._copied = size

    def _write(self, content: bytes) -> None:
        file = HERE.create(self._path)
        try:
            file.write(content)
        except OSError:
            self._path.unlink(missing_ok=True)  # half a stack would be read as a whole one
            raise
        finally:
            file.close()

    def remove(self) -> None:
        os.close(self._source)
        if self._copied:
            self._path.unlink(missing_ok=True)


class _Served:
    """What the process keeps for its rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._files: dict[int, NewFile] = {}
        self._copies: dict[int, _Copy] = {}
        self._num_made = 0
        self._end: Path | None = None

    def create(self, path: Path) -> int:
        self._num_made += 1
        self._files[self._num_made] = HERE.create(path)
        return self._num_made

    def write(self, number: int, content: bytes) -> None:
        self._files[number].write(content)

    def has_name(self, number: int) -> bool:
        return self._files[number].has_name()

    def sync(self, number: int) -> None:
        self._files[number].sync()

    def close(self, number: int) -> None:
        self._files.pop(number).close()

    def keep_copy(self, path: Path) -> int:
        self._num_made += 1
        self._copies[self._num_made] = _Copy(_received_descriptor(self._connection), path)
        return self._num_made

    def remove_copy(self, number: int) -> None:
        self._copies.pop(number).remove()

    def note_end(self, path: Path) -> None:
        self._end = path

    def forget_end(self) -> None:
        self._end = None

    def write_end(self, parent: int, sent: Set[int]) -> None:
        """Write how the rank ended, if it did and was to be noted, with one of the signals that were sent before."""
        if self._end is None:
            return
        gives_up_at = time.monotonic() + _ORPHAN_SECONDS
        while os.getppid() == parent:
            if time.monotonic() > gives_up_at:
                return  # it has given up this process, and lives
            time.sleep(_ORPHAN_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            HERE.create(self._end.with_name(f"{self._end.name}-{min(sent, default=0):d}")).close()

    def answer(self, function: str | Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """Return whether the function, or the method of this name, returned, and what it returned or raised."""
        try:
            return True, (getattr(self, function) if isinstance(function, str) else function)(*arguments)
        except Exception as error:
            return False, error

    def look_at_copies(self) -> None:
        for copy in self._copies.values():
            copy.look()

    @property
    def seconds_between_looks(self) -> float:
        return _LOOK_SECONDS if self._copies else _PARENT_SECONDS


def main(descriptor: int, parent: int) -> None:
    """Serve the rank with the pid ``parent`` over a connection until it ends."""
    with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended
        serve(Connection(descriptor), parent)
    os._exit(0)


def serve(connection: Connection, parent: int) -> None:
    """Answer calls until the rank has ended; raise EOFError or ConnectionError if it ends the connection first."""
    served = _Served(connection)
    try:
        while True:
            if connection.poll(served.seconds_between_looks):
                function, arguments = connection.recv()
                connection.send_bytes(_pickled(*served.answer(function, arguments)))
            elif os.getppid() != parent:
                return
            served.look_at_copies()
    finally:
        # Blocked here, as a process beside a rank ends with it. Before files are written, which may take long: what is
        # sent meanwhile has not ended the rank.
        sent = signal.sigpending() & _THAT_END
        served.look_at_copies()  # those that the rank, which was killed, has not had removed
        served.write_end(parent, sent)


def _pickled(has_worked: bool, answer: Any) -> bytes:
    try:
        return pickle.dumps((has_worked, answer))
    except Exception as error:  # an exception that holds what cannot be sent
        return pickle.dumps((False, OSError(f"{answer!r} ({error!r})")))


def _send_descriptor(connection: Connection, descriptor: int) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        socket.send_fds(ours, [b"\0"], [descriptor])


def _received_descriptor(connection: Connection) -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as theirs:
        _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
    return descriptors[0]
