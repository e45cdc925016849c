"""Files are written by a process beside this one, as they would be by this one."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commtrace.trace import side_process
from commtrace.trace.files import file_process
from commtrace.trace.files.file_process import FileProcess
from commtrace.trace.files.rank_files import json_files_below, segment_paths, size_of
from tests.waiting import until

PATIENCE_SECONDS = 20.0


@pytest.fixture
def files() -> Iterator[FileProcess]:
    process = FileProcess()
    yield process
    process.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_functions_are_called_in_another_process(files: FileProcess) -> None:
    assert files.call(os.getpid) == files.pid != os.getpid()


def test_an_exception_in_the_file_process_is_raised_here(files: FileProcess, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        files.call(segment_paths, tmp_path / "gone")
    assert raised.value.errno == errno.ENOENT
    assert raised.value.filename == str(tmp_path / "gone")


def test_a_file_is_written_as_here(files: FileProcess, tmp_path: Path) -> None:
    file = files.create(tmp_path / "new")
    file.write(b"ab")
    file.write(b"c" * 1_000_000)
    file.sync()
    assert file.has_name()
    (tmp_path / "new").rename(tmp_path / "renamed")
    assert file.has_name()
    assert (tmp_path / "renamed").read_bytes() == b"ab" + b"c" * 1_000_000
    (tmp_path / "renamed").unlink()
    assert not file.has_name()
    file.close()


def test_a_file_that_is_there_is_not_written_over(files: FileProcess, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "there")


def test_it_imports_nothing_large(files: FileProcess, tmp_path: Path) -> None:
    assert files.call(json_files_below, tmp_path, [], 10) == []
    assert not {"numpy", "pyarrow", "torch"} & set(files.call(_imported))


def _imported() -> list[str]:
    return list(sys.modules)


def test_it_ends_when_it_is_closed_and_answers_no_more(files: FileProcess) -> None:
    pid = files.call(os.getpid)
    files.close()
    until(lambda: not is_alive(pid))
    with pytest.raises(OSError, match="has ended"):
        files.call(os.getpid)


def test_another_one_takes_its_place_after_a_while(
    files: FileProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.create(tmp_path / "first")
    first = files.pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(OSError, match="has died"):
        files.call(os.getpid)
    with pytest.raises(OSError, match="another one is started soon"):
        files.call(os.getpid)
    monkeypatch.setattr(file_process, "_RESTART_SECONDS", 0.0)
    assert files.call(os.getpid) != first
    with pytest.raises(OSError, match="is gone"):
        file.write(b"of the one before")


def test_half_a_request_is_not_answered_by_the_next_one(
    files: FileProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_descriptor(connection: object, descriptor: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    first = files.call(os.getpid)
    with monkeypatch.context() as patch:
        patch.setattr(file_process, "_send_descriptor", has_no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            files.keep_copy(0, tmp_path / "copy")
    monkeypatch.setattr(file_process, "_RESTART_SECONDS", 0.0)
    assert files.call(size_of, tmp_path / "copy") is None
    assert files.call(os.getpid) == files.pid != first


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_calls_are_made_in_this_process_when_no_other_can_be_started(
    files: FileProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert files.call(os.getpid) == os.getpid()
    file = files.create(tmp_path / "new")
    file.write(b"abc")
    file.close()
    assert files.call(size_of, tmp_path / "new") == 3
    with pytest.raises(OSError, match="no process"):
        files.keep_copy(0, tmp_path / "copy")


def test_a_copy_follows_a_file_in_memory(files: FileProcess, tmp_path: Path) -> None:
    source, path = os.memfd_create("source"), tmp_path / "copy"
    remove = files.keep_copy(source, path)
    assert not path.exists()
    os.write(source, b"first")
    until(lambda: path.exists() and path.read_bytes() == b"first")
    os.write(source, b", second")
    until(lambda: path.exists() and path.read_bytes() == b"first, second")
    os.ftruncate(source, 0)
    until(lambda: not path.exists())
    os.pwrite(source, b"third", 0)
    until(path.exists)
    remove()
    assert not path.exists()
    os.close(source)


def test_a_copy_that_finds_no_room_leaves_nothing_until_there_is_room(files: FileProcess, tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk: the first 4 KiB fit, the next ones do not."""
    source, path = os.memfd_create("source"), tmp_path / "copy"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    files.call(signal.signal, signal.SIGXFSZ, signal.SIG_IGN)
    files.call(resource.setrlimit, resource.RLIMIT_FSIZE, (4096, limit))
    files.keep_copy(source, path)
    os.write(source, b"x" * 10_000)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert not path.exists() or path.stat().st_size <= 4096
        time.sleep(0.01)
    assert not path.exists()
    files.call(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    until(lambda: path.exists() and path.stat().st_size == 10_000)


RANK = """
import os, sys, time
from pathlib import Path
from commtrace.trace.files.file_process import FileProcess
files, source = FileProcess(), os.memfd_create("source")
files.keep_copy(source, Path(sys.argv[1]))
os.write(source, b"where it was")
child = os.fork() if sys.argv[2] == "fork" else 1
if child == 0:
    time.sleep(60)
print(files.call(os.getpid), child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("has_child", ["alone", "fork"])
def test_it_ends_with_a_rank_that_is_killed_and_leaves_the_copy(tmp_path: Path, has_child: str) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "copy"), has_child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pid, child = map(int, rank.stdout.readline().split())
        rank.kill()
    try:
        until(lambda: not is_alive(pid))
        assert (tmp_path / "copy").read_bytes() == b"where it was"
    finally:
        if has_child == "fork":
            os.kill(child, signal.SIGKILL)


ENDING = """
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path
from commtrace.trace.files import file_process
files = file_process.FileProcess()
path, how, dies = sys.argv[1:]
if dies == "before":
    os.kill(files.call(os.getpid), signal.SIGKILL)
    with suppress(OSError):
        files.call(os.getpid)
with suppress(OSError):
    files.note_end(Path(path))
if dies == "after":
    os.kill(files.pid, signal.SIGKILL)
    with suppress(OSError):
        files.call(os.getpid)
file_process._RESTART_SECONDS = 0
print(files.call(os.getpid), flush=True)
if how == "closes":
    file_process._END_SECONDS = 0
    files.close()
    os._exit(0)
elif how == "gives it up":
    files.__del__()
    print("lives", flush=True)
    time.sleep(1)
else:
    time.sleep(60)
"""


@pytest.mark.parametrize("dies", ["never", "before", "after"])
@pytest.mark.parametrize(
    ("how", "noted"), [("killed", ["ended-0"]), ("signalled", ["ended-15"]), ("closes", []), ("gives it up", [])]
)
def test_how_a_rank_ended_is_noted_if_it_says_nothing_itself(
    tmp_path: Path, how: str, noted: list[str], dies: str
) -> None:
    """By the process beside it, or by the one that has taken its place."""
    command = [sys.executable, "-c", ENDING, str(tmp_path / "ended"), how, dies]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        if how == "killed":
            rank.kill()
        elif how == "signalled":
            os.killpg(rank.pid, signal.SIGTERM)  # as torchrun does, with all that a rank has started
        elif how == "gives it up":
            assert rank.stdout.readline() == "lives\n"
        until(lambda: not is_alive(pid))
        assert [path.name for path in tmp_path.iterdir()] == noted


SIGNALLED_LATER = """
import contextlib, multiprocessing, os, signal, sys
from pathlib import Path
from commtrace.trace.files import file_process
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
file_process._Served.look_at_copies = lambda served: os.kill(os.getpid(), signal.SIGTERM)
rank, files = multiprocessing.Pipe()
rank.send(("note_end", (Path(sys.argv[1]),)))
rank.close()
with contextlib.suppress(ConnectionError):
    file_process.serve(files, parent=0)
"""


def test_a_signal_that_is_sent_while_copies_are_written_came_after_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALLED_LATER, str(tmp_path / "ended")]
    subprocess.run(command, timeout=60, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ended-0"]


def test_a_process_that_dies_before_it_is_told_of_the_end_is_replaced(
    files: FileProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.note_end(tmp_path / "ended")
    first = files.pid
    os.kill(first, signal.SIGKILL)
    monkeypatch.setattr(file_process, "_RESTART_SECONDS", 0.0)
    with pytest.raises(OSError, match="has died"):
        files.call(os.getpid)
    answer = files._answer

    def dies(function: object, *arguments: object) -> object:
        if function == "note_end":
            os.kill(files.pid, signal.SIGKILL)
        return answer(function, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(files, "_answer", dies)
        with pytest.raises(OSError, match="has died"):
            files.call(os.getpid)
    assert files.call(os.getpid) not in (first, os.getpid())


FORKED = """
import os
from commtrace.trace.files.file_process import FileProcess
files = FileProcess()
pid = files.call(os.getpid)
child = os.fork()
if child == 0:
    files.abandon_after_fork()
    os._exit(0)
os.waitpid(child, 0)
assert files.call(os.getpid) == pid
files.close()
"""


def test_a_forked_child_lets_go_of_it_without_a_warning() -> None:
    command = [sys.executable, "-X", "dev", "-c", FORKED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_it_ignores_what_launchers_send_to_all(files: FileProcess) -> None:
    pid = files.call(os.getpid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    assert files.call(os.getpid) == pid


def test_threads_share_it(files: FileProcess, tmp_path: Path) -> None:
    def write(number: int) -> None:
        file = files.create(tmp_path / str(number))
        for _ in range(100):
            file.write(b"x")
        file.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert [files.call(size_of, tmp_path / str(number)) for number in range(8)] == [100] * 8


def test_a_result_that_cannot_be_sent_back_is_an_error(files: FileProcess) -> None:
    with pytest.raises(OSError, match="lock"):
        files.call(threading.Lock)
    assert files.call(os.getpid) == files.pid


def test_a_process_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "")
        with pytest.raises(side_process.NotStartedError, match="its own executable"):
            side_process.start("commtrace.trace.files.file_process")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(side_process.NotStartedError, match="the program itself"):
        side_process.start("commtrace.trace.files.file_process")
