"""Jobs of four ranks that stop in different ways, all at the same time, forked from one process.

Argument: a folder. Each of ``SCENARIOS`` records into ``FOLDER/NAME``. When all have come to where they stop, and some
seconds more have passed, ``FOLDER/hanging`` is made; seconds later every rank that is left is killed.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commtrace
import commtrace.trace.files.writer  # once for all of them
from commtrace.trace.selection import QuietPlan

FOLDER = Path(sys.argv[1])
WORLD_SIZE = 4
STEPS = 5
FOREVER = 600.0
SECONDS_TO_GET_THERE = 120.0
SECONDS_OF_HANGING = 5.0

Groups = dict[str, Any]


def train(groups: Groups, steps: int = STEPS) -> None:
    """A few good steps in every group; then this rank is where it stops."""
    for step in range(steps):
        if step == STEPS - 1:
            (FOLDER / f"{os.getpid()}.ready").touch()
        with commtrace.step(step):
            for group in groups.values():
                if dist.get_rank(group) >= 0:
                    dist.all_reduce(torch.ones(10), group=group)


def one_sleeps_before_a_collective_of_a_subgroup(rank: int, groups: Groups) -> None:
    train(groups)
    with commtrace.step(STEPS):
        if rank == 2:
            with commtrace.span("load shard"):
                time.sleep(FOREVER)
        dist.all_reduce(torch.ones(10), group=groups["right" if rank > 1 else "left"])
    dist.barrier()


def one_sleeps_in_a_step_that_is_not_recorded(rank: int, groups: Groups) -> None:
    train(groups)
    with commtrace.step(next(step for step in itertools.count(STEPS) if QuietPlan(3).is_quiet(step))):
        dist.all_reduce(torch.ones(10))
        if rank == 2:
            time.sleep(FOREVER)
        dist.all_reduce(torch.ones(10), group=groups["right" if rank > 1 else "left"])
        dist.barrier()


def one_is_killed(rank: int, groups: Groups) -> None:
    train(groups)
    with commtrace.step(STEPS):
        if rank == 1:
            time.sleep(1.2)  # its last rows are written
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:  # gloo raises here, for the connection is closed
            dist.barrier(groups["left"])
        time.sleep(FOREVER)


def one_is_killed_and_the_others_raise(rank: int, groups: Groups) -> None:
    train(groups)
    with commtrace.step(STEPS):
        if rank == 1:
            time.sleep(1.2)  # its last rows are written
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # gloo raises, for the connections are closed


def two_are_killed_and_ddp_of_the_others_raises(rank: int, groups: Groups) -> None:
    train(groups)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
    if rank > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()  # gloo raises below the reducer, in C++


def one_calls_another_operation(rank: int, groups: Groups) -> None:
    train(groups)
    with commtrace.step(STEPS):
        if rank == 3:
            dist.broadcast(torch.ones(20), src=3)
            time.sleep(FOREVER)
        dist.all_reduce(torch.ones(10))


def one_waits_for_a_message_that_nobody_sends(rank: int, groups: Groups) -> None:
    train(groups)
    with commtrace.step(STEPS):
        if rank == 0:
            dist.recv(torch.ones(10), src=1, tag=7)
        dist.barrier()


def a_chain_through_groups(rank: int, groups: Groups) -> None:
    """0 waits for 1 (left), 1 and 3 for 2 (odd and right) — 2 is in no communication at all."""
    train(groups)
    with commtrace.step(STEPS):
        if rank == 0:
            dist.all_reduce(torch.ones(10), group=groups["left"])
        elif rank == 1:
            dist.all_reduce(torch.ones(10), group=groups["middle"])
        elif rank == 2:
            time.sleep(FOREVER)
        dist.all_reduce(torch.ones(10), group=groups["right"])


def two_wait_for_each_other(rank: int, groups: Groups) -> None:
    """1 waits for 2 in the middle, 2 for 3 on the right, 3 for 1 in the pair: a circle."""
    train(groups)
    with commtrace.step(STEPS):
        for name in {1: ["middle"], 2: ["right"], 3: ["outer"]}.get(rank, []):
            dist.all_reduce(torch.ones(10), group=groups[name])
        time.sleep(FOREVER)


def one_is_stopped_while_it_trains(rank: int, groups: Groups) -> None:
    """Its last half second is in no file: it was about to be written."""
    train(groups)
    stops_at = time.monotonic() + 1.0
    for step in itertools.count(STEPS):
        with commtrace.step(step):
            for group in groups.values():
                if dist.get_rank(group) >= 0:
                    dist.all_reduce(torch.ones(10), group=group)
        if rank == 2 and time.monotonic() > stops_at:
            os.kill(os.getpid(), signal.SIGSTOP)


def one_keeps_the_lock_of_its_interpreter(rank: int, groups: Groups) -> None:
    """After steps enough for its watch, which begins once its files are there, to know how long one takes."""
    begin = time.monotonic()
    train(groups)
    for step in itertools.count(STEPS):
        with commtrace.step(step):
            time.sleep(0.02)
            dist.all_reduce(torch.ones(10), group=groups["right" if rank > 1 else "left"])
        if rank == 2 and time.monotonic() > begin + 8.0:
            read, _write = os.pipe()
            ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)


def all_are_killed_while_they_train(rank: int, groups: Groups) -> None:
    train(groups, steps=10**6)


def all_end_well(rank: int, groups: Groups) -> None:
    train(groups)
    dist.barrier()
    dist.destroy_process_group()


SCENARIOS: dict[str, Callable[[int, Groups], None]] = {
    scenario.__name__: scenario
    for scenario in (
        one_sleeps_before_a_collective_of_a_subgroup,
        one_sleeps_in_a_step_that_is_not_recorded,
        one_is_killed,
        one_is_killed_and_the_others_raise,
        two_are_killed_and_ddp_of_the_others_raises,
        one_calls_another_operation,
        one_waits_for_a_message_that_nobody_sends,
        a_chain_through_groups,
        two_wait_for_each_other,
        one_is_stopped_while_it_trains,
        one_keeps_the_lock_of_its_interpreter,
        all_are_killed_while_they_train,
        all_end_well,
    )
}


RAISE = {
    one_is_killed_and_the_others_raise.__name__: (0, 2, 3),
    two_are_killed_and_ddp_of_the_others_raises.__name__: (0, 1),
}
"""Ranks that end with an exception. The machine may be busy: they are waited for."""

HANG_SECONDS = {one_keeps_the_lock_of_its_interpreter.__name__: 0.5}


def has_left_its_stack() -> bool:
    files = FOLDER.glob(f"{one_keeps_the_lock_of_its_interpreter.__name__}/rank-00002/stack-*")
    return any(file.stat().st_size for file in files)


def has_ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def run_rank(name: str, rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_RANK=str(rank))
    commtrace.start(
        commtrace.Config(dir=str(FOLDER / name), run_id=name, hang_seconds=HANG_SECONDS.get(name, 60.0), quiet=3)
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{FOLDER}/{name}.store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(minutes=10),
    )
    members = {"left": [0, 1], "right": [2, 3], "middle": [1, 2], "outer": [1, 3]}
    groups: Groups = {group: dist.new_group(ranks, group_desc=group) for group, ranks in members.items()}
    while not any(
        (FOLDER / name / f"rank-{rank:05d}").glob("spans-*")
    ):  # of a rank that is killed before nothing is known
        time.sleep(0.02)
    SCENARIOS[name](rank, groups)


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each process goes through all modules when it ends, and copies them
    processes, raising = [], []
    for name in SCENARIOS:
        for rank in range(WORLD_SIZE):
            process = os.fork()
            if process == 0:
                log = os.open(FOLDER / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 2)
                run_rank(name, rank)
                return
            processes.append(process)
            if rank in RAISE.get(name, ()):
                raising.append(process)
    deadline = time.monotonic() + SECONDS_TO_GET_THERE
    while time.monotonic() < deadline:
        is_ready = len(list(FOLDER.glob("*.ready"))) == len(processes) and has_left_its_stack()
        if is_ready and all(map(has_ended, raising)):
            break
        time.sleep(0.1)
    time.sleep(SECONDS_OF_HANGING)
    (FOLDER / "hanging").touch()
    time.sleep(SECONDS_OF_HANGING)
    for signal_sent in (signal.SIGSTOP, signal.SIGKILL):  # as if all at once: none sees another one go
        for process in processes:
            os.kill(process, signal_sent)
    for process in processes:
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
