"""Single-rank jobs that come to different ends, or that cannot write: each in a forked process of its own.

Argument: a folder. For each of ``JOBS`` it is left with ``NAME`` (the run directory), ``NAME.log`` (its stderr),
``NAME.result`` (the result of its training), ``NAME.progress`` (the monotonic time in ns at the end of every step) and
``NAME.lateness`` (when a thread wanted to wake, and when it did). ``statuses.json`` says how each job ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commtrace
from commtrace.recording import session
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.schema import Row

FOLDER = Path(sys.argv[1])
AT_ONCE = 4
HALF_A_SECOND_NS = 500_000_000
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_GROUP = (CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS) / f"commtrace-tests-{os.getpid()}"


def train(name: str, seconds: float = 2.0, steps: int = 10**6) -> torch.Tensor:
    """Until the time is up, and for 20 steps at least: the result is that of these."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threading.Thread(target=note_lateness, args=[name], daemon=True).start()
    progress = os.open(FOLDER / f"{name}.progress", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    end = time.monotonic() + seconds
    weight = result = torch.ones(10)
    for step in range(steps):
        with commtrace.step(step):
            for _ in range(5):
                dist.all_reduce(weight)
                dist.all_reduce(weight, async_op=True).wait()
            weight = weight * 0.9 + 0.1
        os.write(progress, f"{time.monotonic_ns()}\n".encode())
        result = weight if step == 19 else result
        if time.monotonic() > end and step >= 19:
            break
        time.sleep(0.02)
    (FOLDER / f"{name}.result").write_text(str(result.tolist()))
    return weight


def note_lateness(name: str) -> None:
    """How late a thread wakes that sleeps half a second: what a busy machine adds to everything."""
    with (FOLDER / f"{name}.lateness").open("w") as file:
        while True:
            wanted = time.monotonic_ns() + HALF_A_SECOND_NS
            time.sleep(HALF_A_SECOND_NS / 1e9)
            print(wanted, time.monotonic_ns(), file=file, flush=True)


def record(name: str, steps_per_segment: int = 100) -> None:
    commtrace.start(commtrace.Config(dir=str(FOLDER / name), run_id=name, steps_per_segment=steps_per_segment))


def returns() -> None:
    record("returns")
    train("returns")
    dist.destroy_process_group()


def returns_at_once() -> None:
    record("returns_at_once")
    train("returns_at_once", steps=2)
    dist.destroy_process_group()


def never_destroys_its_groups() -> None:
    record("never_destroys_its_groups")
    train("never_destroys_its_groups")


def never_waits() -> None:
    record("never_waits")
    weight = train("never_waits")
    for _ in range(3):
        dist.all_reduce(weight, async_op=True)


def calls_sys_exit() -> None:
    record("calls_sys_exit")
    train("calls_sys_exit")
    sys.exit(3)


def raises() -> None:
    record("raises")
    train("raises")
    raise ArithmeticError("loss is NaN")


def calls_os_exit() -> None:
    record("calls_os_exit")
    train("calls_os_exit")
    os._exit(4)


def is_terminated() -> None:
    record("is_terminated")
    train("is_terminated")
    signal.raise_signal(signal.SIGTERM)


def is_killed(after_seconds: float) -> Callable[[], None]:
    def job() -> None:
        name = f"is_killed_after_{after_seconds}"
        record(name)
        threading.Timer(after_seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        train(name, seconds=60)

    return job


def fills_its_disk() -> None:
    """A limit on the size of files is met as a full disk is."""

    def fill() -> None:
        held = max(path.stat().st_size for path in (FOLDER / "fills_its_disk").rglob("*.arrows"))
        assert session._current is not None
        # The process that writes the files.
        resource.prlimit(session._current._files.pid, resource.RLIMIT_FSIZE, (held + 100, held + 100))

    record("fills_its_disk", steps_per_segment=10**6)
    threading.Timer(2.0, fill).start()
    train("fills_its_disk", seconds=4)


def may_not_write() -> None:
    """A file stands where the directory should be: root, too, is refused."""
    (FOLDER / "may_not_write").write_text("a file")
    record("may_not_write")
    train("may_not_write")


def loses_its_directory() -> None:
    record("loses_its_directory", steps_per_segment=10**6)
    threading.Timer(2.0, lambda: shutil.rmtree(FOLDER / "loses_its_directory")).start()
    train("loses_its_directory", seconds=4)


def fills_a_small_disk() -> None:
    """A file system of 64 KiB; what it holds in the end is copied to where it can be read."""
    disk = FOLDER / "small_disk"
    disk.mkdir()
    if mounted("fills_a_small_disk", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)):
        commtrace.start(commtrace.Config(dir=str(disk / "run"), run_id="fills_a_small_disk"))
        (disk / "other").write_bytes(bytes(40_000))
    train("fills_a_small_disk", seconds=4)
    commtrace.stop()
    shutil.copytree(disk, FOLDER / "fills_a_small_disk")


def has_a_read_only_disk() -> None:
    disk = FOLDER / "read_only_disk"
    disk.mkdir()
    if mounted("has_a_read_only_disk", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)):
        commtrace.start(commtrace.Config(dir=str(disk / "run"), run_id="has_a_read_only_disk"))
    train("has_a_read_only_disk")


