"""Runs a training script on several processes, and never waits for a hang.

>>> completed = launch(["examples/train_megatron_gpt.py", "--iterations", "2"], nproc=4)   # doctest: +SKIP
>>> assert completed.returncode == 0, completed.stdout                                     # doctest: +SKIP
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from torch.distributed import ProcessGroup

REPOSITORY = Path(__file__).resolve().parents[2]

BY_KERNELS = REPOSITORY / "tests" / "e2e" / "programs" / "by_kernels.py"
"""Before the path of a program: what C++ issues is seen as on a torch without hooks of process groups."""
WAYS = ((), (BY_KERNELS,)) if hasattr(ProcessGroup, "register_pre_hook") else ((),)
"""The ways to see what C++ issues that this version of torch has."""

_RANKS = REPOSITORY / "tests" / "e2e" / "ranks.py"
_SECONDS_TO_DUMP_STACKS = 5.0
_SECONDS_TO_IMPORT = 120.0

_WITHOUT_FINDINGS = {"COMMTRACE_FINDINGS_SECONDS": "0"}
"""Rank 0 of hundreds of jobs would judge it at the end; test_findings_at_end.py has the jobs that do."""

_READ_AT_IMPORT = ("TORCH", "OMP", "PYTHON", "LD_")
"""Beginnings of variables that Python, the loader of libraries, or torch reads once."""

_ABORTED = "terminate called without an active exception"
"""What a process says in which Python has ended while a thread of gloo wanted the GIL. Of 60 plain DDP jobs, 7 without
commtrace ended so; of 120 with it, which waits for these threads, none."""
_TRIES = 3


class Completed(NamedTuple):
    """A job that has ended. ``stdout`` holds stderr too; after a timeout also the stacks of all its processes."""

    stdout: str
    returncode: int
    timed_out: bool = False


def launch(
    script_args: Sequence[str | Path],
    nproc: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> Completed:
    """Run ``torchrun --nproc-per-node nproc script_args`` from the root of the repository.

    ``env`` is added to the environment, from which all COMMTRACE_* variables of the caller are removed. A job without
    commtrace that torch aborts as Python ends is run again.

    torchrun runs Python unbuffered: what print is given, and the end of the line, are writes of their own. A line that
    several ranks print is whole if it is one string, its end included.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return _run_job([*torchrun, *map(str, script_args)], env, timeout)


def fork(
    script_args: Sequence[str | Path],
    nproc: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    imports: Sequence[str] = (),
) -> Completed:
    """Run a script as :func:`launch` does, on ranks that are forked from one process after it has imported torch.

    For what torchrun has no part in. Importing torch is most of what a small job costs, so one process does it for all
    jobs that a process of tests starts; but for those with variables that torch reads as it is imported. ``imports``
    are further modules that the script imports before commtrace.
    """
    modules = [word for module in imports for word in ("--import", module)]
    words = [*modules, str(nproc), *map(str, script_args)]
    if any(name.startswith(_READ_AT_IMPORT) and name != "PYTHONPATH" for name in env or {}):
        return _run_job([sys.executable, "-u", str(_RANKS), *words], env, timeout)
    return _run_job(words, env, timeout, start=_start_forked)


fork_with_megatron = functools.partial(fork, imports=["megatron.core"])

Starter: TypeAlias = Callable[..., Completed]
""":func:`launch` or :func:`fork`."""


def _run_job(
    command: Sequence[str], env: Mapping[str, str] | None, timeout: float, start: _Start | None = None
) -> Completed:
    for _ in range(_TRIES):
        completed = _run(command, env, timeout, start or _start)
        if not (_is_off(env or {}) and completed.returncode and _ABORTED in completed.stdout):
            break
    return completed


def _is_off(env: Mapping[str, str]) -> bool:
    return env.get("COMMTRACE_ENABLED") == "0"


def run(command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120.0) -> Completed:
    """Run any command from the root of the repository, with the environment and the hard timeout of :func:`launch`."""
    return _run(command, env, timeout, _start)


