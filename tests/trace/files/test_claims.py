"""Worlds that want the same run directory: each gets one, and a world that follows another one goes on in its."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import pytest

from commtrace.trace.files import claims
from commtrace.trace.files.claims import Claim, Holder, holder_of

HERE = Holder("a" * 16, "", 0, socket.gethostname(), "", os.getpid(), time.time_ns())


@pytest.fixture(autouse=True)
def boot_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of processes here needs the boot id of this host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        pytest.skip("no /proc")
    monkeypatch.setattr(f"{__name__}.HERE", HERE._replace(boot_id=boot.read_text().strip()))


def below(directory: Path) -> Callable[[int], Path]:
    return lambda number: directory / f"run-{number}"


def write_claim(folder: Path, holder: Holder, number: int = 0, *, seconds_ago: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"world-{number:04d}.json"
    path.write_text(json.dumps(holder._asdict()))
    at = time.time() - seconds_ago
    os.utime(path, (at, at))
    return path


def test_the_first_world_has_the_directory_and_keeps_it(tmp_path: Path) -> None:
    for _ in range(2):
        assert Claim(HERE, below(tmp_path)).settle() == 1

    assert holder_of(tmp_path / "run-1") == HERE
    assert [path.name for path in tmp_path.iterdir()] == ["run-1"]


def test_a_world_beside_another_one_that_lives_gets_the_next_directory(tmp_path: Path) -> None:
    living = HERE._replace(world="b" * 16, pid=os.getppid())
    write_claim(tmp_path / "run-1", living)
    write_claim(tmp_path / "run-2", living._replace(world="c" * 16))

    assert Claim(HERE, below(tmp_path)).settle() == 3


def test_a_world_that_follows_one_that_has_ended_goes_on_in_its_directory(tmp_path: Path) -> None:
    ended = HERE._replace(world="b" * 16, pid=2**22 + 1)
    write_claim(tmp_path / "run-1", ended)
    later = HERE._replace(world="b" * 16, pid=os.getpid(), session=1)  # its number is another process's by now
    write_claim(tmp_path / "run-1", later, 1)

    assert Claim(HERE._replace(pid=os.getpid() + 1), below(tmp_path)).settle() == 1
    assert holder_of(tmp_path / "run-1") == HERE._replace(pid=os.getpid() + 1)


def test_a_rank_finds_its_world_where_a_listing_on_the_network_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ELSEWHERE._replace(world=HERE.world, attempt=1)
    old = write_claim(tmp_path / "run-1", ELSEWHERE)
    listing = SimpleNamespace(path=str(old), name=old.name)
    write_claim(tmp_path / "run-1", own, 1)
    monkeypatch.setattr("commtrace.trace.files.claims.os.scandir", lambda folder: [listing])

    assert Claim(own, below(tmp_path)).settle() == 1


def test_a_later_world_of_the_same_process_goes_on_in_its_directory(tmp_path: Path) -> None:
    write_claim(tmp_path / "run-1", HERE._replace(world="b" * 16))

    assert Claim(HERE, below(tmp_path)).settle() == 1


def test_a_world_of_which_another_one_is_made_leaves_it_the_directory_though_its_process_lives(tmp_path: Path) -> None:
    before = HERE._replace(world="b" * 16, pid=os.getppid(), launch="one launch of both")
    write_claim(tmp_path / "run-1", before)
    own = HERE._replace(launch="one launch of both")

    assert Claim(own, below(tmp_path), predecessors={before.world}).settle() == 1
    assert holder_of(tmp_path / "run-1") == own
    # The other half of a world that divides finds that one there.
    other_half = own._replace(world="c" * 16, pid=os.getppid())
    assert Claim(other_half, below(tmp_path), predecessors={before.world}).settle() == 2


@pytest.mark.parametrize(("attempt", "number"), [(0, 2), (1, 1)])
def test_an_ended_world_of_a_launch_keeps_its_directory_unless_it_is_started_again(
    tmp_path: Path, attempt: int, number: int
) -> None:
    write_claim(tmp_path / "run-1", HERE._replace(world="b" * 16, launch="x", pid=2**22 + 1))

    assert Claim(HERE._replace(launch="x", attempt=attempt), below(tmp_path)).settle() == number


ELSEWHERE = HERE._replace(world="b" * 16, host="elsewhere", boot_id="other")


def test_a_world_on_another_host_that_writes_no_more_has_ended(tmp_path: Path) -> None:
    write_claim(tmp_path / "run-1", ELSEWHERE, seconds_ago=61)
    assert Claim(HERE, below(tmp_path)).settle() == 1


def test_a_world_on_another_host_that_has_just_written_lives(tmp_path: Path) -> None:
    write_claim(tmp_path / "run-1", ELSEWHERE, seconds_ago=3600)
    (tmp_path / "run-1" / "rank-00000").mkdir()
    (tmp_path / "run-1" / "rank-00000" / "spans-0000.arrows").touch()

    assert Claim(HERE, below(tmp_path)).settle() == 2


@pytest.mark.parametrize("it_writes", [True, False])
def test_a_restart_on_other_hosts_watches_whether_the_world_before_it_still_writes(
    tmp_path: Path, it_writes: bool
) -> None:
    written = write_claim(tmp_path / "run-1", ELSEWHERE, seconds_ago=5)
    now = 100.0
    claim = Claim(HERE._replace(attempt=1), below(tmp_path), now=lambda: now)

    assert claim.settle() is None
    now += 14
    assert claim.settle() is None
    if it_writes:
        os.utime(written)
    now += 2
    assert claim.settle() == (2 if it_writes else 1)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"world": 3}', '{"world": "b"}'])
def test_a_claim_that_is_being_written_or_damaged_is_one_for_a_minute(tmp_path: Path, content: str) -> None:
    claim = write_claim(tmp_path / "run-1", HERE)
    claim.write_text(content)
    assert Claim(HERE, below(tmp_path)).settle() == 2

    os.utime(claim, (1, 1))
    assert Claim(HERE, below(tmp_path)).settle() == 1


def _claim_when_told(directory: Path, number: int, go: Barrier, settled: Queue[int | None]) -> None:
    own = HERE._replace(world=f"{number:016x}", pid=os.getpid(), session=time.time_ns())
    go.wait()
    settled.put(Claim(own, below(directory)).settle())
    go.wait()  # it lives until all have settled


@pytest.mark.timeout(120)
def test_worlds_that_begin_at_the_same_instant_get_directories_of_their_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(25):
        go, settled = context.Barrier(4), context.Queue()
        worlds = [
            context.Process(target=_claim_when_told, args=(tmp_path / str(attempt), number, go, settled))
            for number in range(4)
        ]
        for world in worlds:
            world.start()
        for world in worlds:
            world.join(60)

        assert sorted(settled.get(timeout=10) for _ in worlds) == [1, 2, 3, 4]


def test_many_worlds_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_MOST_WORLDS", 1)
    write_claim(tmp_path / "run-1", HERE._replace(world="b" * 16, pid=os.getppid()))

    with pytest.raises(FileExistsError, match="1 worlds hold"):
        Claim(HERE, below(tmp_path)).settle()