def runs_out_of_descriptors() -> None:
    """No new segment can be opened for a while; at the end there are some again."""
    held: list[int] = []

    def exhaust() -> None:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, highest + 4))
        held.extend(iter(_one_more, -1))

    def free() -> None:
        for descriptor in held:
            os.close(descriptor)

    record("runs_out_of_descriptors", steps_per_segment=10)
    threading.Timer(2.0, exhaust).start()
    threading.Timer(3.5, free).start()
    train("runs_out_of_descriptors", seconds=4)


def _one_more() -> int:
    try:
        return os.dup(2)
    except OSError:
        return -1


def aborts() -> None:
    """As a failed assertion in C++ does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    record("aborts")
    train("aborts")
    os.abort()


def replace_write(write: Callable[[SegmentWriter, Sequence[Row]], None]) -> None:
    """Have all writers write in another way, for the rest of this process."""
    writers: Any = SegmentWriter
    writers.write = write


def has_a_slow_disk() -> None:
    """Each write takes longer than the time after which the next one is due."""
    write = SegmentWriter.write

    def slowly(writer: SegmentWriter, rows: Sequence[Row]) -> None:
        time.sleep(1.0)
        write(writer, rows)

    replace_write(slowly)
    record("has_a_slow_disk")
    train("has_a_slow_disk")
    dist.destroy_process_group()


def waits_for_its_disk() -> None:
    """From the third write on it does not answer, as a file server that is gone."""
    write, number = SegmentWriter.write, itertools.count()

    def never(writer: SegmentWriter, rows: Sequence[Row]) -> None:
        if next(number) >= 2:
            threading.Event().wait()
        write(writer, rows)

    replace_write(never)
    record("waits_for_its_disk")
    train("waits_for_its_disk")


def is_short_of_memory() -> None:
    """What it takes from here on is limited. Without commtrace it takes 130 MB, most of them for copies of what it
    shares with the process that it was forked from."""
    record("is_short_of_memory")
    limit_memory("is_short_of_memory", 160 << 20)
    train("is_short_of_memory")
    dist.destroy_process_group()


def limit_memory(name: str, num_bytes: int) -> None:
    """Move this process into a cgroup of its own. Where that is not allowed, ``NAME.skipped`` says so."""
    limit = "memory.limit_in_bytes" if MEMORY_GROUP.parent.name == "memory" else "memory.max"
    try:
        MEMORY_GROUP.mkdir()
        for file, value in ((limit, num_bytes), ("cgroup.procs", os.getpid())):
            with (MEMORY_GROUP / file).open("r+") as opened:
                opened.write(str(value))
    except OSError as error:
        (FOLDER / f"{name}.skipped").write_text(f"no memory limit of its own: {error}")


def mounted(name: str, *arguments: str) -> bool:
    """Mount something that only this process sees. Where that is not allowed, ``NAME.skipped`` says so."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private_below = 0x20000, 0x44000
    if libc.unshare(new_mounts) or libc.mount(None, b"/", None, private_below, None):
        reason = f"no mounts of its own: {os.strerror(ctypes.get_errno())}"
    else:
        told = subprocess.run(["mount", *arguments], stderr=subprocess.PIPE, text=True, check=False).stderr
        reason = f"no mounts of its own: {told}" if told else ""
    if reason:
        (FOLDER / f"{name}.skipped").write_text(reason)
    return not reason


