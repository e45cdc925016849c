"""A job of two worlds, trainers and rollout engines, two ranks of each, as four processes that one launcher starts.

Argument: what they do together.

* ``weights``: trainer 0 broadcasts weights to both engines, in a group that torch made for a store of its own.
* ``by_hand``: trainer i sends weights to engine i, in a group of all four that the script has put together.
* ``hangs``: as ``weights``, but engine 1 stays in its generation; all are killed after a while.
* ``begins``: both worlds begin at the same instant, communicate once, and end.

No launcher names ranks by their world: the script sets the variables before it imports commtrace, as Ray's actors do,
whose LOCAL_RANK is 0 everywhere.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo

ITERATIONS = 6
SECONDS_TO_MEET = timedelta(seconds=100)
SECONDS_OF_HANGING = 7.0
SECONDS_TO_BE_HEARD = 20.0

OF_LAUNCHER = int(os.environ["RANK"])
LAUNCHER = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=SECONDS_TO_MEET)
"""Stands for whatever the processes have in common, as Ray is."""
ROLE, RANK = ("trainer", OF_LAUNCHER) if OF_LAUNCHER < 2 else ("rollout", OF_LAUNCHER - 2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def port_of(name: str, is_ours: bool) -> int:
    """A port that one process chooses for all."""
    if is_ours:
        LAUNCHER.set(f"port of {name}", str(free_port()))
    return int(LAUNCHER.get(f"port of {name}"))


def meet(name: str) -> None:
    """Let all four wait for each other."""
    LAUNCHER.add(name, 1)
    while LAUNCHER.add(name, 0) < 4:
        time.sleep(0.0005)


def become_a_rank_of_a_world() -> None:
    for variable in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[variable]
    for variable in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        os.environ.pop(variable, None)
    port = port_of(ROLE, is_ours=RANK == 0)
    os.environ.update(RANK=str(RANK), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_PORT=str(port))


def store_of_group(number: int, size: int) -> Any:
    port = port_of("weights", is_ours=number == 0)
    return dist.TCPStore("127.0.0.1", port, size, is_master=number == 0, timeout=SECONDS_TO_MEET)


def weights_group(number: int) -> Any:
    """The group of trainer 0 and both engines, as slime and SGLang make it: its ranks are its own."""
    make: Any = distributed_c10d._new_process_group_helper
    group, _ = make(
        3, number, [], "gloo", PrefixStore("weights", store_of_group(number, 3)), group_name="weights",
        timeout=SECONDS_TO_MEET,
    )  # fmt: skip
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(3)}
    return group


def group_by_hand(number: int) -> Any:
    """The group of all, without any function of torch that makes groups, as NeMo-RL makes it for its refit."""
    store = PrefixStore("refit/", store_of_group(number, 4))
    make: Any = ProcessGroupGloo  # torch declares the timeout without its default
    group: Any = ProcessGroup(store, number, 4)
    backend = make(PrefixStore("cpu/", store), number, 4)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._set_group_name("refit")
    world: Any = distributed_c10d._world
    world.pg_map[group], world.pg_names[group] = ("gloo", store), "refit"
    world.pg_group_ranks[group] = {rank: rank for rank in range(4)}
    world.pg_backend_config[group] = "cpu:gloo"
    return group


def work() -> None:
    dist.all_reduce(torch.ones(16))
    time.sleep(0.01)


def sync_weights(hangs: bool = False) -> None:
    import commtrace

    member = 0 if ROLE == "trainer" and RANK == 0 else 1 + RANK if ROLE == "rollout" else None
    group = None if member is None else weights_group(member)
    weights = torch.full((16,), 1.0 if member == 0 else 0.0)
    for iteration in range(ITERATIONS):
        work()
        if hangs and iteration == ITERATIONS - 1 and (ROLE, RANK) == ("rollout", 1):
            with commtrace.span("generate"):
                end_all_after(SECONDS_OF_HANGING)
        if group is not None:
            dist.broadcast(weights, 0, group=group)
            assert weights.eq(1.0).all()


def send_weights() -> None:
    number = RANK if ROLE == "trainer" else 2 + RANK
    group = group_by_hand(number)
    weights = torch.full((16,), float(RANK) if ROLE == "trainer" else -1.0)
    for _ in range(ITERATIONS):
        work()
        if ROLE == "trainer":
            operations = [dist.P2POp(dist.isend, weights, number + 2, group=group)]
        else:
            operations = [dist.P2POp(dist.irecv, weights, number - 2, group=group)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        assert weights.eq(float(RANK)).all()
        dist.all_reduce(torch.ones(1), group=group)


def await_members() -> None:
    """Wait until all members of groups over worlds have been heard of, which is asked for in each pass."""
    from commtrace.recording import session

    assert session._current is not None
    groups = session._current.tracer.groups
    deadline = time.monotonic() + SECONDS_TO_BE_HEARD
    while time.monotonic() < deadline and any(None in state.group.members for _, state in groups.over_worlds):
        time.sleep(0.05)


def end_all_after(seconds: float) -> None:
    time.sleep(seconds)
    processes = [int(LAUNCHER.get(f"process {number}")) for number in range(4)]
    for process in [other for other in processes if other != os.getpid()] + [os.getpid()]:
        os.kill(process, signal.SIGKILL)


def main(what: str) -> None:
    become_a_rank_of_a_world()
    import commtrace.auto  # noqa: F401

    LAUNCHER.set(f"process {OF_LAUNCHER}", str(os.getpid()))
    meet("start")
    dist.init_process_group("gloo", timeout=SECONDS_TO_MEET)
    if what == "begins":
        work()
    elif what == "by_hand":
        send_weights()
    else:
        sync_weights(hangs=what == "hangs")
    await_members()
    meet("end")
    dist.destroy_process_group()
    meet("done")
    print(f"{ROLE} {RANK} has ended well\n", end="", flush=True)


main(sys.argv[1])
