"""Two plain actors of Ray train, and end in one way: ``ray_actors.py HOW DIRECTORY [OPTIONS]``.

HOW: shutdown, kill, exit, destroy, crash. OPTIONS, how DIRECTORY reaches them: start (the default), runtime_env, late.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import ray

HOW, DIRECTORY = sys.argv[1], sys.argv[2]
OPTIONS = sys.argv[3] if len(sys.argv) > 3 else "start"


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        import commtrace

        if OPTIONS == "start":
            commtrace.start(commtrace.Config(dir=DIRECTORY, run_id="ray"))
        else:
            import commtrace.auto
        if OPTIONS == "late":
            os.environ["COMMTRACE_DIR"] = DIRECTORY
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=2)

    def train(self) -> None:
        import torch
        import torch.distributed as dist

        for step in range(50):
            if HOW == "crash" and step == 20 and self._rank == 1:
                os.abort()
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.02)
        time.sleep(1.5)  # what is written takes half a second
        if HOW == "destroy":
            dist.destroy_process_group()

    def leave(self) -> None:
        ray.actor.exit_actor()


def main() -> None:
    variables = {"env_vars": {"COMMTRACE_DIR": DIRECTORY}} if OPTIONS == "runtime_env" else None
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=variables)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    trainer: Any = Trainer  # the decorator has made another class of it
    actors: list[Any] = [trainer.remote(rank, port) for rank in range(2)]
    try:
        ray.get([actor.train.remote() for actor in actors], timeout=60)
    except ray.exceptions.RayError:
        time.sleep(3)  # the other one waits for the one that has crashed
    if HOW == "kill":
        for actor in actors:
            ray.kill(actor)
        time.sleep(1)
    if HOW == "exit":
        for actor in actors:
            actor.leave.remote()
        time.sleep(2)
    ray.shutdown()


if __name__ == "__main__":
    main()