def _run(command: Sequence[str], env: Mapping[str, str] | None, timeout: float, start: _Start) -> Completed:
    # A file, not a pipe: a process that outlives the launcher would hold a pipe open and keep us waiting.
    with tempfile.NamedTemporaryFile() as output:
        process = start(command, _environment(env or {}), output.name)
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                _abort(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    note = f"\n[no end after {timeout:g} s: aborted; the stacks of its processes are above]" if timed_out else ""
    return Completed(text + note, process.returncode, timed_out)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE_")}
    usual = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **_WITHOUT_FINDINGS}
    return {**inherited, **usual, **more}


class _Process(Protocol):
    """A process that was started; what is used of subprocess.Popen."""

    pid: int
    returncode: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


_Start: TypeAlias = Callable[[Sequence[str], dict[str, str], str], _Process]
"""Starts a command with an environment, and a file for what it writes."""


def _start(command: Sequence[str], environment: dict[str, str], output: str) -> _Process:
    with open(output, "ab") as file:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


def _start_forked(words: Sequence[str], environment: dict[str, str], output: str) -> _Process:
    return _Forked(_server(), {"words": [*words], "environment": environment, "output": output})


class _Server:
    """The process that has imported torch. It ends with this one, which closes its standard input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(_RANKS), "--serve"],
            cwd=REPOSITORY,
            env=_environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select knows of every answer
            start_new_session=True,  # Ctrl-C is for this process, which ends the jobs
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        atexit.register(self.stop)

    def is_there(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, object]) -> None:
        self._requests.write(json.dumps(request).encode() + b"\n")

    def answer(self, seconds: float | None) -> int | None:
        """Return the next answer; None if there is none within so many seconds."""
        if not select.select([self._answers], [], [], seconds)[0]:
            return None
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the server of forked jobs ended with {self._process.wait()}")
        return int(line)

    def stop(self) -> None:
        """End it. What it forked goes on."""
        self._requests.close()
        try:
            self._process.wait(_SECONDS_TO_DUMP_STACKS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


_servers: list[_Server] = []
"""The newest one is last."""


def _server() -> _Server:
    if not _servers or not _servers[-1].is_there():
        _servers.append(_Server())
    return _servers[-1]


class _Forked:
    """A process that the server forked, which says when it has ended."""

    def __init__(self, server: _Server, job: Mapping[str, object]) -> None:
        server.ask(job)
        pid = server.answer(_SECONDS_TO_IMPORT)
        if pid is None:
            server.stop()  # its answer must not become that to another job
            raise RuntimeError(f"the server of forked jobs did not fork one within {_SECONDS_TO_IMPORT:g} s")
        self.pid = pid
        self.returncode: int = -1
        self._server = server
        self._has_ended = False

    def poll(self) -> int | None:
        return self._await(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._await(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("a forked job", timeout or 0.0)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            _signal([self.pid], signal.SIGKILL)

    def _await(self, seconds: float | None) -> int | None:
        if not self._has_ended:
            status = self._server.answer(seconds)
            if status is None:
                return None
            self.returncode = status
            self._has_ended = True
        return self.returncode


def _abort(process: _Process) -> None:
    """SIGABRT makes faulthandler write every thread's stack; what is left after that is killed.

    One process after the other, as they write word by word to one file; and the launcher, which would end the others
    when the first one has ended, is stopped meanwhile.
    """
    there = descendants(process.pid)
    _signal([process.pid], signal.SIGSTOP)
    deadline = time.monotonic() + _SECONDS_TO_DUMP_STACKS
    for pid in there:
        _signal([pid], signal.SIGABRT)
        while not _has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
    _signal([process.pid], signal.SIGCONT)
    deadline = time.monotonic() + _SECONDS_TO_DUMP_STACKS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal([*there, *descendants(process.pid)], signal.SIGKILL)
    process.kill()
    process.wait()


def descendants(pid: int) -> list[int]:
    """Processes below this one."""
    try:
        listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended meanwhile
        return []
    children = [int(child) for child in listing.split()]
    return children + [below for child in children for below in descendants(child)]


def _has_ended(pid: int) -> bool:
    """Also where its parent has not asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