def lacks_permission() -> None:
    """Root gives up the privilege to write everywhere, for this process and those that it starts."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    libc = ctypes.CDLL(None)
    libc.capget(header, sets)
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    libc.capset(header, sets)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    (FOLDER / "locked").mkdir(mode=0o500)
    commtrace.start(commtrace.Config(dir=str(FOLDER / "locked" / "run"), run_id="lacks_permission"))
    train("lacks_permission")


def aborts_its_group_and_goes_on_alone() -> None:
    """Its peer does not come to a collective, so it gives up the group, and is the only member of the next one."""
    name = "aborts_its_group_and_goes_on_alone"
    peer = os.fork()
    rank = int(peer == 0)
    if rank == 0:
        record(name)
    store = dist.FileStore(str(FOLDER / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for _ in range(5):
        dist.all_reduce(torch.ones(10))
    if rank == 1:
        time.sleep(60)
        os._exit(1)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()
    os.kill(peer, signal.SIGKILL)  # gloo does not stop what is under way, so that aborting a group would last as long
    os.waitpid(peer, 0)
    try:
        work.wait()
    except RuntimeError:
        dist.distributed_c10d._abort_process_group()
    train(name)
    dist.destroy_process_group()


def is_disabled() -> None:
    original = dist.ProcessGroup.__dict__["allreduce"]
    os.environ.update(COMMTRACE_ENABLED="0", COMMTRACE_DIR=str(FOLDER / "is_disabled"))
    commtrace.start()
    assert dist.ProcessGroup.__dict__["allreduce"] is original
    assert threading.active_count() == 1
    train("is_disabled")


def has_a_wrong_value() -> None:
    os.environ.update(COMMTRACE_STEPS="x", COMMTRACE_DIR=str(FOLDER / "has_a_wrong_value"))
    commtrace.start()
    train("has_a_wrong_value")


def has_an_unknown_variable() -> None:
    os.environ.update(COMMTRACE_UNKNOWN="1", COMMTRACE_DIR=str(FOLDER / "has_an_unknown_variable"))
    commtrace.start()
    train("has_an_unknown_variable")


def records_twice() -> None:
    for attempt in ("first", "second"):
        commtrace.start(commtrace.Config(dir=str(FOLDER / "records_twice"), run_id=attempt))
        train("records_twice", seconds=0.3)
        dist.destroy_process_group()
        commtrace.stop()


def handles_signals() -> None:
    """Its own handlers run, in the middle of its communication too, where they communicate themselves."""
    heard: list[int] = []

    def hear(number: int, _frame: object) -> None:
        with commtrace.span("handler"):
            dist.all_reduce(torch.ones(1))
        heard.append(number)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for number in numbers:
        signal.signal(number, hear)
    hook = sys.excepthook
    record("handles_signals")
    assert sys.excepthook is hook
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(0.01):
            if dist.is_initialized():
                os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    train("handles_signals", seconds=1.0)
    ended.set()
    sender.join()
    for number in numbers:
        assert signal.getsignal(number) is hear
        signal.raise_signal(number)
    assert heard.count(signal.SIGUSR1) > 10
    assert {signal.SIGTERM, signal.SIGINT} <= set(heard)
    dist.destroy_process_group()


def makes_its_groups_again() -> None:
    record("makes_its_groups_again")
    train("makes_its_groups_again", steps=20)
    for members in ([0], None):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1), group=dist.new_group(members))
    dist.destroy_process_group()


def sets_its_clock() -> None:
    """The wall clock jumps by an hour in either direction, again and again."""
    record("sets_its_clock")
    wall, jumps = time.time_ns, itertools.cycle((3_600 * 10**9, -3_600 * 10**9))
    time.time_ns = lambda: wall() + next(jumps)
    train("sets_its_clock", steps=30)


def fills_its_buffer() -> None:
    commtrace.start(commtrace.Config(dir=str(FOLDER / "fills_its_buffer"), run_id="fills_its_buffer", buffer_spans=4))
    train("fills_its_buffer", seconds=60, steps=30)


def forks_all_the_time() -> None:
    """Also while the recorder's thread is at work; the children go through the hooks and end."""
    record("forks_all_the_time")
    weight = train("forks_all_the_time", steps=20)
    for _ in range(60):
        child = os.fork()
        if child == 0:
            with commtrace.step(), commtrace.span("child"):
                commtrace.stop()
            os._exit(0)
        dist.all_reduce(weight)
        assert os.waitpid(child, 0)[1] == 0


JOBS: dict[str, Callable[[], None]] = {
    **{
        job.__name__: job
        for job in (
            returns, returns_at_once, never_destroys_its_groups, never_waits, calls_sys_exit, raises, calls_os_exit,
            is_terminated, fills_its_disk, may_not_write, loses_its_directory, is_disabled, has_a_wrong_value,
            has_an_unknown_variable, records_twice, handles_signals, makes_its_groups_again, sets_its_clock,
            fills_its_buffer, forks_all_the_time, fills_a_small_disk, has_a_read_only_disk, lacks_permission,
            aborts_its_group_and_goes_on_alone, runs_out_of_descriptors, aborts,
            has_a_slow_disk, waits_for_its_disk, is_short_of_memory,
        )
    },
    **{f"is_killed_after_{seconds}": is_killed(seconds) for seconds in (1.3, 1.7, 2.1)},
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each process goes through all modules when it ends, and copies them
    processes: dict[int, str] = {}
    statuses: dict[str, int] = {}
    for name, job in JOBS.items():
        if len(processes) == AT_ONCE:
            await_one(processes, statuses)
        process = os.fork()
        if process == 0:
            log = os.open(FOLDER / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 2)
            job()
            return
        processes[process] = name
    while processes:
        await_one(processes, statuses)
    with contextlib.suppress(FileNotFoundError):
        MEMORY_GROUP.rmdir()
    (FOLDER / "statuses.json").write_text(json.dumps(statuses))


def await_one(processes: dict[int, str], statuses: dict[str, int]) -> None:
    process, status = os.wait()
    statuses[processes.pop(process)] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
