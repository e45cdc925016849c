"""A command of commtrace on every rank, as ``torchrun -m commtrace`` starts it.

RANKS_PER_NODE=1 gives each rank a node. FAULT=SIGINT@12 sends rank 1 a signal before the twelfth call that is timed;
with PIDS, a folder for the numbers of all processes, all get it; ALL_AFTER=3 sends SIGTERM to all after 3 seconds.
ABSENT=5 lets a rank never begin; STOPPED=3 stops one when it should ask the others, until rank 0 has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from commtrace.benchmarks import device, preflight
from commtrace.cli.main import main

_TIMED = device.timed
_calls = 0


def _timed_until_the_fault(*arguments: Any) -> int:
    global _calls
    _calls += 1
    name, _, number = os.environ["FAULT"].partition("@")
    if _calls == int(number):
        if "PIDS" in os.environ:
            _send_all(signal.Signals[name])
        elif name == "SIGSTOP":
            Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.Signals[name])
    return _TIMED(*arguments)


def _send_all(number: int) -> None:
    for path in Path(os.environ["PIDS"]).iterdir():
        os.kill(int(path.read_text()), number)


def _stop(pid_file: Path) -> None:
    """Stop this process in the middle of the preflight, and leave a note of whom to end."""

    def stop(_targets: object) -> list[int]:
        pid_file.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return []

    module: Any = preflight
    module.unanswered = stop


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if "RANKS_PER_NODE" in os.environ:
        node = rank // int(os.environ["RANKS_PER_NODE"])
        os.environ.update(COMMTRACE_NODE_ID=f"node{node}", LOCAL_WORLD_SIZE=os.environ["RANKS_PER_NODE"])
        if "SLURM_STEP_NODELIST" in os.environ:
            os.environ["SLURMD_NODENAME"] = f"gpu{node}"
    if "FAULT" in os.environ and rank == 1:
        module: Any = device
        module.timed = _timed_until_the_fault
    if os.environ.get("ABSENT") == str(rank):
        sys.exit(0)
    if "PIDS" in os.environ:
        Path(os.environ["PIDS"], str(rank)).write_text(str(os.getpid()))
    if "ALL_AFTER" in os.environ and rank == 1:
        threading.Timer(float(os.environ["ALL_AFTER"]), _send_all, [signal.SIGTERM]).start()
    stopped = Path(os.environ.get("PID_FILE", "/nonexistent"))
    if os.environ.get("STOPPED") == str(rank):
        _stop(stopped)
    if os.environ.get("OTHERWISE") == str(rank):
        os.environ["NCCL_ALGO"] = "Tree"
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    try:
        main()
    finally:
        if rank == 0 and stopped.exists():
            os.kill(int(stopped.read_text()), signal.SIGKILL)
