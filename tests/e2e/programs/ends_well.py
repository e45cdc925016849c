"""A short training whose ranks end in the way that the first argument names; the second one starts workers itself."""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import commtrace.auto  # noqa: F401

STEPS = 20


def train() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    dist.barrier()


def end(how: str) -> None:
    is_first = dist.get_rank() == 0
    if how == "os_exit":
        dist.destroy_process_group()
        time.sleep(3 if is_first else 0)
        os._exit(0)
    elif how == "os_exit_without_destruction":
        time.sleep(1 if is_first else 0)
        os._exit(0)
    elif how == "exits_in_c":
        time.sleep(3 if is_first else 0)
        ctypes.CDLL(None)._exit(0)
    elif how == "killed_after_destruction":
        dist.destroy_process_group()
        time.sleep(3 if is_first else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif not is_first:
        if how in ("os_exit_1", "os_exit_at_sigterm"):
            os._exit(1)
        elif how == "os_exit_in_except":
            try:
                raise KeyError("on purpose")
            except KeyError:
                os._exit(3)
        elif how == "destroyed_and_os_exit_1":
            dist.destroy_process_group()
            os._exit(1)
        elif how in ("killed", "killed_alone"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segmentation_fault":
            ctypes.string_at(0)
        elif how == "aborted":
            os.abort()
    elif how == "os_exit_at_sigterm":
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
        time.sleep(60)  # until the launcher ends it
    elif how == "killed_alone":
        time.sleep(60)  # until the launcher ends it
    elif how == "destroyed_and_os_exit_1":
        dist.destroy_process_group()
        time.sleep(5)
    else:
        dist.barrier()


def work(rank: int, port: str, how: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    train()
    if how == "raises" and rank == 1:
        raise ValueError("on purpose")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        method, port = sys.argv[2:]
        mp.start_processes(work, args=(port, sys.argv[1]), nprocs=2, start_method=method)
    else:
        train()
        end(sys.argv[1])
