"""Ranks that are forked from a process which has imported torch: once, instead of once by torchrun and by each rank.

python tests/e2e/ranks.py 4 examples/train_megatron_gpt.py --iterations 2
python tests/e2e/ranks.py --import megatron.core 4 examples/train_megatron_gpt.py --iterations 2

With ``--serve``, jobs are read from standard input, a line of JSON for each, so that torch is imported once for all of
them. Written back are the number of the job's process and, when it has ended, its exit status.

A rank has the variables that ``torchrun --standalone`` gives it, and the store of the job is here as it is there. If a
rank fails the others are terminated.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch.distributed as dist

ADDRESS: Final = "127.0.0.1"


IMPORTED: Final = ("torch._dynamo", "pyarrow")
"""What optimizers import, which takes as long as torch itself, and what commtrace writes with."""


def serve() -> list[str]:
    """Fork a process for each job. Return the words of its job in that process."""
    import_modules(IMPORTED)
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            become(job["output"], job["environment"])
            return list(job["words"])
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def become(output: str, environment: dict[str, str]) -> None:
    """Make this process one that was started with this environment and this file for what it writes."""
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_APPEND)):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def import_modules(names: Sequence[str]) -> None:
    for module in names:
        if importlib.util.find_spec(module):
            importlib.import_module(module)
    gc.freeze()  # else each rank goes through all modules when it ends, and copies them


def main(imports: Sequence[str], number: int, script: str, arguments: Sequence[str]) -> None:
    listening = socket.create_server((ADDRESS, 0))
    port = listening.getsockname()[1]
    run_id = str(uuid.uuid4())
    ranks = {}
    import_modules((*IMPORTED, *imports))
    for rank in range(number):
        process = os.fork()
        if process == 0:
            listening.close()
            os.environ.update(variables(rank, number, port, run_id))
            execute(script, arguments)
            return
        ranks[process] = rank
    # Only now: it starts a thread, and a process with several is not to be forked.
    store = dist.TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    status = await_all(ranks)
    del store
    sys.exit(status)


def variables(rank: int, number: int, port: int, run_id: str) -> dict[str, str]:
    return {
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "ROLE_WORLD_SIZE": str(number),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def execute(script: str, arguments: Sequence[str]) -> None:
    """Run a script as Python runs the one that it is started with."""
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    names = sys.modules["__main__"].__dict__
    names["__file__"] = script
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), names)


def await_all(ranks: dict[int, int]) -> int:
    """Return 0, or 1 where a rank failed."""
    failed = False
    while ranks:
        process, status = os.wait()
        rank, code = ranks.pop(process), os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = True
            print(f"rank {rank} ended with {code}", flush=True)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return int(failed)


if __name__ == "__main__":
    words = sys.argv[1:] if sys.argv[1:] != ["--serve"] else serve()
    imported = []
    while words[0] == "--import":
        imported.append(words[1])
        del words[:2]
    main(imported, int(words[0]), words[1], words[2:])
