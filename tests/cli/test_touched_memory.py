"""Memory is touched ahead: as much as will be needed at least, in huge pages where these are no slower."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from commtrace.cli import memory
from commtrace.cli.touched_memory import Heap, available_memory

MIB = 1 << 20
HUGE = 2 * MIB
POPULATE = 23
TIMEOUT_S = 60


class _System:
    """Notes what it is advised, and takes so long for the n-th huge page, or refuses it."""

    def __init__(self, took_s: Callable[[int], float] = lambda _: 0.0002, refuses: bool = False) -> None:
        self.advised: list[tuple[int, int, int]] = []
        self.now_s = 0.0
        self._took_s, self._refuses = took_s, refuses

    def madvise(self, address: int, length: int, advice: int) -> int:
        if advice == POPULATE and length == HUGE:
            self.now_s += self._took_s(sum(length == HUGE for _, length in self.touched))
        self.advised.append((address, length, advice))
        return -1 if self._refuses and advice == POPULATE else 0

    @property
    def touched(self) -> list[tuple[int, int]]:
        return [(address, length) for address, length, advice in self.advised if advice == POPULATE]

    def heap(self, *parts: range) -> Heap:
        return Heap(self.madvise, parts, clock_s=lambda: self.now_s)


def _touch(heap: Heap, num_bytes: int) -> None:
    heap.touch(num_bytes)
    deadline = time.monotonic() + TIMEOUT_S
    while heap._thread is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_whole_huge_pages_are_touched_from_the_begin_on_and_each_of_them_once() -> None:
    system = _System()
    heap = system.heap(range(HUGE - 4096, 100 * MIB))
    _touch(heap, 7 * MIB)
    _touch(heap, 5 * MIB)
    _touch(heap, 9 * MIB)

    # From 2 MiB - 4 KiB on 9 MiB reach to 11 MiB - 4 KiB.
    assert system.touched == [(2 * MIB, HUGE), (4 * MIB, HUGE), (6 * MIB, HUGE), (8 * MIB, HUGE)]


def test_no_more_is_touched_than_there_is() -> None:
    system = _System()
    _touch(system.heap(range(7 * MIB), range(8 * MIB, 64 * MIB)), 50 * MIB)

    assert system.touched == [(0, HUGE), (2 * MIB, HUGE), (4 * MIB, HUGE)]


def test_where_huge_pages_are_slow_the_rest_is_to_be_of_small_ones() -> None:
    system = _System(took_s=lambda number: 0.0045 if number % 2 else 0.0002)
    _touch(system.heap(range(64 * MIB), range(64 * MIB, 100 * MIB)), 40 * MIB)

    # The fourth slow one is the eighth of all.
    assert system.touched[:8] == [(number * HUGE, HUGE) for number in range(8)]
    assert system.touched[8:] == [(16 * MIB, 8 * MIB), (24 * MIB, 8 * MIB), (32 * MIB, 8 * MIB)]
    assert [one for one in system.advised if one[2] != POPULATE] == [
        (16 * MIB, 48 * MIB, mmap.MADV_NOHUGEPAGE),
        (64 * MIB, 36 * MIB, mmap.MADV_NOHUGEPAGE),
    ]


def test_a_system_that_refuses_is_not_asked_again() -> None:
    system = _System(refuses=True)
    heap = system.heap(range(64 * MIB))
    _touch(heap, 40 * MIB)
    _touch(heap, 50 * MIB)

    assert system.touched == [(0, HUGE)]


def test_a_heap_without_address_space_touches_nothing() -> None:
    system = _System()
    _touch(system.heap(), 40 * MIB)

    assert system.advised == []


def test_what_is_asked_for_while_a_thread_touches_is_touched_too() -> None:
    for _ in range(200):
        system = _System()
        heap = system.heap(range(1000 * MIB))
        begin = threading.Barrier(3)

        def ask(megabytes: int, heap: Heap = heap, begin: threading.Barrier = begin) -> None:
            begin.wait(TIMEOUT_S)
            for more in range(4):
                heap.touch((megabytes + 3 * more) * MIB)

        threads = [threading.Thread(target=ask, args=(size,), daemon=True) for size in (11, 20)]
        for thread in threads:
            thread.start()
        begin.wait(TIMEOUT_S)
        for thread in threads:
            thread.join(TIMEOUT_S)
        _touch(heap, 0)
        assert system.touched == [(number * HUGE, HUGE) for number in range(29 // 2)]


def test_real_memory_is_touched_and_keeps_what_is_in_it() -> None:
    ctypes = pytest.importorskip("ctypes")
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(mmap, "MADV_HUGEPAGE") or not hasattr(libc, "madvise"):
        pytest.skip("this system takes no such advice")
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    region = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region[20 * MIB : 20 * MIB + 5] = b"kept!"
    buffer = ctypes.c_char.from_buffer(region)
    address = ctypes.addressof(buffer)
    del buffer
    before = _resident()
    _touch(Heap(libc.madvise, [range(address, address + 32 * MIB)]), 32 * MIB)

    assert region[20 * MIB : 20 * MIB + 5] == b"kept!"
    if _resident() == before:
        pytest.skip("this kernel touches nothing ahead")
    assert _resident() - before > 20 * MIB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _system(folder: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """4,096,000 bytes are available; the process is in these groups, in which these files lie."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       24684252 kB\nMemAvailable:       4000 kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return proc, cgroups


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 4_096_000),
        ("0::/\n", {"memory.max": "max", "memory.current": "9"}, 4_096_000),
        ("0::/\n", {"memory.max": "3000000", "memory.current": "1000000"}, 2_000_000),
        # The limit of a job is that of a group around the one of its step.
        (
            "0::/slurm/job_1/step_0\n",
            {
                "slurm/job_1/memory.max": "3000000",
                "slurm/job_1/memory.current": "1000000",
                "slurm/job_1/step_0/memory.max": "max",
                "slurm/job_1/step_0/memory.current": "9",
            },
            2_000_000,
        ),
        # Version 1, its number of "no limit" and a smaller one.
        (
            "5:devices:/x\n4:cpu,memory:/job\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1000000",
                "memory/job/memory.limit_in_bytes": "1500000",
                "memory/job/memory.usage_in_bytes": "500000",
            },
            1_000_000,
        ),
        ("0::/\n", {"memory.max": "1", "memory.current": "x"}, 0),
        ("0::/\n", {"memory.max": "1"}, 0),
        ("what?\n", {}, 0),
    ],
)
def test_limits_of_containers_and_jobs_count(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    assert available_memory(*_system(tmp_path, groups, files)) == expected


def test_where_nothing_tells_what_is_available_nothing_is(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is to be touched, where 1 GiB is available."""
    sizes: list[int] = []
    monkeypatch.setattr(memory, "_heap", SimpleNamespace(touch=sizes.append))
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 30)
    return sizes


def test_a_runs_files_tell_what_it_needs_at_least(tmp_path: Path, asked: list[int]) -> None:
    for rank, size in itertools.product(range(2), (1000, 500)):
        folder = tmp_path / f"rank-{rank:05d}"
        folder.mkdir(exist_ok=True)
        (folder / f"spans-{size:04d}.arrows").write_bytes(b"x" * size)
        (folder / "notes.txt").write_bytes(b"x" * 100_000)
    (tmp_path / "truth.json").write_text("{}")
    memory._expect_files(tmp_path)

    assert asked == [25 * 3000]


@pytest.mark.parametrize("where", ["missing", "truth.json"])
def test_what_is_no_run_is_left_to_whoever_reads_it(tmp_path: Path, asked: list[int], where: str) -> None:
    (tmp_path / "truth.json").write_text("{}")
    memory._expect_files(tmp_path / where)

    assert asked == []


def test_rows_tell_it_too_unless_memory_is_short(asked: list[int]) -> None:
    memory.expect_rows(1000)
    memory.expect_rows(10_000_000)

    assert asked == [400_000]


def test_without_a_thread_nothing_is_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    system = _System()
    heap = system.heap(range(64 * MIB))
    monkeypatch.setattr(threading.Thread, "start", fail)
    memory.expect_run(tmp_path)
    _touch(heap, 40 * MIB)

    assert system.touched == []
